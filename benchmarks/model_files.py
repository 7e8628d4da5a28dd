"""The bundled model in every form that an engine reads, all with the same weights; made once, beside the peers.

The float forms are the bundled Q4_1 file, dequantized to bfloat16; the 8-bit forms are quantized from those.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from benchmarks.peers import peers_folder
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


def gguf_file(kind: Literal["F32", "BF16", "Q8_0"]) -> Path:
    """The bundled file with all its matrices in this type."""
    return _made_once(f"{kind.lower()}.gguf", lambda path: convert_gguf(bundled_gguf(), path, kind))


def convert_gguf(source: Path, target: Path, kind: str) -> None:
    """The same metadata and tensors; vectors stay float32, as llama.cpp wants them."""
    import gguf

    reader = gguf.GGUFReader(source)
    matrix_type = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        # These the writer writes itself; the file's type is that of its matrices.
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        tensor_type = matrix_type if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(values, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
