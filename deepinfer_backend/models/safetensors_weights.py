"""The weights of a folder in safetensors format, as they are stored."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.model_files import weight_files

_OUTPUT_LAYER_PREFIX = "lm_head."
_MODEL_PREFIX = "model."


class SafetensorsWeights:
    """A `WeightSource` over mapped files: a tensor's pages are read when it is used, and nothing is kept.

    Raises (constructor):
        UnsupportedModelError: a file is missing.
    """

    quantization: str | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = [safe_open(path, framework="pt") for path in weight_files(folder)]
        stored = {name: (file, name) for file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
        # Who saves a model without its output layer leaves out the prefix too.
        prefix = "" if any(name.startswith(_MODEL_PREFIX) for name in stored) else _MODEL_PREFIX
        self._tensors = {
            name if name.startswith(_OUTPUT_LAYER_PREFIX) else prefix + name: place for name, place in stored.items()
        }

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UnsupportedModelError(f"{self._folder} lacks the weight {name}")
        file, stored_name = self._tensors[name]
        tensor = file.get_tensor(stored_name)  # type: ignore[no-untyped-call]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def matrix(self, name: str) -> torch.Tensor:
        return self.tensor(name)
