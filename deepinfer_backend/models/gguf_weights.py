"""A GGUF file's weights under the names that transformers gives them, read where they lie in the file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.gguf_blocks import grouped_matrix, is_grouped
from deepinfer_backend.models.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from deepinfer_backend.models.weights import GroupedMatrix

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")
_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)

_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Frequencies of long contexts: transformers, which makes the model's configuration from the file, goes without them.
_IGNORED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


def why_unreadable(header: GgufHeader) -> str | None:
    """Why GgufWeights cannot read a file with this header, as the end of a sentence; None if it can."""
    if header.architecture not in _ARCHITECTURES:
        return f"its architecture {header.architecture} is none of {', '.join(_ARCHITECTURES)}"
    for name, tensor in header.tensors.items():
        if name in _IGNORED:
            continue
        if _module_name(name, header.architecture) is None:
            return f"a model of {header.architecture} with a tensor {name} is not known"
        if tensor.quantization not in _FLOATS and not is_grouped(tensor.quantization):
            return f"the type {tensor.quantization.name} of its tensor {name} is only read to be dequantized"
        if (heads := _num_rotated_heads(name, header)) is not None and (heads < 1 or tensor.shape[0] % (2 * heads)):
            return f"{tensor.shape[0]} rows of its tensor {name} do not make {heads} attention heads"
    return None


class GgufWeights:
    """A WeightSource over a file that stays mapped as long as this lives. Blocks are decoded one tensor at a time.

    Raises:
        UnsupportedModelError: the file is damaged, or `why_unreadable` tells a reason.
    """

    def __init__(self, path: Path) -> None:
        self._header = read_gguf_header(path)
        if reason := why_unreadable(self._header):
            raise UnsupportedModelError(f"{path} cannot be run as it is stored: {reason}")
        self._path = path
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        architecture = self._header.architecture
        self._stored_names = {
            name: stored for stored in self._header.tensors if (name := _module_name(stored, architecture)) is not None
        }
        self.quantization = _main_quantization(self._header.tensors.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._stored_names)

    def tensor(self, name: str) -> torch.Tensor:
        """bfloat16 if the file has it in bfloat16, else float32."""
        matrix = self.matrix(name)
        return matrix.dequantized() if isinstance(matrix, GroupedMatrix) else matrix

    def matrix(self, name: str) -> torch.Tensor | GroupedMatrix:
        stored_name = self._stored_names.get(name)
        if stored_name is None:
            raise UnsupportedModelError(f"{self._path} lacks the model's weight {name}")
        tensor = self._header.tensors[stored_name]
        rows = self._rows(stored_name, tensor)
        if tensor.quantization in _FLOATS:
            return _float_tensor(rows, tensor)
        return grouped_matrix(rows, tensor.quantization)

    def _rows(self, stored_name: str, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """[the tensor's first dimension, bytes of a row], in transformers' order."""
        rows = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes].reshape(tensor.shape[0], -1)
        heads = _num_rotated_heads(stored_name, self._header)
        if heads is None:
            return rows
        # Rotary embedding turns pairs of a head's rows: neighbours in the file, half a head apart in transformers.
        return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _module_name(stored_name: str, architecture: str) -> str | None:
    """transformers' name of a tensor of the file; None if it has none."""
    match = _TENSOR_NAME.fullmatch(stored_name)
    if match is None:
        return None
    layer, stored_module, kind = match["layer"], match["module"], match["kind"]
    if layer is None:
        module = _MODULES.get(stored_module)
        return None if module is None else f"{module}.{kind}"
    if architecture == "phi3" and stored_module == "ffn_up":
        module = "mlp.gate_up_proj"
    else:
        module = _LAYER_MODULES.get(stored_module)
    return None if module is None else f"model.layers.{layer}.{module}.{kind}"


def _num_rotated_heads(stored_name: str, header: GgufHeader) -> int | None:
    """Into how many heads the rows are divided whose order is not transformers'; None if the order is the same."""
    if header.architecture != "llama":
        return None
    num_heads = header.metadata.get("llama.attention.head_count", 0)
    if ".attn_q." in stored_name:
        return int(num_heads)
    if ".attn_k." in stored_name:
        return int(header.metadata.get("llama.attention.head_count_kv", num_heads))
    return None


def _main_quantization(tensors: Iterable[GgufTensor]) -> str | None:
    num_bytes = Counter[GGMLQuantizationType]()
    for tensor in tensors:
        if tensor.quantization not in _FLOATS:
            num_bytes[tensor.quantization] += tensor.num_bytes
    return num_bytes.most_common(1)[0][0].name if num_bytes else None


def _float_tensor(rows: npt.NDArray[np.uint8], tensor: GgufTensor) -> torch.Tensor:
    # A copy, because torch has no tensors that must not be written to.
    values = torch.from_numpy(rows.copy()).flatten()
    if tensor.quantization == GGMLQuantizationType.F32:
        return values.view(torch.float32).reshape(tensor.shape)
    if tensor.quantization == GGMLQuantizationType.BF16:
        return values.view(torch.bfloat16).reshape(tensor.shape)
    return values.view(torch.float16).float().reshape(tensor.shape)
