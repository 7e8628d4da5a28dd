"""The tiny text model with room for requests that run for minutes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny_text_model import make_tiny_text_model

MAX_POSITIONS = 65_536


def make_long_text_model(folder: Path) -> Path:
    path = make_tiny_text_model(folder)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MAX_POSITIONS
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
