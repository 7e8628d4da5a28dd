"""Dependencies point downward: triton → engine → worker → media → models → ops, and no torch in the core."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["ops", "models", "media", "worker", "engine", "triton"]
IMPORT = re.compile(r"^\s*(?:from|import) deepinfer_backend\.(\w+)", re.MULTILINE)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_only_layers_below_it(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    for path in (ROOT / "deepinfer_backend" / layer).rglob("*.py"):
        imported = set(IMPORT.findall(path.read_text(encoding="utf-8")))
        assert not imported & above, path


def test_only_the_triton_folder_knows_triton() -> None:
    for path in (ROOT / "deepinfer_backend").rglob("*.py"):
        if ROOT / "deepinfer_backend" / "triton" not in path.parents:
            assert "triton_python_backend_utils" not in path.read_text(encoding="utf-8"), path


def test_core_includes_no_torch() -> None:
    for path in (ROOT / "csrc" / "engine").iterdir():
        assert "torch" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("folder", ["decoder", "kernels"])
def test_only_the_registration_of_kernels_includes_torch(folder: str) -> None:
    for path in (ROOT / "csrc" / folder).rglob("*pp"):
        assert not re.search(r"#include <(torch|ATen|c10)/", path.read_text(encoding="utf-8")), path
