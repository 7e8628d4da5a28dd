from pathlib import Path

import numpy as np
import pytest

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.media.decoding import DecodingLimits
from deepinfer_backend.media.medium import from_object
from deepinfer_backend.media.processing import PromptProcessor
from deepinfer_backend.media.prompt import MediaPrompt
from tests.support.vision_models import VISION_FAMILIES, make_vision_model


def test_smolvlm_refuses_images_and_videos_in_one_request(tmp_path: Path) -> None:
    family = VISION_FAMILIES["smolvlm"]
    processor = PromptProcessor(make_vision_model("smolvlm", tmp_path), DecodingLimits(10**6, 100, 8))
    media = [
        from_object("image", "image.0", np.zeros((64, 64, 3), np.uint8)),
        from_object("video", "video.0", np.zeros((4, 64, 64, 3), np.uint8)),
    ]
    with pytest.raises(InvalidRequestError, match=r"image and video: .* must not have both in one request"):
        processor.process(MediaPrompt(media, text=f"{family.image} {family.video} What?"))
