"""A model's folder → what runs it: the native decoder where it computes such a model, else transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.conversion_cache import write_float32_weights
from deepinfer_backend.models.interface import Model
from deepinfer_backend.models.llama_family import decoder_spec, why_not_native
from deepinfer_backend.models.loader import load_config, load_model
from deepinfer_backend.models.native_model import NativeModel
from deepinfer_backend.models.packed_weights import packed_weights
from deepinfer_backend.models.safetensors_weights import SafetensorsWeights
from deepinfer_backend.models.weights import WeightSource
from deepinfer_backend.progress import show_progress

logger = logging.getLogger(__name__)


def load_runnable_model(path: Path, dtype: torch.dtype, device: torch.device, *, has_adapters: bool) -> Model:
    """The model in folder `path`, in `dtype` on `device`; to be called on the device's stream.

    Raises:
        UnsupportedModelError: neither of the two ways computes it, or its files lack some of its weights.
    """
    config = load_config(path)
    reason = _why_not_here(dtype, device, has_adapters) or why_not_native(config)
    if reason is None:
        source = _open_weights(path, config)
        if not isinstance(source, str):
            with show_progress(f"Loading {path.name}") as advance:
                return NativeModel(decoder_spec(config), source, dtype, advance)
        reason = source
    logger.info("%s runs through transformers: %s", path.name, reason)
    # Most of a second to import, and only here of use.
    from deepinfer_backend.models.transformers_model import ATTENTION_NAME, TransformersModel

    return TransformersModel(load_model(path, dtype, device, ATTENTION_NAME))


def _why_not_here(dtype: torch.dtype, device: torch.device, has_adapters: bool) -> str | None:
    if device.type != "cpu":
        return f"the device is {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype is {str(dtype).removeprefix('torch.')}"
    if has_adapters:
        return "its adapters change single projections (lora_modules)"
    return None


def _open_weights(path: Path, config: Any) -> WeightSource | str:
    """The folder's weights, or why they are not read."""
    write_float32_weights(path)
    stored = SafetensorsWeights(path)
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return stored
    try:
        return packed_weights(stored, quantization)
    except UnsupportedModelError as error:
        return error.message
