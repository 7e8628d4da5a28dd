"""Tokens → deltas of text, finish reason and counts; finds stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer_backend._core import RequestOutput
from deepinfer_backend.engine.detokenizer import Detokenizer, StopStrings
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.outputs import TextDelta


@dataclass(slots=True)
class ProcessedOutputs:
    """One round's news: (request id, delta) in order, and the requests that a stop string ended before the engine."""

    deltas: list[tuple[str, TextDelta]] = field(default_factory=list)
    request_ids_to_abort: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """The text of one sequence so far."""

    detokenizer: Detokenizer | None
    stop_strings: StopStrings
    min_tokens: int
    num_tokens: int = 0

    def push(self, output: RequestOutput) -> tuple[str, str | None]:
        """→ (new text, the stop string that was found or None)."""
        self.num_tokens += 1
        if self.detokenizer is None:
            return "", None
        text = ""
        if output.token_id >= 0 and output.stop_token_id < 0:
            text = self.detokenizer.push(output.token_id)
        if output.finished:
            text += self.detokenizer.finish()
        stopped_by = None
        if self.num_tokens > self.min_tokens:
            text, stopped_by = self.stop_strings.push(text)
        if output.finished and stopped_by is None:
            text += self.stop_strings.finish()
        return text, stopped_by


class OutputProcessor:
    """Holds the text of every request it was told of until that ends. Used by one thread.

    tokenizer: a transformers tokenizer, or None: then all texts stay empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = None if tokenizer is None else tokenizer.backend_tokenizer
        self._requests: dict[str, EngineRequest] = {}
        self._sequences: dict[str, dict[int, _Sequence]] = {}

    def add_request(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = request
        self._sequences[request.request_id] = {}

    def remove_request(self, request_id: str) -> None:
        """Forgets the request; its later outputs are dropped. Unknown ids are ignored."""
        self._requests.pop(request_id, None)
        self._sequences.pop(request_id, None)

    def process(self, outputs: list[RequestOutput]) -> ProcessedOutputs:
        """At most one delta per sequence; outputs of requests that it does not know (any more) are dropped."""
        processed = ProcessedOutputs()
        deltas: dict[tuple[str, int], TextDelta] = {}
        for output in outputs:
            request = self._requests.get(output.request_id)
            key = (output.request_id, output.sequence_index)
            delta = deltas.get(key)
            if request is None or (delta is not None and delta.finish_reason is not None):
                continue
            sequence = self._sequence(request, output.sequence_index)
            text, stopped_by = sequence.push(output)
            if delta is None:
                delta = TextDelta(
                    output.sequence_index,
                    num_prompt_tokens=output.num_prompt_tokens,
                    num_cached_tokens=output.num_cached_tokens,
                )
                deltas[key] = delta
                processed.deltas.append((output.request_id, delta))
            delta.text += text
            if output.token_id >= 0:
                delta.token_ids.append(output.token_id)
            if stopped_by is not None:
                delta.finish_reason, delta.stop_reason = "stop", stopped_by
                if not output.finished:
                    processed.request_ids_to_abort.append(output.request_id)
            elif output.finished:
                delta.finish_reason = output.finish_reason.name.lower()
                delta.stop_reason = output.stop_token_id if output.stop_token_id >= 0 else None
            if delta.finish_reason is not None:
                self.remove_request(output.request_id)
        return processed

    def _sequence(self, request: EngineRequest, index: int) -> _Sequence:
        sequences = self._sequences[request.request_id]
        if index not in sequences:
            params = request.sampling_params
            detokenizer = None
            if self._tokenizer is not None:
                detokenizer = Detokenizer(self._tokenizer, request.prompt_token_ids.tolist())
            sequences[index] = _Sequence(detokenizer, StopStrings(params.stop), params.min_tokens)
        return sequences[index]
