"""A GGUF file of a small random model with a byte-level tokenizer: converts in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, LAYERS, HEADS, KV_HEADS, POSITIONS = 64, 2, 4, 2, 256
QWEN3_HEAD_DIM = 128  # transformers does not read it from the file
CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
ARCHITECTURES = ("llama", "phi3", "qwen2", "qwen3")


def write_tiny_gguf(path: Path, seed: int = 0, *, architecture: str = "llama", quantization: str = "F32") -> Path:
    """Writes the model to `path`, its matrices in the type `quantization`; another seed gives other weights."""
    matrix_type = GGMLQuantizationType[quantization]
    hidden = max(HIDDEN, GGML_QUANT_SIZES[matrix_type][0])
    head_dim = QWEN3_HEAD_DIM if architecture == "qwen3" else hidden // HEADS
    tokens = ["<unk>", "<s>", "</s>", *bytes_to_unicode().values(), "He"]
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3)
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["H e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)

    random = np.random.default_rng(seed)
    for name, shape in _tensor_shapes(architecture, hidden, head_dim, len(tokens)).items():
        values = random.normal(0, 0.3 * (HIDDEN / hidden) ** 0.5, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, _stored(values, matrix_type, random), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensor_shapes(architecture: str, hidden: int, head_dim: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    q_size, kv_size, intermediate = head_dim * HEADS, head_dim * KV_HEADS, 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, hidden),
        "output.weight": (vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    layer = {
        "attn_norm.weight": (hidden,),
        "attn_output.weight": (hidden, q_size),
        "ffn_norm.weight": (hidden,),
        "ffn_down.weight": (hidden, intermediate),
    }
    if architecture == "phi3":
        layer |= {"attn_qkv.weight": (q_size + 2 * kv_size, hidden), "ffn_up.weight": (2 * intermediate, hidden)}
    else:
        sizes = {
            "attn_q": q_size,
            "attn_k": kv_size,
            "attn_v": kv_size,
            "ffn_gate": intermediate,
            "ffn_up": intermediate,
        }
        layer |= {f"{name}.weight": (size, hidden) for name, size in sizes.items()}
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (q_size,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
    if architecture == "qwen3":
        layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    return shapes | {f"blk.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()}


def _stored(
    values: npt.NDArray[np.float32], matrix_type: GGMLQuantizationType, random: np.random.Generator
) -> npt.NDArray[np.generic]:
    """values [num_outputs, num_inputs] as the file stores them; of Q4_K and Q6_K, which `gguf` cannot quantize to,
    random blocks of about the same deviation."""
    if matrix_type not in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K):
        stored: npt.NDArray[np.generic] = quantize(values, matrix_type)
        return stored
    block_inputs, block_bytes = GGML_QUANT_SIZES[matrix_type]
    blocks = random.integers(0, 256, (values.size // block_inputs, block_bytes), np.uint8)
    if matrix_type == GGMLQuantizationType.Q4_K:
        # weight = scale * (0 … 63) * (0 … 15) - minimum * (0 … 63)
        scale = np.float16(values.std() / 330)
        blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    else:
        # weight = scale * (-128 … 127) * (-32 … 31)
        blocks[:, -2:] = np.array([values.std() / 1370], np.float16).view(np.uint8)
    return blocks.reshape(values.shape[0], -1)
