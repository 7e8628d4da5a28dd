"""The tiny text model with room for requests that run for minutes."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_text_model import make_tiny_text_model

MAX_POSITIONS = 65_536


def make_long_text_model(folder: Path, *, intermediate_size: int = 128) -> Path:
    """intermediate_size: how long a step takes."""
    return make_tiny_text_model(folder, max_position_embeddings=MAX_POSITIONS, intermediate_size=intermediate_size)
