"""TextDeltas → the tensors of one response."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from deepinfer_backend.outputs import Logprobs, TextDelta


def build_output_tensors(deltas: Sequence[TextDelta], output_names: frozenset[str]) -> list[Any]:
    """The tensors with these names, for one delta or for the whole sequences of a request in order of their index.

    Tensors of shape [-1] have one element per delta, but `token_ids`: the tokens of all of them, one after the other,
    of which `num_output_tokens` says how many belong to each. `prompt_logprobs` is left out where there are none.
    """
    return [
        pb_utils.Tensor(name, build(deltas))
        for name, build in _builders_of(output_names)
        if name != "prompt_logprobs" or _prompt_logprobs(deltas) is not None
    ]


@lru_cache
def _builders_of(output_names: frozenset[str]) -> list[tuple[str, Callable[[Sequence[TextDelta]], NDArray[Any]]]]:
    """Kept: a server has few kinds of clients, and each token of theirs comes here."""
    return [(name, build) for name, build in _BUILDERS.items() if name in output_names]


def _texts(values: Iterable[str]) -> NDArray[np.object_]:
    return np.array([value.encode("utf-8", errors="replace") for value in values], dtype=np.object_)


def _text(delta: TextDelta) -> str:
    return delta.text if delta.embedding is None else json.dumps(delta.embedding)


def _logprobs(delta: TextDelta) -> str:
    return json.dumps(None if delta.logprobs is None else [_by_token_id(position) for position in delta.logprobs])


def _prompt_logprobs(deltas: Sequence[TextDelta]) -> list[Logprobs | None] | None:
    """They are on the request's first delta, whichever sequence that is of."""
    return next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)


def _by_token_id(position: Logprobs) -> dict[str, dict[str, Any]]:
    """As vLLM's backend writes it."""
    return {
        str(token.token_id): {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.decoded_token}
        for token in position
    }


def _times(name: str) -> Callable[[Sequence[TextDelta]], NDArray[np.int64]]:
    return lambda deltas: np.array([getattr(delta.times, name) for delta in deltas], dtype=np.int64)


_BUILDERS: dict[str, Callable[[Sequence[TextDelta]], NDArray[Any]]] = {
    "text_output": lambda deltas: _texts(_text(delta) for delta in deltas),
    "token_ids": lambda deltas: np.array([id_ for delta in deltas for id_ in delta.token_ids], dtype=np.int32),
    "sequence_index": lambda deltas: np.array([delta.sequence_index for delta in deltas], dtype=np.int32),
    "finish_reason": lambda deltas: _texts(str(delta.finish_reason) for delta in deltas),
    "stop_reason": lambda deltas: _texts(json.dumps(delta.stop_reason) for delta in deltas),
    "cumulative_logprob": lambda deltas: np.array([delta.cumulative_logprob for delta in deltas], dtype=np.float32),
    "logprobs": lambda deltas: _texts(_logprobs(delta) for delta in deltas),
    "prompt_logprobs": lambda deltas: _texts(
        [json.dumps([position and _by_token_id(position) for position in _prompt_logprobs(deltas) or ()])]
    ),
    "num_input_tokens": lambda deltas: np.array([deltas[0].num_prompt_tokens], dtype=np.uint32),
    "num_output_tokens": lambda deltas: np.array([len(delta.token_ids) for delta in deltas], dtype=np.uint32),
    "num_cached_tokens": lambda deltas: np.array([deltas[0].num_cached_tokens], dtype=np.uint32),
    "arrival_time_ns": _times("arrival_time_ns"),
    "first_scheduled_time_ns": _times("first_scheduled_time_ns"),
    "first_token_time_ns": _times("first_token_time_ns"),
    "last_token_time_ns": _times("last_token_time_ns"),
}
