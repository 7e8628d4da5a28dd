"""TextDeltas → the tensors of one response, with the batch dimension of the TensorRT-LLM backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from deepinfer_backend.outputs import TextDelta

_FILL_TOKEN_ID = -1


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client is to be told besides text and tokens. block_size: tokens in a block of the KV cache."""

    log_probs: bool
    perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool
    block_size: int


@dataclass(slots=True)
class _Tokens:
    """New tokens of one sequence, and their log-probabilities where they were asked for."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class TextResponses:
    """Builds the responses of one request to `tensorrt_llm_bls`."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def __call__(self, deltas: Sequence[TextDelta]) -> list[Any]:
        return _common_tensors(deltas, [_new_tokens(delta) for delta in deltas], self._wanted)


class TokenResponses:
    """Builds the responses of one request to `tensorrt_llm`, one after the other.

    prompt_token_ids: what stands in front of each sequence in `output_ids`; of length 0 for nothing.

    Each response's tokens of a sequence decode by themselves to whole characters: the beginning of one that is
    incomplete waits here for the sequence's next response. With its last one no token waits.
    """

    def __init__(self, wanted: Wanted, prompt_token_ids: NDArray[np.int32]) -> None:
        self._wanted = wanted
        self._prompt_token_ids = prompt_token_ids
        self._held: dict[int, _Tokens] = {}

    def __call__(self, deltas: Sequence[TextDelta]) -> list[Any]:
        tokens = [self._complete_tokens(delta) for delta in deltas]
        output_ids = _padded(
            [np.concatenate([self._prompt_token_ids, np.array(each.token_ids, np.int32)]) for each in tokens],
            _FILL_TOKEN_ID,
            np.int32,
        )
        num_prompt = len(self._prompt_token_ids)
        return [
            pb_utils.Tensor("output_ids", output_ids),
            _row("sequence_length", [num_prompt + len(each.token_ids) for each in tokens], np.int32),
            *_common_tensors(deltas, tokens, self._wanted),
        ]

    def _complete_tokens(self, delta: TextDelta) -> _Tokens:
        new = _new_tokens(delta)
        held = self._held.pop(delta.sequence_index, _Tokens())
        token_ids, log_probs = held.token_ids + new.token_ids, held.log_probs + new.log_probs
        num_told = len(token_ids) - delta.num_held_tokens
        self._held[delta.sequence_index] = _Tokens(token_ids[num_told:], log_probs[num_told:])
        return _Tokens(token_ids[:num_told], log_probs[:num_told])


def _new_tokens(delta: TextDelta) -> _Tokens:
    """A token that ended the sequence is not among them: TensorRT-LLM does not count it, nor is it in the text."""
    token_ids = delta.token_ids
    log_probs = [position[0].logprob for position in delta.logprobs or ()]
    if token_ids and token_ids[-1] == delta.stop_reason:
        return _Tokens(token_ids[:-1], log_probs[:-1])
    return _Tokens(token_ids, log_probs)


def _common_tensors(deltas: Sequence[TextDelta], tokens: Sequence[_Tokens], wanted: Wanted) -> list[Any]:
    """Tensors of shape [1, -1] have one element per delta, and so has `text_output`, whose first is a text."""
    texts = [delta.text.encode("utf-8", errors="replace") for delta in deltas]
    tensors = [
        # Without the batch dimension, as postprocessing gives it: clients read as_numpy("text_output")[0].
        pb_utils.Tensor("text_output", np.array(texts, dtype=np.object_)),
        _row("batch_index", [0], np.int32),
        _row("sequence_index", [delta.sequence_index for delta in deltas], np.int32),
    ]
    if wanted.log_probs:
        log_probs = _padded([np.array(each.log_probs, np.float32) for each in tokens], 0.0, np.float32)
        tensors.append(_row("cum_log_probs", [delta.cumulative_logprob for delta in deltas], np.float32))
        tensors.append(pb_utils.Tensor("output_log_probs", log_probs))
    if wanted.num_input_tokens:
        tensors.append(_row("num_input_tokens", [deltas[0].num_prompt_tokens], np.int32))
    if wanted.num_output_tokens:
        tensors.append(_row("num_output_tokens", [len(each.token_ids) for each in tokens], np.int32))
    if wanted.perf_metrics:
        tensors.extend(_perf_tensors(deltas, wanted.block_size))
    return tensors


def _perf_tensors(deltas: Sequence[TextDelta], block_size: int) -> list[Any]:
    times = [delta.times for delta in deltas]
    num_reused = deltas[0].num_cached_tokens // block_size
    num_total = _num_blocks(deltas, block_size)
    num_draft_tokens = sum(delta.num_draft_tokens for delta in deltas)
    num_accepted = sum(delta.num_accepted_draft_tokens for delta in deltas)
    return [
        _row("kv_cache_alloc_total_blocks", [num_total], np.int32),
        _row("kv_cache_reused_blocks", [num_reused], np.int32),
        _row("kv_cache_alloc_new_blocks", [num_total - num_reused], np.int32),
        _row("arrival_time_ns", [min(each.arrival_time_ns for each in times)], np.int64),
        _row("first_scheduled_time_ns", [min(each.first_scheduled_time_ns for each in times)], np.int64),
        _row("first_token_time_ns", [min(each.first_token_time_ns for each in times)], np.int64),
        _row("last_token_time_ns", [max(each.last_token_time_ns for each in times)], np.int64),
        _row("acceptance_rate", [num_accepted / max(1, num_draft_tokens)], np.float32),
        _row("total_accepted_draft_tokens", [num_accepted], np.int32),
        _row("total_draft_tokens", [num_draft_tokens], np.int32),
    ]


def _num_blocks(deltas: Sequence[TextDelta], block_size: int) -> int:
    """What the sequences need; the prompt's full blocks are shared by all of them."""
    num_prompt_tokens = deltas[0].num_prompt_tokens
    num_shared = num_prompt_tokens // block_size
    own = (-(-(num_prompt_tokens + delta.num_output_tokens) // block_size) - num_shared for delta in deltas)
    return num_shared + sum(own)


def _row(name: str, values: Iterable[Any], dtype: Any) -> Any:
    return pb_utils.Tensor(name, np.array([list(values)], dtype=dtype))


def _padded(rows: Sequence[NDArray[Any]], fill: Any, dtype: Any) -> NDArray[Any]:
    """[1, number of rows, length of the longest]."""
    padded = np.full((1, len(rows), max(map(len, rows))), fill, dtype)
    for index, row in enumerate(rows):
        padded[0, index, : len(row)] = row
    return padded
