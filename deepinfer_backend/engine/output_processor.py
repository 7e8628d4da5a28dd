"""Tokens → deltas of text, finish reason, log-probabilities and counts; finds stop strings."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from deepinfer_backend._core import RequestOutput
from deepinfer_backend.engine.detokenizer import Detokenizer, StopStrings, TokenTexts
from deepinfer_backend.engine.messages import Embedding, EngineRequest, MediaReady, PromptLogprobs, RequestResult
from deepinfer_backend.outputs import MIN_LOGPROB, Logprobs, RequestTimes, TextDelta, TokenLogprob


@dataclass(slots=True)
class ProcessedOutputs:
    """One round's news: (request id, delta), and what a stop string ended before the engine did.

    Of a request's deltas the one that ends it comes last.

    A request whose last sequence was ended so is to be aborted as a whole; (request id, sequence index) stands for one
    sequence of a request that goes on.
    """

    deltas: list[tuple[str, TextDelta]] = field(default_factory=list)
    request_ids_to_abort: list[str] = field(default_factory=list)
    sequences_to_abort: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """One sequence so far."""

    detokenizer: Detokenizer | None
    stop_strings: StopStrings
    min_tokens: int
    shows_stop_token: bool
    times: RequestTimes
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    is_finished: bool = False

    @property
    def num_held_tokens(self) -> int:
        return 0 if self.detokenizer is None else self.detokenizer.num_held_tokens

    def push(self, output: RequestOutput) -> tuple[str, str | None]:
        """→ (new text, the stop string that was found or None)."""
        if self.detokenizer is None:
            return "", None
        text = ""
        if output.token_id >= 0 and (output.stop_token_id < 0 or self.shows_stop_token):
            text = self.detokenizer.push(output.token_id)
        if output.finished:
            text += self.detokenizer.finish()
        stopped_by = None
        if self.num_tokens > self.min_tokens:
            text, stopped_by = self.stop_strings.push(text)
        if output.finished and stopped_by is None:
            text += self.stop_strings.finish()
        return text, stopped_by

    def count(self, output: RequestOutput) -> None:
        now_ns = time.monotonic_ns()
        self.num_tokens += 1
        self.cumulative_logprob += _shown_logprob(output.logprob) if not math.isnan(output.logprob) else 0.0
        self.times = RequestTimes(
            arrival_time_ns=self.times.arrival_time_ns,
            first_scheduled_time_ns=output.first_scheduled_time_ns,
            first_token_time_ns=self.times.first_token_time_ns or now_ns,
            last_token_time_ns=now_ns,
        )


@dataclass(slots=True)
class _Request:
    """A request that has not ended; `num_unfinished` counts also sequences of which nothing has come yet."""

    request: EngineRequest
    arrival_time_ns: int
    num_unfinished: int
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    prompt_logprobs: list[Logprobs | None] | None = None
    embedding: list[float] | None = None


class OutputProcessor:
    """Holds the text of every request it was told of until that ends. Used by one thread.

    tokenizer: a transformers tokenizer, or None: then all texts stay empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = None if tokenizer is None else tokenizer.backend_tokenizer
        self._token_texts = None if tokenizer is None else TokenTexts(tokenizer.backend_tokenizer)
        self._requests: dict[str, _Request] = {}

    def add_request(self, request: EngineRequest, arrival_time_ns: int) -> None:
        """`arrival_time_ns`: of CLOCK_MONOTONIC; for the request's times."""
        request = msgspec.structs.replace(request, media=None)  # nothing here asks for its contents
        state = _Request(request, arrival_time_ns, request.sampling_params.n)
        if request.sampling_params.prompt_logprobs is not None and len(request.prompt_token_ids) == 1:
            state.prompt_logprobs = [None]  # nothing to compute, so no result comes
        self._requests[request.request_id] = state

    def remove_request(self, request_id: str) -> None:
        """Forgets the request; its later outputs are dropped. Unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def process(self, outputs: Sequence[RequestOutput], results: Sequence[RequestResult] = ()) -> ProcessedOutputs:
        """At most one delta per sequence; outputs of requests that it does not know (any more) are dropped.

        results: those of the same round; they belong to outputs of this round or a later one.
        """
        for result in results:
            if (request := self._requests.get(result.request_id)) is not None:
                self._keep(request, result)
        processed = ProcessedOutputs()
        deltas: dict[tuple[str, int], TextDelta] = {}
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            sequence = self._sequence(request, output.sequence_index)
            if sequence.is_finished:
                continue
            key = (output.request_id, output.sequence_index)
            if key not in deltas:
                deltas[key] = self._new_delta(request, output)
                processed.deltas.append((output.request_id, deltas[key]))
            self._extend(deltas[key], request, sequence, output, processed)
        # A sequence may have begun its delta before another one's, and have ended after it.
        processed.deltas.sort(key=lambda each: each[1].ends_request)
        return processed

    def _extend(
        self,
        delta: TextDelta,
        request: _Request,
        sequence: _Sequence,
        output: RequestOutput,
        processed: ProcessedOutputs,
    ) -> None:
        is_embedding = request.request.embedding is not None
        if output.token_id >= 0:
            sequence.count(output)
        if output.token_id >= 0 and not is_embedding:  # the token that an embedding's prefill samples is nobody's
            delta.token_ids.append(output.token_id)
            if delta.logprobs is not None:
                delta.logprobs.append(self._logprobs(request.request, output))
        text, stopped_by = sequence.push(output)
        delta.text += text
        delta.num_output_tokens = 0 if is_embedding else sequence.num_tokens
        delta.cumulative_logprob = sequence.cumulative_logprob
        delta.times = sequence.times
        delta.num_draft_tokens = output.num_draft_tokens
        delta.num_accepted_draft_tokens = output.num_accepted_draft_tokens
        if stopped_by is not None:
            delta.finish_reason, delta.stop_reason = "stop", stopped_by
        elif output.finished:
            delta.finish_reason = "stop" if is_embedding else output.finish_reason.name.lower()
            delta.stop_reason = output.stop_token_id if output.stop_token_id >= 0 else None
        if delta.finish_reason is None:
            delta.num_held_tokens = sequence.num_held_tokens
            return
        delta.num_held_tokens = 0
        sequence.is_finished = True
        request.num_unfinished -= 1
        delta.ends_request = request.num_unfinished == 0
        if delta.ends_request:
            self.remove_request(output.request_id)
        if not output.finished:
            if delta.ends_request:
                processed.request_ids_to_abort.append(output.request_id)
            else:
                processed.sequences_to_abort.append((output.request_id, output.sequence_index))

    def _new_delta(self, request: _Request, output: RequestOutput) -> TextDelta:
        params = request.request.sampling_params
        delta = TextDelta(
            output.sequence_index,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            logprobs=[] if params.logprobs is not None or params.beam_width > 1 else None,
            prompt_logprobs=request.prompt_logprobs,
            embedding=request.embedding,
        )
        request.prompt_logprobs = None  # told once
        return delta

    def _sequence(self, request: _Request, index: int) -> _Sequence:
        if index not in request.sequences:
            params = request.request.sampling_params
            detokenizer = None
            if self._tokenizer is not None and params.detokenize and request.request.embedding is None:
                detokenizer = Detokenizer(
                    self._tokenizer,
                    request.request.prompt_token_ids[-_MAX_CONTEXT_TOKENS:].tolist(),
                    skip_special_tokens=params.skip_special_tokens,
                    spaces_between_special_tokens=params.spaces_between_special_tokens,
                )
            request.sequences[index] = _Sequence(
                detokenizer,
                StopStrings(params.stop, include=params.include_stop_str_in_output),
                params.min_tokens,
                params.include_stop_str_in_output,
                RequestTimes(arrival_time_ns=request.arrival_time_ns),
            )
        return request.sequences[index]

    def _keep(self, request: _Request, result: RequestResult) -> None:
        match result:
            case MediaReady(prompt_token_ids=token_ids):
                request.request = msgspec.structs.replace(
                    request.request, prompt_token_ids=np.frombuffer(token_ids, np.int32)
                )
            case PromptLogprobs():
                request.prompt_logprobs = self._prompt_logprobs(request.request, result)
            case Embedding():
                assert request.request.embedding is not None
                request.embedding = normalized_embedding(result.values, request.request.embedding.dimensions)

    def _logprobs(self, request: EngineRequest, output: RequestOutput) -> Logprobs:
        best = [
            self._token_logprob(request, token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(output.top_logprobs[: request.sampling_params.logprobs], start=1)
        ]
        return [self._token_logprob(request, output.token_id, output.logprob, output.rank), *best]

    def _prompt_logprobs(self, request: EngineRequest, result: PromptLogprobs) -> list[Logprobs | None]:
        shape = (len(request.prompt_token_ids) - 1, 1 + (request.sampling_params.prompt_logprobs or 0))
        columns = zip(
            np.frombuffer(result.token_ids, np.int32).reshape(shape).tolist(),
            np.frombuffer(result.logprobs, np.float32).reshape(shape).tolist(),
            np.frombuffer(result.ranks, np.int32).reshape(shape).tolist(),
            strict=True,
        )
        return [
            None,
            *([self._token_logprob(request, *entry) for entry in zip(*row, strict=True)] for row in columns),
        ]

    def _token_logprob(self, request: EngineRequest, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        text = ""
        if self._token_texts is not None and request.sampling_params.detokenize:
            text = self._token_texts[token_id]
        return TokenLogprob(token_id, _shown_logprob(logprob), rank, text)


# The detokenizer wants the prompt's end only; a long prompt need not become a list for every sequence.
_MAX_CONTEXT_TOKENS = 16


def normalized_embedding(values: bytes, dimensions: int | None) -> list[float]:
    """The first `dimensions` of these float32 numbers, scaled to length 1 (Matryoshka embeddings, arXiv 2205.13147)."""
    vector = np.frombuffer(values, np.float32)[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    scaled = vector / length if length > 0 else vector
    numbers: list[float] = scaled.astype(np.float32).tolist()
    return numbers


def _shown_logprob(logprob: float) -> float:
    """At least MIN_LOGPROB, which also stands for no number."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
