"""What a file becomes, and which files are refused before or while they are decoded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageOps

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.media.decoding import DecodingLimits, decode_image, decode_video
from deepinfer_backend.media.medium import Medium
from tests.support.media import bad_images, encoded, frames, picture, video_file

LIMITS = DecodingLimits(max_pixels=1_000_000, max_video_frames=50, num_video_frames=8)
WHOLE = picture(96, 64)
BAD_IMAGES = list(bad_images())


def image(data: bytes) -> Medium:
    return Medium("image.0", "image", data)


def video(data: bytes) -> Medium:
    return Medium("video.0", "video", data)


def _rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90°
    return encoded(WHOLE, "PNG", exif=exif)


def _wide(channels: int) -> bytes:
    values = np.asarray(WHOLE.convert("L" if channels == 1 else "RGB")).astype(np.uint16) * 257
    return encoded(Image.fromarray(values), "PNG")


RIGHT: dict[str, tuple[Callable[[], bytes], Image.Image, int]] = {
    "png": (lambda: encoded(WHOLE), WHOLE, 0),
    "bmp": (lambda: encoded(WHOLE, "BMP"), WHOLE, 0),
    "tiff": (lambda: encoded(WHOLE, "TIFF"), WHOLE, 0),
    "webp": (lambda: encoded(WHOLE, "WEBP", lossless=True), WHOLE, 0),
    "jpeg": (lambda: encoded(WHOLE, "JPEG", quality=100, subsampling=0), WHOLE, 6),
    "progressive jpeg": (lambda: encoded(WHOLE, "JPEG", quality=100, subsampling=0, progressive=True), WHOLE, 6),
    "cmyk": (lambda: encoded(WHOLE.convert("CMYK"), "TIFF"), WHOLE, 3),
    "gray": (lambda: encoded(WHOLE.convert("L")), WHOLE.convert("L").convert("RGB"), 0),
    "16 bits, gray": (lambda: _wide(1), WHOLE.convert("L").convert("RGB"), 0),
    "transparent": (lambda: encoded(WHOLE.convert("RGBA")), WHOLE, 0),
    "palette": (lambda: encoded(WHOLE.quantize(256)), WHOLE.quantize(256).convert("RGB"), 0),
    "black and white": (lambda: encoded(WHOLE.convert("1")), WHOLE.convert("1").convert("RGB"), 0),
    "turned by its EXIF data": (_rotated, WHOLE.transpose(Image.Transpose.ROTATE_270), 0),
    "animated": (
        lambda: encoded(WHOLE, "PNG", save_all=True, append_images=[ImageOps.invert(WHOLE)]),
        WHOLE,
        0,
    ),
    "large in one direction": (lambda: encoded(picture(2000, 10)), picture(2000, 10), 0),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_image_becomes_the_pixels_that_a_viewer_shows(name: str) -> None:
    data, expected, tolerance = RIGHT[name]
    decoded = decode_image(image(data()), LIMITS)
    assert (decoded.mode, decoded.size) == ("RGB", expected.size)
    difference = np.abs(np.asarray(decoded).astype(int) - np.asarray(expected))
    assert difference.max() <= tolerance


@pytest.mark.parametrize(("name", "data", "reason"), BAD_IMAGES, ids=[name for name, _, _ in BAD_IMAGES])
def test_a_bad_image_is_refused_by_name(name: str, data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^INVALID_ARG: image\.0 ") as refusal:
        decode_image(image(data), LIMITS)
    assert reason in refusal.value.message


def test_frames_come_out_as_they_went_in_with_their_times() -> None:
    pixels = frames(6, 48, 32)
    decoded = decode_video(video(video_file(pixels, fps=5)), LIMITS)
    assert np.array_equal(decoded.frames, pixels)
    assert (decoded.indices, decoded.num_total_frames, decoded.fps) == ([0, 1, 2, 3, 4, 5], 6, 5.0)


def test_of_a_long_video_frames_at_equal_distances_are_taken() -> None:
    pixels = frames(43, 48, 32)
    decoded = decode_video(video(video_file(pixels)), LIMITS)
    assert decoded.indices == [0, 6, 12, 18, 24, 30, 36, 42]
    assert np.array_equal(decoded.frames, pixels[decoded.indices])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "damaged"),
        (b"not a video" * 9, "damaged"),
        (video_file(frames(6, 48, 32))[:700], "has no frames"),
        (video_file(frames(51, 16, 16)), "must have at most 50 (max_video_frames)"),
        (video_file(frames(1, 1200, 1000)), "must have at most 1000000 (max_image_pixels)"),
    ],
    ids=["empty", "text", "cut", "too many frames", "too large"],
)
def test_a_bad_video_is_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^INVALID_ARG: video\.0 ") as refusal:
        decode_video(video(data), LIMITS)
    assert reason in refusal.value.message
