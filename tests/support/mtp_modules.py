"""Multi-token-prediction modules for models that were made for tests: random ones, and such as are always right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_WEIGHTS = "model.safetensors"


def forget_context(model: Path) -> Path:
    """Changes a model, its own module included, so that what follows a token depends on that token alone."""
    weights = load_file(model / _WEIGHTS)
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    save_file(weights, model / _WEIGHTS, metadata={"format": "pt"})
    return model


def random_module(hidden_size: int, layer: int) -> dict[str, torch.Tensor]:
    """All but the decoder layer; `layer`: its number."""
    generator = torch.Generator().manual_seed(5)
    return _named(
        layer,
        {
            "enorm": 1 + 0.1 * torch.randn(hidden_size, generator=generator),
            "hnorm": 1 + 0.1 * torch.randn(hidden_size, generator=generator),
            "shared_head.norm": 1 + 0.1 * torch.randn(hidden_size, generator=generator),
            "eh_proj": 0.2 * torch.randn(hidden_size, 2 * hidden_size, generator=generator),
        },
    )


def single_token_module(model: Path, layer: int, *, sign: float = 1.0) -> dict[str, torch.Tensor]:
    """One that makes of a token what a model without context makes of it; with sign -1 the unlikeliest comes first."""
    final_norm = load_file(model / _WEIGHTS)["model.norm.weight"]
    size = len(final_norm)
    ones = torch.ones(size)
    projection = torch.cat([sign * torch.eye(size), torch.zeros(size, size)], dim=1)
    return _named(layer, {"enorm": ones, "hnorm": ones.clone(), "shared_head.norm": final_norm, "eh_proj": projection})


def write_module(
    model: Path, folder: Path, module: dict[str, torch.Tensor], layer: int, draft_token_ids: Sequence[int] = ()
) -> Path:
    """Into a folder of its own; its decoder layer is the model's first once more."""
    prefix = "model.layers.0."
    weights = load_file(model / _WEIGHTS)
    copied = {
        f"model.layers.{layer}.{name.removeprefix(prefix)}": value.clone()
        for name, value in weights.items()
        if name.startswith(prefix)
    }
    if draft_token_ids:
        copied[f"model.layers.{layer}.draft_token_ids"] = torch.tensor(sorted(draft_token_ids), dtype=torch.int32)
    folder.mkdir(exist_ok=True)
    save_file({**copied, **module}, folder / _WEIGHTS)
    return folder


def add_module(model: Path, module: dict[str, torch.Tensor]) -> None:
    """To the model's own checkpoint, which has the decoder layer already."""
    weights = load_file(model / _WEIGHTS)
    save_file({**weights, **module}, model / _WEIGHTS, metadata={"format": "pt"})


def _named(layer: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"model.layers.{layer}.{name}.weight": value.clone() for name, value in tensors.items()}
