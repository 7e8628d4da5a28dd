"""How long things take in the simulation: a step, a hand-over, a vote, the frontend's work; each with its source."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.step_cost import Cost, ModelShape

LLAMA_3_1_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
)
"""As in the model's published config.json."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part in a prefill: query_len tokens, the last of which attends to seq_len keys."""

    query_len: int
    seq_len: int
    samples: bool


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """One device with a copy of the weights. A step reads its bytes while it computes: the longer of the two counts.

    peak_operations_per_s, bandwidth, memory_bytes: dense bfloat16, HBM bytes/s and bytes of NVIDIA's H200 data sheet.
    operations_share, bandwidth_share: what a step reaches of them. memory_share: the product's default for weights and
    KV cache. step_overhead_s: launches and whatever host work is not hidden. These but the third are assumptions.
    """

    shape: ModelShape = LLAMA_3_1_8B
    bytes_per_number: int = 2
    peak_operations_per_s: float = 989e12
    bandwidth: float = 4.8e12
    memory_bytes: float = 141e9
    operations_share: float = 0.5
    bandwidth_share: float = 0.8
    memory_share: float = 0.9
    step_overhead_s: float = 200e-6

    @property
    def weight_bytes(self) -> float:
        return self.shape.weight_bytes(self.bytes_per_number)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.bytes_per_number)

    def num_blocks(self, block_size: int) -> int:
        return int((self.memory_bytes * self.memory_share - self.weight_bytes) / (block_size * self.kv_bytes_per_token))

    def prefill_s(self, chunks: Iterable[Chunk]) -> float:
        num_bytes, num_operations = self.weight_bytes, 0.0
        for chunk in chunks:
            num_keys = chunk.query_len * (chunk.seq_len - (chunk.query_len - 1) / 2)
            num_bytes += chunk.seq_len * self.kv_bytes_per_token
            num_operations += 2 * self.shape.layer_weights * chunk.query_len
            num_operations += self.shape.attention_operations(1) * num_keys
            num_operations += 2 * self.shape.output_weights * chunk.samples
        return self._step_s(Cost(num_bytes, num_operations))

    def decode_s(self, num_seqs: int, num_keys: int) -> float:
        """num_keys: those of all sequences together, this step's included."""
        return self._step_s(
            Cost(
                num_bytes=self.weight_bytes + num_keys * self.kv_bytes_per_token,
                num_operations=num_seqs * 2 * (self.shape.layer_weights + self.shape.output_weights)
                + self.shape.attention_operations(1) * num_keys,
            )
        )

    def _step_s(self, cost: Cost) -> float:
        compute_s = cost.num_operations / (self.peak_operations_per_s * self.operations_share)
        return max(compute_s, cost.memory_s(self.bandwidth * self.bandwidth_share)) + self.step_overhead_s


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """An engine's network link, one transfer at a time. Assumptions: 400 Gbit/s, and a first byte's way.

    vote_hop_s: one level of the tree over which ranks in lockstep reduce their votes; an assumption, too.
    """

    bandwidth: float = 50e9
    latency_s: float = 50e-6
    vote_hop_s: float = 30e-6

    def transfer_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bandwidth

    def vote_s(self, num_ranks: int) -> float:
        return self.vote_hop_s * math.ceil(math.log2(num_ranks))


@dataclass(frozen=True, slots=True)
class FrontendCosts:
    """What one frontend's interpreter does for a request, and for a step's message with its tokens; 0: left out.

    `measure_frontend` fills it in. route_s + num_ranks · route_rank_s: until a request has its engine.
    """

    route_s: float = 0.0
    route_rank_s: float = 0.0
    message_s: float = 0.0
    token_s: float = 0.0

    def routing_s(self, num_ranks: int) -> float:
        return self.route_s + num_ranks * self.route_rank_s

    def delivery_s(self, num_tokens: int) -> float:
        return self.message_s + num_tokens * self.token_s


@dataclass(frozen=True, slots=True)
class Costs:
    device: DeviceCosts = field(default_factory=DeviceCosts)
    link: LinkCosts = field(default_factory=LinkCosts)
    frontend: FrontendCosts = field(default_factory=FrontendCosts)
