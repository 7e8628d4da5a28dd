"""A model's folder → what runs it: the native decoder where it computes such a model, else transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.decoder_specs import read_decoder_spec
from deepinfer_backend.models.gguf_header import read_gguf_header
from deepinfer_backend.models.gguf_weights import GgufWeights, why_unreadable
from deepinfer_backend.models.interface import Model
from deepinfer_backend.models.llama_family import DecoderSpec
from deepinfer_backend.models.loader import load_config, load_model
from deepinfer_backend.models.model_files import read_json, referenced_gguf
from deepinfer_backend.models.native_model import NativeModel
from deepinfer_backend.models.packed_weights import PACKED_METHODS, packed_weights
from deepinfer_backend.models.safetensors_weights import SafetensorsWeights
from deepinfer_backend.models.vision_families import vision_family
from deepinfer_backend.models.weights import DequantizedWeights, WeightSource
from deepinfer_backend.ops.rank_world import TensorGroup
from deepinfer_backend.progress import show_progress

logger = logging.getLogger(__name__)


def load_engine_model(
    config: EngineConfig, path: Path, dtype: torch.dtype, device: torch.device, group: TensorGroup | None
) -> Model:
    """The same on every rank of an engine: its model, as `load_runnable_model` loads it."""
    return load_runnable_model(
        path,
        dtype,
        device,
        dequantize=config.dtype != "auto",
        has_adapters=bool(config.lora_modules),
        with_mtp_layer=config.speculative_config is not None and config.speculative_config.has_own_mtp_layer,
        num_expert_ranks=config.data_parallel_size if config.enable_expert_parallel else 1,
        group=group,
    )


def load_runnable_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dequantize: bool,
    has_adapters: bool,
    with_mtp_layer: bool = False,
    num_expert_ranks: int = 1,
    group: TensorGroup | None = None,
) -> Model:
    """The model in folder `path`, in `dtype` on `device`; to be called on the device's stream.

    dequantize: weights that are stored with few bits become `dtype` too. with_mtp_layer: a model that runs through
    transformers has one layer more, that of its multi-token-prediction module. num_expert_ranks: that share its
    experts. group: the ranks that share all of it.

    Raises:
        UnsupportedModelError: neither of the two ways computes it, or its files lack some of its weights.
    """
    method = _quantization_config(path).get("quant_method")
    sees_images = vision_family(path, device.type) is not None
    spec_or_reason = _why_not_here(dtype, device, has_adapters, sees_images) or read_decoder_spec(path)
    if isinstance(spec_or_reason, DecoderSpec) and method not in (None, *PACKED_METHODS):
        spec_or_reason = f"the quant_method of its weights is {method}"
    if num_expert_ranks > 1 and isinstance(spec_or_reason, DecoderSpec):
        spec_or_reason = "it is to share its experts (enable_expert_parallel)"
    if isinstance(spec_or_reason, DecoderSpec):
        source = open_weights(path)
        if dequantize:
            source = DequantizedWeights(source)
        with show_progress(f"Loading {path.name}") as advance:
            return NativeModel(spec_or_reason, source, dtype, advance, group)
    if method in PACKED_METHODS and device.type == "cpu":
        raise UnsupportedModelError(
            f"{path} has weights packed by {method}, which only native models read: {spec_or_reason}"
        )
    logger.info("%s runs through transformers: %s", path.name, spec_or_reason)
    # Most of a second to import, and only here of use.
    from transformers.distributed import DistributedConfig

    from deepinfer_backend.models.expert_parallel import shared_experts
    from deepinfer_backend.models.transformers_model import ATTENTION_NAME, TransformersModel

    fields = {"num_hidden_layers": load_config(path).num_hidden_layers + 1} if with_mtp_layer else {}
    distributed_config = None
    if num_expert_ranks > 1:
        distributed_config = shared_experts(load_config(path), num_expert_ranks)
    elif group is not None:
        distributed_config = DistributedConfig(tp_size=group.share.size)
    if sees_images:
        from deepinfer_backend.models.vision_model import VisionLanguageModel

        attention = {"text_config": ATTENTION_NAME}
        return VisionLanguageModel(load_model(path, dtype, device, attention, distributed_config, sees_images=True))
    module = load_model(path, dtype, device, ATTENTION_NAME, distributed_config, **fields)
    return TransformersModel(module, has_mtp_layer=with_mtp_layer)


def _quantization_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(path / "config.json").get("quantization_config") or {}
    return config


def _why_not_here(dtype: torch.dtype, device: torch.device, has_adapters: bool, sees_images: bool) -> str | None:
    if device.type != "cpu":
        return f"the device is {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype is {str(dtype).removeprefix('torch.')}"
    if has_adapters:
        return "its adapters change single projections (lora_modules)"
    if sees_images:
        return "it has a vision part"
    return None


def open_weights(path: Path) -> WeightSource:
    """Those in folder `path`, as they are stored.

    Raises:
        UnsupportedModelError: a file is damaged, or of a kind that is not read.
    """
    quantization_config = _quantization_config(path)
    gguf_file = referenced_gguf(path)
    # What is not read from there was dequantized when the file was converted.
    if gguf_file is not None and why_unreadable(read_gguf_header(gguf_file)) is None:
        return GgufWeights(gguf_file)
    stored = SafetensorsWeights(path)
    return packed_weights(stored, quantization_config) if quantization_config else stored
