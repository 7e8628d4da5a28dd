"""A GGUF file of a small random Llama with a byte-level tokenizer: converts in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, POSITIONS = 64, 2, 4, 2, 128, 256
CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def write_tiny_gguf(path: Path, seed: int = 0) -> Path:
    """Writes the model to `path`; another seed gives other weights."""
    tokens = ["<unk>", "<s>", "</s>", *bytes_to_unicode().values(), "He"]
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
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
    writer.add_chat_template(CHAT_TEMPLATE)

    random = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    kv_size = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", HIDDEN)
        add(f"{block}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"{block}.attn_k.weight", kv_size, HIDDEN)
        add(f"{block}.attn_v.weight", kv_size, HIDDEN)
        add(f"{block}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"{block}.ffn_norm.weight", HIDDEN)
        add(f"{block}.ffn_gate.weight", INTERMEDIATE, HIDDEN)
        add(f"{block}.ffn_up.weight", INTERMEDIATE, HIDDEN)
        add(f"{block}.ffn_down.weight", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
