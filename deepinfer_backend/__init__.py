"""DeepInfer for Triton: what a user imports. Torch is loaded with the first use of `LLM`, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer_backend.torchvision_ops import make_torchvision_importable

if TYPE_CHECKING:
    from deepinfer_backend._core import RequestOutput
    from deepinfer_backend.llm import LLM
    from deepinfer_backend.outputs import Completion
    from deepinfer_backend.sampling_params import SamplingParams

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams"]

_HOMES = {
    "Completion": "deepinfer_backend.outputs",
    "LLM": "deepinfer_backend.llm",
    "RequestOutput": "deepinfer_backend._core",
    "SamplingParams": "deepinfer_backend.sampling_params",
}


make_torchvision_importable()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
