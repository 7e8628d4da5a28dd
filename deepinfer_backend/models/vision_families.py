"""The vision-language models that take images and videos here, and in what they differ. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.model_files import read_json

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """kinds: what it takes. has_rope_positions: its rotary positions have three parts. sees_whole_images: a token of an
    image sees all of that image, so that no step may compute a part of one. mixes_kinds: in one request.
    """

    kinds: tuple[Kind, ...] = KINDS
    has_rope_positions: bool = False
    sees_whole_images: bool = False
    mixes_kinds: bool = True


VISION_FAMILIES = {
    "llava": VisionFamily(kinds=("image",)),
    "llava_onevision": VisionFamily(),
    "qwen2_vl": VisionFamily(has_rope_positions=True),
    "qwen2_5_vl": VisionFamily(has_rope_positions=True),
    "smolvlm": VisionFamily(mixes_kinds=False),
    "idefics3": VisionFamily(kinds=("image",)),
    "gemma3": VisionFamily(kinds=("image",), sees_whole_images=True),
}
"""By `model_type` of config.json."""

_LLAVA_TOWERS = ("clip_vision_model", "siglip_vision_model")


def vision_family(path: Path, device_type: str = "cpu") -> VisionFamily | None:
    """Of the model in folder `path`; None if it takes text alone on such a device, or media that are not known here.

    Raises:
        UnsupportedModelError: it is of a known family, but with another vision part.
    """
    config = read_json(path / "config.json")
    vision_config = config.get("vision_config") or {}
    family = VISION_FAMILIES.get(str(config.get("model_type")))
    if config.get("model_type") == "llava" and vision_config.get("model_type") not in _LLAVA_TOWERS:
        raise UnsupportedModelError(
            f"{path}: vision_config.model_type is {vision_config.get('model_type')!r}: must be "
            f"{' or '.join(_LLAVA_TOWERS)} for a llava model"
        )
    if family is not None and family.sees_whole_images and device_type != "cpu":
        return None  # attention there lets no token see what comes after it
    return family
