"""The forms in which a request brings an image or a video."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.media.medium import from_object, from_url, from_wire
from tests.support.media import encoded, frames, picture

PNG = encoded(picture(20, 10))
BASE64 = base64.b64encode(PNG)
URL = "data:image/png;base64," + BASE64.decode()


@pytest.mark.parametrize("value", [PNG, BASE64, BASE64[:50] + b"\n" + BASE64[50:], URL.encode()])
def test_bytes_base64_and_data_urls_are_one_file(value: bytes) -> None:
    assert from_wire("image", "image.0", value).data == PNG


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "is empty"),
        (b"http://localhost/a.png", "must be a data URL, since nothing is fetched"),
        (b"file:///etc/passwd", "must be a data URL"),
        (b"data:image/png,plain", "must be a data URL in base64"),
        (b"data:image/png;base64,", "is empty"),
        (b"data:image/png;base64,!!!", "must be base64"),
    ],
)
def test_nothing_is_fetched_and_nothing_empty_is_taken(value: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"image\.3") as refusal:
        from_wire("image", "image.3", value)
    assert reason in refusal.value.message


def test_a_path_is_read_here_and_never_over_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    assert from_object("image", "image.0", path).data == from_object("image", "image.0", str(path)).data == PNG
    with pytest.raises(InvalidRequestError, match="must be a data URL"):
        from_url("image", "image.0", str(path))
    assert from_wire("image", "image.0", str(path).encode()).data != PNG


def test_pixels_stay_what_they_are() -> None:
    array = np.asarray(picture(20, 10))
    images: list[Any] = [array, picture(20, 10)]
    for value in images:
        medium = from_object("image", "image.0", value)
        assert (medium.data, medium.shape) == (array.tobytes(), (10, 20, 3))
    clip = frames(3, 20, 10)
    videos: list[Any] = [clip, list(clip), [picture(20, 10, seed) for seed in range(3)]]
    for value in videos:
        medium = from_object("video", "video.0", value)
        assert (medium.data, medium.shape) == (clip.tobytes(), (3, 10, 20, 3))


@pytest.mark.parametrize(
    "value",
    [np.zeros((10, 20)), np.zeros((10, 20, 3)), np.zeros((3, 10, 20), np.uint8), np.zeros((0, 20, 3), np.uint8), 7, {}],
)
def test_what_is_no_image_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"image\.0 is an? "):
        from_object("image", "image.0", value)


def test_frames_of_several_sizes_are_no_video() -> None:
    with pytest.raises(InvalidRequestError, match=r"video\.0 has 2 frames: must be one or more of one size"):
        from_object("video", "video.0", [picture(20, 10), picture(10, 20)])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"image\.0 is '/nowhere/a.png': cannot be read"):
        from_object("image", "image.0", "/nowhere/a.png")
