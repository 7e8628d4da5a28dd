"""Small random models of several families, made on the spot: real architectures, no weights to fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

VOCAB_SIZE = 512
MAX_POSITIONS = 2048

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.3,
}
_GATED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 128}

_CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_GATED),
    "qwen3": lambda: Qwen3Config(**_GATED, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(
        tie_word_embeddings=False,
        **_GATED,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": lambda: MixtralConfig(**_GATED, num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON, intermediate_size=128),
}

FAMILIES = sorted(_CONFIGS)


def make_random_model(family: str, folder: Path, **changes: Any) -> Path:
    """Writes a random model of the family, in float32 and without a tokenizer, and returns its folder.

    changes: fields of its configuration and their values.
    """
    torch.manual_seed(0)
    config: AutoConfig = _CONFIGS[family]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = folder / family
    model.save_pretrained(path)
    return path


def make_similar_model(path: Path, folder: Path, noise: float = 0.05) -> Path:
    """Writes the model with every weight changed by about that share, and returns its folder."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + noise * torch.randn_like(weight))
    similar = folder / f"like-{path.name}"
    model.save_pretrained(similar)
    return similar
