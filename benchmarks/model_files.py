"""The bundled model in every form that an engine reads, all with the same weights; made once, beside the peers.

The float forms are the bundled Q4_1 file, dequantized to bfloat16; the 8-bit forms are quantized from those.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import llama_cpp_source, llama_cpp_tool, peers_folder
from deepinfer_backend.models.loader import BUNDLED_MODEL_FILE, BUNDLED_MODEL_PACKAGE

_INT8_MAX = 127
# compressed-tensors' way to say: 8-bit weights with a scale for each row, activations quantized token by token.
_INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def bundled_gguf() -> Path:
    """The Q4_1 file as its package installs it."""
    import importlib.util

    spec = importlib.util.find_spec(BUNDLED_MODEL_PACKAGE)
    assert spec is not None and spec.submodule_search_locations, "make setup installs the bundled model"
    return Path(spec.submodule_search_locations[0]) / BUNDLED_MODEL_FILE


def float_folder() -> Path:
    """Hugging Face format, bfloat16; an engine that computes in float32 widens it."""
    return _made_once("bfloat16", _write_float_folder)


def int8_folder() -> Path:
    """Hugging Face format with 8-bit layers as vLLM reads them; embedding and output layer stay bfloat16."""
    return _made_once("int8", _write_int8_folder)


def gguf_file(kind: str) -> Path:
    """f32, bf16 or q8_0; made with llama.cpp's own tools."""

    def write(path: Path) -> None:
        if kind == "q8_0":
            subprocess.run([llama_cpp_tool("llama-quantize"), gguf_file("bf16"), path, "Q8_0"], check=True)
            return
        converter = llama_cpp_source() / "convert_hf_to_gguf.py"
        subprocess.run([sys.executable, converter, float_folder(), "--outtype", kind, "--outfile", path], check=True)

    return _made_once(f"{kind}.gguf", write)


def _made_once(name: str, write: Callable[[Path], None]) -> Path:
    """Complete from the moment it exists: written beside its place and moved there."""
    path = peers_folder() / "models" / name
    if not path.exists():
        # With the same ending: tools go by it.
        partial = path.with_name(f"partial-{name}")
        partial.parent.mkdir(parents=True, exist_ok=True)
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
        write(partial)
        partial.replace(path)
    return path


def _write_float_folder(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = bundled_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True).save_pretrained(folder)


def _write_int8_folder(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = float_folder()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _INT8_CONFIG
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(dim=1, keepdim=True) / _INT8_MAX
            tensors[name] = (tensor.float() / scale).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
            tensors[f"{name}_scale"] = scale.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
