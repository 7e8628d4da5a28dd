"""EngineClient: one engine as its callers see it, and the one that runs in the caller's own process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from deepinfer_backend._core import FinishReason, RequestOutput
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.messages import EngineInfo, EngineRequest, EngineStats, RequestFailed, RequestResult
from deepinfer_backend.errors import ERRORS_BY_WORD, DeepInferError, EngineError, step_failed_error


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One request failed; no output of it follows."""

    request_id: str
    error: DeepInferError


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """What one round of the engine brought: outputs in order, failures, and its counters afterwards.

    `results`: what belongs to a request besides its tokens; to be read before `outputs`.
    """

    outputs: list[RequestOutput]
    failures: list[RequestFailure]
    stats: EngineStats | None
    results: list[RequestResult] = field(default_factory=list)


class EngineClient(Protocol):
    """What stands between an engine and whatever serves it.

    `add_request`, the aborts and `forget_request` may be called from any thread; `get_outputs` from one.
    """

    info: EngineInfo

    def add_request(self, request: EngineRequest) -> None:
        """Raises EngineDeadError when the engine has ended, InvalidRequestError when it refuses at once."""

    def abort_requests(self, request_ids: list[str]) -> None:
        """No output of these comes out of a later round. Unknown ids are ignored."""

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        """The same for single sequences of requests: (request id, sequence index)."""

    def forget_request(self, request_id: str) -> None:
        """It has ended, and nothing will be asked about it any more; to be told of every request."""

    def get_outputs(self, timeout_s: float) -> EngineOutputs | None:
        """The next round's outputs, or None when there were none within `timeout_s`.

        Raises:
            EngineDeadError: the engine ended; every request in it is lost.
        """

    def kill(self) -> None:
        """Ends an engine that is stuck; its end is then told as any other."""

    def close(self) -> None:
        """Ends the engine and frees what it held; safe to call twice."""


def sort_out_failures(
    outputs: list[RequestOutput], results: list[RequestResult], stats: EngineStats | None
) -> EngineOutputs:
    """Outputs and results of a round, with what failed in it apart."""
    failures = [
        RequestFailure(
            result.request_id, ERRORS_BY_WORD.get(result.word, EngineError)(result.message, reason=result.reason)
        )
        for result in results
        if isinstance(result, RequestFailed)
    ]
    if failures:
        results = [result for result in results if not isinstance(result, RequestFailed)]
    # One failure per request, however many of its sequences were in the step.
    ids_in_failed_step = {output.request_id for output in outputs if output.finish_reason == FinishReason.ERROR}
    if ids_in_failed_step:
        outputs = [output for output in outputs if output.request_id not in ids_in_failed_step]
        failures += [RequestFailure(request_id, step_failed_error(request_id)) for request_id in ids_in_failed_step]
    return EngineOutputs(outputs, failures, stats, results)


class InprocEngineClient:
    """The engine in this process; `get_outputs` is one round of it, run by the caller's thread.

    For one thread only: the one that calls owns the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        from deepinfer_backend.engine.llm_engine import LLMEngine

        self.engine = LLMEngine(config)
        self.info = self.engine.info

    def add_request(self, request: EngineRequest) -> None:
        self.engine.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        self.engine.abort_sequences(sequences)

    def forget_request(self, request_id: str) -> None:
        """The engine knows when it has ended."""

    def get_outputs(self, timeout_s: float) -> EngineOutputs | None:
        """One step while anything is unfinished, else the flush."""
        engine = self.engine
        handles = engine.step() if engine.has_unfinished_requests() else engine.flush_inflight_reqs()
        return sort_out_failures(engine.request_output_pool.clone(handles), engine.take_results(), None)

    def kill(self) -> None:
        """Nothing: whoever could call it is what is stuck."""

    def close(self) -> None:
        self.engine.close()
