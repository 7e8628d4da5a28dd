"""The bundled model's other forms hold the same weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.model_files import convert_gguf
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 0.0), ("BF16", 2**-8), ("Q8_0", 1 / 127)])
def test_a_converted_file_has_the_same_metadata_and_weights(tmp_path: Path, kind: str, tolerance: float) -> None:
    source, target = write_tiny_gguf(tmp_path / "source.gguf"), tmp_path / "target.gguf"
    convert_gguf(source, target, kind)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    kept = [name for name in before.fields if not name.startswith("GGUF.") and name != "general.file_type"]
    assert {name: before.fields[name].contents() for name in kept} == {
        name: after.fields[name].contents() for name in kept
    }
    tensors = {tensor.name: tensor for tensor in after.tensors}
    assert list(tensors) == [tensor.name for tensor in before.tensors]
    for old in before.tensors:
        new = tensors[old.name]
        assert new.tensor_type.name == (kind if len(old.shape) > 1 else "F32")
        old_values, new_values = (gguf.dequantize(each.data, each.tensor_type) for each in (old, new))
        assert np.abs(new_values - old_values).max() <= tolerance * np.abs(old_values).max()
