"""What a step costs at least: the bytes that it must read, the operations, and the time that they take at the limits.

For models of the Llama family (grouped attention, gated feed-forward), which is what the benchmark runs.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that costs follow from, as config.json has them."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @staticmethod
    def read(model_folder: Path) -> ModelShape:
        config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        num_heads = config["num_attention_heads"]
        return ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def output_weights(self) -> int:
        """Numbers in the output layer. The embedding is not counted: a step reads one row of it for each token."""
        return self.vocab_size * self.hidden_size

    def weight_bytes(self, bytes_per_weight: float) -> float:
        """What every decode step reads of weights that are all stored alike."""
        return (self.layer_weights + self.output_weights) * bytes_per_weight

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_number

    def attention_operations(self, context_len: int) -> int:
        """Of one query over context_len keys: products with keys and with values."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * context_len


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes from memory and operations of one step."""

    num_bytes: float
    num_operations: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.num_operations / self.num_bytes

    def memory_s(self, bandwidth: float) -> float:
        return self.num_bytes / bandwidth

    def least_s(self, bandwidth: float, operations_per_s: float) -> float:
        """Reading, then computing: one that overlaps them perfectly can take half of that, and no less."""
        return self.memory_s(bandwidth) + self.num_operations / operations_per_s


def decode_cost(shape: ModelShape, weight_bytes: float, kv_bytes: int, concurrency: int, context_len: float) -> Cost:
    """One token for each of `concurrency` sequences, whose contexts are context_len tokens long."""
    per_sequence = 2 * (shape.layer_weights + shape.output_weights) + shape.attention_operations(1) * context_len
    return Cost(
        num_bytes=weight_bytes + concurrency * context_len * shape.kv_bytes_per_token(kv_bytes),
        num_operations=concurrency * per_sequence,
    )


def prefill_cost(shape: ModelShape, weight_bytes: float, kv_bytes: int, num_prompts: int, prompt_len: int) -> Cost:
    """All tokens of the prompts: each sees the keys up to its own, and only the last goes through the output layer."""
    per_prompt = (
        2 * shape.layer_weights * prompt_len
        + 2 * shape.output_weights
        + shape.attention_operations(1) * prompt_len * (prompt_len + 1) // 2
    )
    return Cost(
        num_bytes=weight_bytes + num_prompts * prompt_len * shape.kv_bytes_per_token(kv_bytes),
        num_operations=num_prompts * per_prompt,
    )


@functools.cache
def gguf_weight_bytes(file: Path) -> int:
    """Bytes of a GGUF file's matrices that a decode step reads: an embedding only if it is the output layer as well."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    has_output_layer = "output.weight" in tensors
    return sum(
        int(tensor.n_bytes)
        for name, tensor in tensors.items()
        if len(tensor.shape) > 1 and not (has_output_layer and name == "token_embd.weight")
    )
