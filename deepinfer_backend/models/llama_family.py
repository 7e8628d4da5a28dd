"""Which models the native decoder computes, and what it must know of them: from transformers' configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_backend.errors import shown

_HEAD_DIM_MULTIPLE = 4  # of the paged attention's cache


@dataclass(frozen=True, slots=True)
class _Family:
    """How a model_type differs from Llama. A name of a configuration's field stands for its value.

    query_key_value_bias, output_bias, mlp_bias: a field, or what is always so.
    layer_windows: its `layer_types` say which layers have the sliding window; else all have it.
    partial_rotary: a part of a head can be turned, the rest passed on.
    merged: query, key and value, and gate and up, are one matrix each in its files.
    """

    query_key_value_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    sliding_window: bool = False
    layer_windows: bool = False
    head_norms: bool = False
    partial_rotary: bool = False
    merged: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(query_key_value_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": _Family(sliding_window=True),
    "qwen2": _Family(query_key_value_bias=True, sliding_window=True, layer_windows=True),
    "qwen3": _Family(
        query_key_value_bias="attention_bias",
        output_bias="attention_bias",
        sliding_window=True,
        layer_windows=True,
        head_norms=True,
    ),
    "phi3": _Family(sliding_window=True, partial_rotary=True, merged=True),
}


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What the decoder computes. inv_freq: rotary_dim / 2 float32 values; windows: of each layer, 0 for none."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    inv_freq: tuple[float, ...]
    rotary_scaling: float
    windows: tuple[int, ...]
    query_key_value_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    merged: bool
    tied: bool


def why_not_native(config: Any) -> str | None:
    """Why the decoder does not compute a model of this configuration, as the end of a sentence; None if it does.

    What is not known to be computed alike is a reason: transformers then computes it.
    """
    family = _FAMILIES.get(config.model_type)
    if family is None:
        return f"model_type {config.model_type} is none of {', '.join(_FAMILIES)}"
    if getattr(config, "is_heterogeneous", False):
        return "its layers differ in size (per_layer_config)"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act is {shown(config.hidden_act)}"
    if getattr(config, "is_causal", True) is not True:
        return "is_causal is not true"
    head_dim = _head_dim(config)
    if head_dim % _HEAD_DIM_MULTIPLE:
        return f"head_dim is {head_dim}, not a multiple of {_HEAD_DIM_MULTIPLE}"
    if config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_attention_heads} heads do not share {config.num_key_value_heads} keys evenly"
    return _why_not_these_windows(config, family) or _why_not_this_rotary_embedding(config, family, head_dim)


def decoder_spec(config: Any) -> DecoderSpec:
    """For a configuration for which `why_not_native` has no reason."""
    family = _FAMILIES[config.model_type]
    inv_freq, rotary_scaling = _rotary_embedding(config, family)

    def has(bias: str | bool) -> bool:
        return bool(getattr(config, bias)) if isinstance(bias, str) else bias

    return DecoderSpec(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        inv_freq=tuple(inv_freq.tolist()),
        rotary_scaling=rotary_scaling,
        windows=_windows(config, family),
        query_key_value_bias=has(family.query_key_value_bias),
        output_bias=has(family.output_bias),
        mlp_bias=has(family.mlp_bias),
        head_norms=family.head_norms,
        merged=family.merged,
        tied=config.tie_word_embeddings,
    )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _why_not_these_windows(config: Any, family: _Family) -> str | None:
    layer_types = set(getattr(config, "layer_types", None) or ())
    if family.layer_windows:
        if unknown := sorted(layer_types - {"full_attention", "sliding_attention"}):
            return f"layer_types has {unknown[0]}"
    elif layer_types - {"full_attention"}:
        return f"layer_types is set, which {config.model_type} does not have"
    return None


def _windows(config: Any, family: _Family) -> tuple[int, ...]:
    window = int(config.sliding_window or 0) if family.sliding_window else 0
    if not family.layer_windows:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if layer_type == "sliding_attention" else 0 for layer_type in config.layer_types)


def _why_not_this_rotary_embedding(config: Any, family: _Family, head_dim: int) -> str | None:
    parameters = config.rope_parameters
    if not isinstance(parameters, dict) or "rope_type" not in parameters:
        return "rope_parameters differ between layers"
    if parameters["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        return f"rope_type is {shown(parameters['rope_type'])}"
    if not family.partial_rotary and parameters.get("partial_rotary_factor") not in (None, 1.0):
        return f"partial_rotary_factor is set, which {config.model_type} does not have"
    if int(head_dim * parameters.get("partial_rotary_factor", 1.0)) % 2:
        return "an odd number of a head's elements would be turned"
    return None


def _rotary_embedding(config: Any, family: _Family) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, and the scaling of cosines and sines."""
    parameters = config.rope_parameters
    if parameters["rope_type"] != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
        return inv_freq.float(), float(scaling)
    share = parameters.get("partial_rotary_factor", 1.0) if family.partial_rotary else 1.0
    rotary_dim = int(_head_dim(config) * share)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
