"""An EngineClient whose steps a test makes by hand."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineOutputs, RequestFailure
from deepinfer_backend.engine.messages import EngineInfo, EngineRequest, EngineStats, PromptLogprobs, RequestResult
from deepinfer_backend.errors import DeepInferError, EngineDeadError


def output(request_id: str, token_id: int, finish_reason: str = "NONE", **others: Any) -> Any:
    """What a RequestOutput of the core looks like; the core makes them in its own pool only."""
    fields = {
        "seq_id": 0,
        "sequence_index": 0,
        "output_index": 0,
        "stop_token_id": -1,
        "num_prompt_tokens": 1,
        "num_cached_tokens": 0,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
        "first_scheduled_time_ns": 1,
        "logprob": math.nan,
        "rank": 0,
        "top_logprobs": [],
    }
    return SimpleNamespace(
        request_id=request_id,
        token_id=token_id,
        finished=finish_reason != "NONE",
        finish_reason=SimpleNamespace(name=finish_reason),
        **{**fields, **others},
    )


def prompt_logprobs_of(
    request_id: str, token_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any]
) -> PromptLogprobs:
    return PromptLogprobs(request_id, token_ids.tobytes(), logprobs.astype(np.float32).tobytes(), ranks.tobytes())


class FakeEngine:
    """Records what it is asked; answers with what the test puts in."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        arguments = (config or EngineConfig()).model_dump(mode="json")
        self.info = EngineInfo("/nowhere", 100, 1000, 50, 16, "cpu", "float32", hidden_size=8, config=arguments)
        self.added: SimpleQueue[EngineRequest] = SimpleQueue()
        self.aborted: list[str] = []
        self.aborted_sequences: list[tuple[str, int]] = []
        self.is_closed = False
        self._rounds: SimpleQueue[EngineOutputs | Exception] = SimpleQueue()
        self._is_dead = threading.Event()

    def add_request(self, request: EngineRequest) -> None:
        if self._is_dead.is_set():
            raise EngineDeadError("the engine process has ended")
        self.added.put(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted.extend(request_ids)

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        self.aborted_sequences.extend(sequences)

    def forget_request(self, request_id: str) -> None:
        pass

    def get_outputs(self, timeout_s: float) -> EngineOutputs | None:
        try:
            round_ = self._rounds.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(round_, Exception):
            raise round_
        return round_

    def kill(self) -> None:
        self.die()

    def close(self) -> None:
        self.is_closed = True

    @property
    def num_rounds_left(self) -> int:
        return self._rounds.qsize()

    def next_request(self, timeout_s: float = 10.0) -> EngineRequest:
        """The next one that was added."""
        return self.added.get(timeout=timeout_s)

    def step(self, *outputs: Any, stats: EngineStats | None = None, results: Sequence[RequestResult] = ()) -> None:
        self._rounds.put(EngineOutputs(list(outputs), [], stats or EngineStats(), list(results)))

    def refuse(self, request_id: str, error: DeepInferError) -> None:
        self._rounds.put(EngineOutputs([], [RequestFailure(request_id, error)], EngineStats()))

    def die(self) -> None:
        self._is_dead.set()
        self._rounds.put(EngineDeadError("the engine process ended with status -9"))
