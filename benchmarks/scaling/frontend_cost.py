"""What one frontend's work costs on this machine: choosing an engine, and making text of what engines send."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.scaling.costs import FrontendCosts
from deepinfer_backend._core import (
    RequestOutput,
    RequestOutputPool,
    SamplingOptions,
    Scheduler,
    SchedulerConfig,
    SequenceMetadataPool,
)
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.engine.output_processor import OutputProcessor
from deepinfer_backend.engine.request_router import RequestRouter
from deepinfer_backend.models.loader import load_tokenizer, resolve_model
from deepinfer_backend.sampling_params import SamplingParams

_PROMPT_LEN = 512
_NUM_REQUESTS = 200
_RANK_COUNTS = (1, 1024)
_MESSAGE_SIZES = (1, 64)
_NUM_STEPS = 300
_TEXT = "The river runs through the old town, and on both of its banks people sell bread, fish and flowers. "


def measure_frontend() -> FrontendCosts:
    """Medians; straight lines through the fewest and the most ranks, and the smallest and the largest message."""
    few, many = _RANK_COUNTS
    least_s, most_s = routing_s(few), routing_s(many)
    route_rank_s = (most_s - least_s) / (many - few)
    short, long = _MESSAGE_SIZES
    short_s, long_s = _delivery_s(short), _delivery_s(long)
    token_s = (long_s - short_s) / (long - short)
    return FrontendCosts(
        route_s=least_s - few * route_rank_s,
        route_rank_s=route_rank_s,
        message_s=max(0.0, short_s - short * token_s),
        token_s=token_s,
    )


def routing_s(num_ranks: int) -> float:
    """Of one request: `RequestRouter.assign`, and `release` when it has ended."""
    router, rng = RequestRouter(num_ranks), np.random.default_rng(0)
    requests = [
        EngineRequest(f"{index}", rng.integers(0, 1000, _PROMPT_LEN, dtype=np.int32), SamplingParams())
        for index in range(_NUM_REQUESTS)
    ]

    def route(request: EngineRequest) -> None:
        router.assign(request, range(num_ranks))
        router.release(request.request_id)

    return statistics.median(_seconds(partial(route, request)) for request in requests)


def _delivery_s(num_sequences: int) -> float:
    """Of one step's outputs, as they come from an engine: `RequestOutput.unpack` and `OutputProcessor.process`."""
    tokenizer = load_tokenizer(resolve_model(None))
    processor = OutputProcessor(tokenizer)
    token_ids = np.array(tokenizer.encode(_TEXT), np.int32)  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=2 * _NUM_STEPS, ignore_eos=True)
    steps = _Steps(num_sequences, token_ids)
    for index in range(num_sequences):
        processor.add_request(EngineRequest(f"{index}", token_ids, params), time.monotonic_ns())
    messages = [steps.message() for _ in range(_NUM_STEPS)]

    def deliver(message: bytes) -> None:
        processor.process(RequestOutput.unpack(message))

    return statistics.median(_seconds(partial(deliver, message)) for message in messages)


class _Steps:
    """An engine's scheduler that decodes the same text for each of `num_sequences`."""

    def __init__(self, num_sequences: int, token_ids: NDArray[np.int32]) -> None:
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=8 * num_sequences,
                block_size=256,
                max_num_seqs=num_sequences,
                max_num_batched_tokens=len(token_ids) * num_sequences,
                max_model_len=2048,
            )
        )
        self._metadata_pool, self._output_pool = SequenceMetadataPool(), RequestOutputPool()
        self._num_sequences, self._token_ids, self._num_steps = num_sequences, token_ids, 0
        for index in range(num_sequences):
            options = SamplingOptions(max_tokens=2 * _NUM_STEPS, ignore_eos=True)
            self._scheduler.add_seq(f"{index}", token_ids, options)

    def message(self) -> bytes:
        """The next step's outputs, one for each sequence, packed as for a frontend."""
        _, batch = self._scheduler.schedule(self._metadata_pool)
        assert batch.num_sampled == self._num_sequences
        token_id = self._token_ids[self._num_steps % len(self._token_ids)]
        self._num_steps += 1
        sampled = np.full((self._num_sequences, 1), token_id, np.int32)
        self._scheduler.process_outputs(batch, sampled, np.ones(self._num_sequences, np.int32))
        handles = self._scheduler.build_request_outputs(batch, self._output_pool)
        packed = self._output_pool.pack(handles)[0]
        self._output_pool.release(handles)
        return packed


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
