"""Media → pixels, within limits that are checked before anything is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.media.medium import Medium, with_article
from deepinfer_backend.models.model_files import one_line

# Some of Pillow's other formats run programs, or are not images that people send.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
# Made square by models that crop or resize by the shorter side, a line of pixels is larger than any image.
_MAX_ASPECT_RATIO = 200
_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")

# Sizes are checked here, before anything is decoded, and by one limit.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True, slots=True)
class DecodingLimits:
    """max_pixels: of an image, or of a video's frame. max_video_frames: of a video; num_video_frames: of those that are
    decoded."""

    max_pixels: int
    max_video_frames: int
    num_video_frames: int


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """frames: uint8 [num_frames, height, width, 3], those at `indices` of the video's num_total_frames; fps: of the
    video, None if nobody knows."""

    frames: NDArray[np.uint8]
    indices: list[int]
    num_total_frames: int
    fps: float | None


def decode_image(medium: Medium, limits: DecodingLimits) -> Image.Image:
    """In RGB with 8 bits, turned as its EXIF data say; of an animated one the first frame.

    Raises:
        InvalidRequestError: it is not an image, damaged, or exceeds a limit.
    """
    if medium.shape is not None:
        _check_size(medium, medium.shape[1], medium.shape[0], limits)
        return Image.fromarray(np.frombuffer(medium.data, np.uint8).reshape(medium.shape))
    try:
        image = Image.open(BytesIO(medium.data), formats=_IMAGE_FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequestError(f"{medium.field} is not an image: must be {_either_of(_IMAGE_FORMATS)}") from None
    except Exception as error:  # of a damaged header, anything
        raise _damaged(medium, error) from None
    _check_size(medium, *image.size, limits)
    try:
        image.load()
        return ImageOps.exif_transpose(_with_8_bits(medium, image)).convert("RGB")
    except (InvalidRequestError, MemoryError):
        raise
    except Exception as error:  # a decoder can raise anything
        raise _damaged(medium, error) from None


def decode_video(medium: Medium, limits: DecodingLimits) -> DecodedVideo:
    """All of its frames, or num_video_frames of them at equal distances.

    Raises:
        InvalidRequestError: it is not a video, damaged, or exceeds a limit.
    """
    if medium.shape is not None:
        frames = np.frombuffer(medium.data, np.uint8).reshape(medium.shape)
        num_frames, height, width = frames.shape[:3]
        _check_size(medium, width, height, limits)
        _check_num_frames(medium, num_frames, limits)
        indices = _spread(num_frames, limits.num_video_frames)
        return DecodedVideo(frames[indices], indices, num_frames, None)
    try:
        with av.open(BytesIO(medium.data)) as container:
            return _decode_streams(medium, container, limits)
    except (InvalidRequestError, MemoryError):
        raise
    except Exception as error:
        raise _damaged(medium, error) from None


def _decode_streams(medium: Medium, container: Any, limits: DecodingLimits) -> DecodedVideo:
    if not container.streams.video:
        raise InvalidRequestError(f"{medium.field} is not a video: must be a file with frames")
    stream = container.streams.video[0]
    _check_size(medium, stream.codec_context.width, stream.codec_context.height, limits)
    _check_num_frames(medium, stream.frames, limits)
    # A container may not know how many frames there are, or lie.
    num_frames = stream.frames or sum(1 for _ in _frames(medium, container, limits))
    if not num_frames:
        raise InvalidRequestError(f"{medium.field} has no frames: must have at least 1")
    if not stream.frames:
        container.seek(0)
    wanted = set(_spread(num_frames, limits.num_video_frames))
    frames, indices = [], []
    for index, frame in enumerate(_frames(medium, container, limits)):
        if index in wanted:
            frames.append(frame.to_ndarray(format="rgb24"))
            indices.append(index)
        if len(frames) == len(wanted):
            break
    if len(frames) != len(wanted) or len({frame.shape for frame in frames}) != 1:
        raise InvalidRequestError(f"{medium.field} is damaged: its frames are missing or of several sizes")
    fps = float(stream.average_rate) if stream.average_rate else None
    return DecodedVideo(np.stack(frames), indices, num_frames, fps)


def _frames(medium: Medium, container: Any, limits: DecodingLimits) -> Iterator[Any]:
    for count, frame in enumerate(container.decode(video=0), start=1):
        _check_num_frames(medium, count, limits)
        _check_size(medium, frame.width, frame.height, limits)
        yield frame


def _spread(num_frames: int, num_wanted: int) -> list[int]:
    if num_frames <= num_wanted:
        return list(range(num_frames))
    indices: list[int] = np.linspace(0, num_frames - 1, num_wanted).round().astype(int).tolist()
    return indices


def _with_8_bits(medium: Medium, image: Image.Image) -> Image.Image:
    if image.mode in _16_BIT_MODES or (image.mode == "I" and image.format == "PNG"):
        # Pillow would cut off what is above 255.
        values = np.asarray(image, dtype=np.int64) // 257
        narrow = Image.fromarray(values.clip(0, 255).astype(np.uint8))
        narrow.info, narrow.format = image.info, image.format
        return narrow
    if image.mode in ("I", "F"):
        raise InvalidRequestError(f"{medium.field} has pixels of 32 bits: must have 8 or 16 bits a color")
    return image


def _check_size(medium: Medium, width: int, height: int, limits: DecodingLimits) -> None:
    size = f"{medium.field} has {width} × {height} pixels"
    if width * height > limits.max_pixels:
        raise InvalidRequestError(f"{size}: must have at most {limits.max_pixels} (max_image_pixels)")
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequestError(
            f"{size}: the longer side must be at most {_MAX_ASPECT_RATIO} times as long as the shorter one"
        )


def _check_num_frames(medium: Medium, num_frames: int, limits: DecodingLimits) -> None:
    if num_frames > limits.max_video_frames:
        raise InvalidRequestError(
            f"{medium.field} has {num_frames} frames or more: must have at most {limits.max_video_frames} "
            "(max_video_frames)"
        )


def _damaged(medium: Medium, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"{medium.field} is damaged, or not {with_article(medium.kind)}: {one_line(error)}")


def _either_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
