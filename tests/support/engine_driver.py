"""Runs requests of every kind together on an engine in this process, and looks at what they leave behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import InprocEngineClient
from deepinfer_backend.engine.messages import EmbeddingParams, EngineRequest
from deepinfer_backend.engine.output_processor import OutputProcessor
from deepinfer_backend.errors import DeepInferError
from deepinfer_backend.outputs import Logprobs, TextDelta
from deepinfer_backend.sampling_params import SamplingParams

Answer = list[TextDelta] | DeepInferError
"""A request's whole sequences in order of their index, or why it failed."""


def engine_request(
    prompt: Sequence[int],
    *,
    request_id: str = "",
    priority: int = 0,
    bad_words_token_ids: Sequence[Sequence[int]] = (),
    embedding: EmbeddingParams | None = None,
    **params: Any,
) -> EngineRequest:
    """params: fields of SamplingParams."""
    return EngineRequest(
        request_id,
        np.array(prompt, dtype=np.int32),
        SamplingParams(**params),
        priority,
        [list(word) for word in bad_words_token_ids],
        embedding,
    )


class EngineDriver:
    """An engine with what its callers put around it. It is closed at the end of a `with`."""

    def __init__(self, model: Path, **engine_args: Any) -> None:
        config = EngineConfig(model=str(model), **{"dtype": "float32", "device": "cpu", **engine_args})
        self._client = InprocEngineClient(config)
        self.engine = self._client.engine
        self._processor = OutputProcessor(None)
        self._answers: dict[str, dict[int, TextDelta] | DeepInferError] = {}
        self._unfinished: set[str] = set()
        self._aborted: set[str] = set()

    def __enter__(self) -> EngineDriver:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def add(self, request: EngineRequest) -> None:
        self._answers[request.request_id] = {}
        self._unfinished.add(request.request_id)
        self._aborted.discard(request.request_id)
        self._processor.add_request(request, time.monotonic_ns())
        try:
            self._client.add_request(request)
        except DeepInferError as error:
            self._fail(request.request_id, error)

    def round(self) -> None:
        """One step of the engine, or the flush when it is drained."""
        round_outputs = self._client.get_outputs(timeout_s=0.0)
        assert round_outputs is not None
        news = [*round_outputs.outputs, *round_outputs.results, *round_outputs.failures]
        assert not self._aborted & {each.request_id for each in news}, "something came of an aborted request"
        for failure in round_outputs.failures:
            self._fail(failure.request_id, failure.error)
        processed = self._processor.process(round_outputs.outputs, round_outputs.results)
        for request_id, delta in processed.deltas:
            sequences = self._answers[request_id]
            assert isinstance(sequences, dict), "an output of a request that has failed"
            if delta.sequence_index in sequences:
                sequences[delta.sequence_index].append(delta)
            else:
                sequences[delta.sequence_index] = delta
            if delta.ends_request:
                self._unfinished.discard(request_id)

    def abort(self, request_id: str) -> None:
        self._unfinished.discard(request_id)
        self._aborted.add(request_id)
        self._processor.remove_request(request_id)
        self._client.abort_requests([request_id])

    def end_sequence(self, request_id: str, sequence_index: int) -> None:
        """Ends one sequence of a request, as if its text had come to a stop string; others of it may go on."""
        self._unfinished.remove(request_id)
        self._client.abort_sequences([(request_id, sequence_index)])

    def drain(self) -> None:
        """Rounds until nothing is left to do and the last step is flushed: then every request has its answer."""
        while self.engine.has_unfinished_requests():
            self.round()
        self.round()
        assert not self._unfinished

    def answer(self, request_id: str) -> Answer:
        answer = self._answers[request_id]
        return answer if isinstance(answer, DeepInferError) else [delta for _, delta in sorted(answer.items())]

    def run(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        """Their answers, of all together, in order."""
        for request in requests:
            self.add(request)
        self.drain()
        return [self.answer(request.request_id) for request in requests]

    def check_nothing_is_left(self) -> None:
        """Of a drained engine: no request, block, output or memory of a sequence."""
        engine = self.engine
        engine.step()  # gives back the outputs of the last round
        engine.scheduler.check_invariants()
        assert not engine.has_unfinished_requests()
        assert not engine.has_inflight_step()
        assert engine.scheduler.num_free_blocks == engine.scheduler.num_blocks
        assert engine.request_output_pool.num_in_use == 0
        assert engine.num_tracked == 0
        assert engine.take_results() == []

    def _fail(self, request_id: str, error: DeepInferError) -> None:
        self._processor.remove_request(request_id)
        self._unfinished.remove(request_id)
        self._answers[request_id] = error


def assert_same_answer(actual: Answer, expected: Answer) -> None:
    """Tokens and ends are the same, log-probabilities and embeddings to rounding."""
    assert not isinstance(actual, DeepInferError), actual
    assert not isinstance(expected, DeepInferError), expected
    assert [ending(sequence) for sequence in actual] == [ending(sequence) for sequence in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
        assert_same_logprobs(ours.logprobs, theirs.logprobs)
        assert_same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
        assert (ours.embedding is None) == (theirs.embedding is None)
        if ours.embedding is not None:
            assert ours.embedding == pytest.approx(theirs.embedding, abs=1e-5)


def ending(sequence: TextDelta) -> tuple[int, list[int], str | None, int | str | None]:
    return sequence.sequence_index, sequence.token_ids, sequence.finish_reason, sequence.stop_reason


def assert_same_logprobs(actual: Sequence[Logprobs | None] | None, expected: Sequence[Logprobs | None] | None) -> None:
    assert (actual is None) == (expected is None)
    for ours, theirs in zip(actual or (), expected or (), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)
        assert ours[0].token_id == theirs[0].token_id
        # Two tokens that are equally likely to rounding may change places.
        assert abs(ours[0].rank - theirs[0].rank) <= 1
        assert [entry.rank for entry in ours[1:]] == [entry.rank for entry in theirs[1:]]
