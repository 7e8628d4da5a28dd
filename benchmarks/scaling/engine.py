"""One simulated device: a real Scheduler that makes real batches of made-up tokens, and how long each takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.scaling.costs import Chunk, DeviceCosts
from benchmarks.scaling.requests import MAX_MODEL_LEN, SimulatedRequest
from deepinfer_backend._core import (
    PromptedSequence,
    RequestOutputPool,
    SamplingOptions,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
    SequenceMetadataList,
    SequenceMetadataPool,
)

_TOKEN_ID = 1
_BLOCK_SIZE = 256  # the product's on CUDA
_MAX_NUM_SEQS = 256  # its default is 64, which such a device is too large for
_MAX_NUM_BATCHED_TOKENS = 2048  # its default


@dataclass(frozen=True, slots=True)
class Awaited:
    """A sequence that has blocks for its prompt, whose content is still with another engine."""

    seq_id: int
    request: SimulatedRequest
    num_bytes: int
    num_prompt_blocks: int


@dataclass(slots=True)
class StepResult:
    """Who got which token of a step: its first, its second, its last; num_decoded got one that is not the first."""

    prompted: list[SimulatedRequest] = field(default_factory=list)
    joined: list[SimulatedRequest] = field(default_factory=list)
    ended: list[SimulatedRequest] = field(default_factory=list)
    num_decoded: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompted) + self.num_decoded


class SimulatedEngine:
    """Owns a scheduler and its pools, and knows of every request when the scheduler will have ended it.

    1. Each decode step gives every sequence that has its first token another one; so only who joins and who ends is
       looked at, and no step looks at each of its sequences here. A preemption would break this, and raises.
    2. After each step the scheduler has as many unfinished requests as are known here.
    """

    def __init__(self, costs: DeviceCosts, *, is_prompt_engine: bool = False) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=costs.num_blocks(_BLOCK_SIZE),
                block_size=_BLOCK_SIZE,
                max_num_seqs=_MAX_NUM_SEQS,
                max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                is_prompt_engine=is_prompt_engine,
            )
        )
        self.is_prompt_engine = is_prompt_engine
        self.is_stepping = False
        self.last_decode_s = 0.0  # when the tokens of its last decode step reached their clients
        self._costs = costs
        self._metadata_pool, self._output_pool = SequenceMetadataPool(), RequestOutputPool()
        self._token_ids = np.full((_MAX_NUM_SEQS, 1), _TOKEN_ID, np.int32)
        self._num_tokens = np.ones(_MAX_NUM_SEQS, np.int32)
        self._requests: dict[str, SimulatedRequest] = {}
        self._joining: list[SimulatedRequest] = []  # have their first token, and no decode step yet
        self._ends: defaultdict[int, list[SimulatedRequest]] = defaultdict(list)  # by decode step
        self._num_decode_steps = self._num_decoding = self._num_keys = 0
        self._batch: SchedulerOutputs | None = None
        self._result = StepResult()

    # ---- requests ----

    def add(self, request: SimulatedRequest) -> None:
        self._requests[request.request_id] = request
        self.scheduler.add_seq(request.request_id, request.prompt, _options(request))

    def add_prompted(self, request: SimulatedRequest) -> None:
        """Its first token comes from a prompt engine, and so do the blocks."""
        self._requests[request.request_id] = request
        prompted = PromptedSequence(first_token_id=_TOKEN_ID)
        self.scheduler.add_prompted_seq(request.request_id, request.prompt, prompted, _options(request))

    def take_awaited(self) -> list[Awaited]:
        """Those that the steps begun since the last call have admitted."""
        awaited = []
        for each in self.scheduler.take_awaited():
            num_bytes = len(each.blocks) * _BLOCK_SIZE * self._costs.kv_bytes_per_token
            num_prompt_blocks = each.first_block + len(each.blocks)
            awaited.append(Awaited(each.seq_id, self._requests[each.request_id], num_bytes, num_prompt_blocks))
        return awaited

    def blocks_arrived(self, awaited: Awaited) -> None:
        self.scheduler.blocks_arrived(awaited.seq_id, awaited.num_prompt_blocks)
        self._joining.append(awaited.request)

    def hand_over(self, request: SimulatedRequest) -> None:
        """Another engine has a copy of the prompt's blocks; the pair of `blocks_arrived`."""
        self.scheduler.abort_request(request.request_id)
        del self._requests[request.request_id]

    # ---- the step ----

    def begin_step(self) -> float | None:
        """Seconds that the step takes; None if there is nothing to compute."""
        metadata, batch = self.scheduler.schedule(self._metadata_pool)
        if batch.num_preempted:
            raise RuntimeError("a sequence was preempted: the workload is too large for the KV cache")
        if batch.is_empty():
            return None
        self._batch = batch
        return self._begin_prefill(metadata) if batch.is_prefill else self._begin_decode(batch)

    def finish_step(self) -> StepResult:
        batch, self._batch = self._batch, None
        assert batch is not None
        num_sampled = batch.num_sampled
        self.scheduler.process_outputs(batch, self._token_ids[:num_sampled], self._num_tokens[:num_sampled])
        self._output_pool.release(self.scheduler.build_request_outputs(batch, self._output_pool))
        self.scheduler.free_finished_seqs()
        result, self._result = self._result, StepResult()
        if not batch.is_prefill:
            self._end(result.ended)
        elif not self.is_prompt_engine:
            self._joining += result.prompted
        if self.scheduler.num_unfinished_requests != len(self._requests):
            raise RuntimeError(f"{len(self._requests)} requests, the scheduler has other ones")
        return result

    def _begin_prefill(self, metadata: SequenceMetadataList) -> float:
        rows = list(metadata)
        self._result.prompted = [self._requests[row.request_id] for row in rows if row.samples]
        return self._costs.prefill_s(Chunk(row.seqlen_q, row.seqlen_k, row.samples) for row in rows)

    def _begin_decode(self, batch: SchedulerOutputs) -> float:
        for request in self._joining:
            self._ends[self._num_decode_steps + request.num_outputs - 2].append(request)
        self._num_decoding += len(self._joining)
        self._num_keys += sum(len(request.prompt) for request in self._joining) + self._num_decoding
        if batch.num_seqs != self._num_decoding:
            raise RuntimeError(f"a step decodes {batch.num_seqs} sequences of {self._num_decoding}")
        self._result.num_decoded = batch.num_seqs
        self._result.joined, self._joining = self._joining, []
        self._result.ended = self._ends.pop(self._num_decode_steps, [])
        self._num_decode_steps += 1
        return self._costs.decode_s(batch.num_seqs, self._num_keys)

    def _end(self, requests: Iterable[SimulatedRequest]) -> None:
        for request in requests:
            del self._requests[request.request_id]
            self._num_decoding -= 1
            self._num_keys -= len(request.prompt) + request.num_outputs - 1


def _options(request: SimulatedRequest) -> SamplingOptions:
    return SamplingOptions(max_tokens=request.num_outputs, ignore_eos=True)
