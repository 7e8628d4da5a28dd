"""Random LoRA adapters, made and merged by PEFT itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from deepinfer_backend.models.conversion_cache import write_float32_weights

# What an adapter of all Linear modules of each family's attention and MLP names.
TARGET_MODULES = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gemma3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """PEFT uses what transformers will remove, and warns of fields that we mean to set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_random_adapter(
    model_path: Path, folder: Path, *, seed: int, model_class: Any = AutoModelForCausalLM, **fields: Any
) -> Path:
    """Writes a random adapter for the model and returns its folder; `fields` are those of PEFT's LoraConfig."""
    torch.manual_seed(seed)
    write_float32_weights(model_path)
    base = model_class.from_pretrained(model_path, dtype=torch.float32)
    # Else B is zero, and the adapter changes nothing.
    config = LoraConfig(**{"init_lora_weights": False, **fields})
    with _quiet_peft():
        get_peft_model(base, config).save_pretrained(folder)
    return folder


def merged_model(model_path: Path, adapter: Path | None, model_class: Any = AutoModelForCausalLM) -> torch.nn.Module:
    """PEFT's merged model, in float32 with transformers' own attention; without an adapter the model itself."""
    write_float32_weights(model_path)
    model = model_class.from_pretrained(model_path, dtype=torch.float32).eval()
    if adapter is not None:
        with _quiet_peft():
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    assert isinstance(model, torch.nn.Module)
    return model


def edit_config(adapter: Path, **fields: Any) -> None:
    """Changes fields of adapter_config.json."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **fields}), encoding="utf-8")
