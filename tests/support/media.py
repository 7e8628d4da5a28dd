"""Pictures and videos for tests, drawn on the spot; and broken ones."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Blocks of random colors: what every codec keeps."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (max(1, height // 16), max(1, width // 16), 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def frames(num_frames: int, width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [num_frames, height, width, 3]."""
    return np.stack([np.asarray(picture(width, height, seed + index)) for index in range(num_frames)])


def video_file(pixels: NDArray[np.uint8], fps: int = 10) -> bytes:
    """Without loss, so that its frames are these."""
    file = BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("ffv1", rate=fps)
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "bgr0"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A whole, valid PNG with all pixels black, a few bytes a row: a decompression bomb if it is large."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    compress = zlib.compressobj(9)
    row = b"\0" + bytes((width + 7) // 8)
    data = b"".join(compress.compress(row) for _ in range(height)) + compress.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bad_images() -> Iterator[tuple[str, bytes, str]]:
    """(what it is, its bytes, a part of what it is refused with): 190 of them."""
    whole = {name: encoded(picture(96, 64, 1), name) for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
    rng = np.random.default_rng(0)
    for name, data in whole.items():
        for share in (0.02, 0.1, 0.3, 0.5, 0.8):
            yield f"{name} cut at {share}", data[: max(1, int(len(data) * share))], "image.0"
        for number in range(6):
            damaged = bytearray(data)
            damaged[: len(damaged) // 2] = rng.bytes(len(damaged) // 2)
            yield f"{name} with a random first half, {number}", bytes(damaged), "image.0"
    for number in range(60):
        yield f"random bytes {number}", rng.bytes(1 + number * 50), "is not an image"
    for number in range(20):
        yield f"a page named .png {number}", b"<!DOCTYPE html>" + b"<p>not a picture</p>" * number, "is not an image"
    for side in (9_000, 20_000):
        yield f"a bomb of {side}²", png_of_size(side, side), "max_image_pixels"
    for width, height in ((60_000, 1), (1, 60_000), (10_000, 40), (3, 700)):
        yield f"{width} × {height}", png_of_size(width, height), "the longer side must be at most 200 times"
    floats = Image.fromarray(np.ones((8, 8), np.float32))
    yield "pixels of 32 bits", encoded(floats, "TIFF"), "pixels of 32 bits"
    for text in (b"%PDF-1.7", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"<svg xmlns='x'/>", b"MZ\x90"):
        yield f"another format: {text[:6]!r}", text, "is not an image"
    for number in range(32):
        yield f"nothing but zeros, {number + 1}", bytes(number + 1), "is not an image"
    yield "an empty file", b"", "image.0"
