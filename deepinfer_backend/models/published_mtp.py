"""The multi-token-prediction modules that come with this package, and the models that they are for."""

from __future__ import annotations

from pathlib import Path

from deepinfer_backend.models.loader import BUNDLED_MODEL_FILE
from deepinfer_backend.models.model_files import referenced_gguf

_FOLDER = Path(__file__).parents[1] / "published_mtp"


def published_mtp_folder(model_path: Path) -> Path | None:
    """The folder of the model's module; None if there is none for it."""
    gguf_file = referenced_gguf(model_path)
    if gguf_file is None or gguf_file.name != BUNDLED_MODEL_FILE:
        return None
    return _FOLDER / "SmolLM2-135M-Instruct"
