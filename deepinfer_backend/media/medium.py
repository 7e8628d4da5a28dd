"""Images and videos as requests bring them, whichever form they have there. Nothing is decoded here, and no torch."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.errors import InvalidRequestError, shown
from deepinfer_backend.models.vision_families import Kind

DATA_URL = "data:"
_BASE64_MARK = ";base64"
_NUM_CHANNELS = 3


class Medium(msgspec.Struct, frozen=True):
    """One image or video.

    `field`: where the request has it, such as "image.0". `data`: a file's bytes or, if there is a `shape`, the pixels
    of an array, uint8 RGB: [height, width, 3] of an image, [num_frames, height, width, 3] of a video.
    """

    field: str
    kind: Kind
    data: bytes
    shape: tuple[int, ...] | None = None


def from_wire(kind: Kind, field: str, value: bytes) -> Medium:
    """What a client wrote into a STRING tensor: a file, as it is, in base64 or as a data URL.

    Raises:
        InvalidRequestError: it is empty, an address of another kind, or not what its data URL says.
    """
    if not value:
        raise InvalidRequestError(f"{field} is empty: must be {_what_it_must_be(kind)}")
    if _is_address(value):
        return from_url(kind, field, value.decode("ascii", errors="replace"))
    try:
        # Of a file no byte is among its 64 characters for long.
        return Medium(field, kind, base64.b64decode(b"".join(value.split()), validate=True))
    except binascii.Error:
        return Medium(field, kind, bytes(value))


def from_url(kind: Kind, field: str, url: Any) -> Medium:
    """A data URL (RFC 2397) in base64. Nothing is fetched.

    Raises:
        InvalidRequestError: it is another URL, or its content is not base64.
    """
    if not isinstance(url, str) or not url.startswith(DATA_URL):
        raise InvalidRequestError(f"{field} is {shown(url)}: must be a data URL, since nothing is fetched")
    header, comma, content = url[len(DATA_URL) :].partition(",")
    if not comma or not header.endswith(_BASE64_MARK):
        raise InvalidRequestError(f"{field} is {shown(url)}: must be a data URL in base64")
    try:
        data = base64.b64decode(content, validate=True)
    except ValueError:
        raise InvalidRequestError(f"{field}: the data URL's content must be base64") from None
    if not data:
        raise InvalidRequestError(f"{field} is empty: must be {_what_it_must_be(kind)}")
    return Medium(field, kind, data)


def from_object(kind: Kind, field: str, value: Any) -> Medium:
    """What a Python program has: a path, a file's bytes, a data URL, an array or tensor of pixels, a PIL image; as a
    video also a list of images.

    Raises:
        InvalidRequestError: it is none of these, or there is no such file.
    """
    if isinstance(value, Medium):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Medium(field, kind, bytes(value))
    if isinstance(value, str) and _is_address(value.encode(errors="replace")):
        return from_url(kind, field, value)
    if isinstance(value, str | Path):
        try:
            return Medium(field, kind, Path(value).read_bytes())
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"{field} is {shown(str(value))}: cannot be read ({error})") from None
    return _from_pixels(kind, field, _pixels_of(kind, field, value))


def _is_address(value: bytes) -> bool:
    scheme, colon, _ = value[:16].partition(b":")
    return bool(colon) and scheme.isalpha()


def _pixels_of(kind: Kind, field: str, value: Any) -> NDArray[Any]:
    if isinstance(value, Sequence) and kind == "video":
        frames = [_pixels_of("image", f"{field}.{index}", frame) for index, frame in enumerate(value)]
        if len({frame.shape for frame in frames}) != 1:
            raise InvalidRequestError(f"{field} has {len(frames)} frames: must be one or more of one size")
        return np.stack(frames)
    if hasattr(value, "convert"):  # a PIL image
        return np.asarray(value.convert("RGB"))
    if hasattr(value, "__array__"):
        return np.asarray(value)
    raise InvalidRequestError(
        f"{field} is a {type(value).__name__}: must be bytes, a path, a data URL, an array or a PIL image"
    )


def _from_pixels(kind: Kind, field: str, pixels: NDArray[Any]) -> Medium:
    num_dims, form = (3, "[height, width, 3]") if kind == "image" else (4, "[num_frames, height, width, 3]")
    is_right = pixels.dtype == np.uint8 and pixels.ndim == num_dims and pixels.shape[-1] == _NUM_CHANNELS
    if not is_right or 0 in pixels.shape:
        raise InvalidRequestError(
            f"{field} is an array of {pixels.dtype} with shape {list(pixels.shape)}: must be uint8 {form}"
        )
    return Medium(field, kind, pixels.tobytes(), pixels.shape)


def with_article(kind: Kind) -> str:
    """For messages."""
    return "an image" if kind == "image" else "a video"


def _what_it_must_be(kind: Kind) -> str:
    return f"{with_article(kind)}: a file, in base64 or as it is"
