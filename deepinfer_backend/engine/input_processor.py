"""Prompt → checked token ids: the last place where a request can be refused before it is queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.engine.messages import EngineInfo, EngineRequest
from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.sampling_params import SamplingParams

# No vocabulary has tokens this long on average: longer text cannot fit and is refused before it is tokenized.
_MAX_CHARS_PER_TOKEN = 64


class InputProcessor:
    """Turns what a client sent into an EngineRequest. May be used from any thread.

    tokenizer: a transformers tokenizer, or None for a model that takes token ids only.
    """

    def __init__(self, tokenizer: Any, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._info = info

    def process(
        self,
        request_id: str,
        *,
        prompt: str | None,
        prompt_token_ids: Sequence[int] | NDArray[np.integer[Any]] | None,
        sampling_params: SamplingParams,
        priority: int = 0,
    ) -> EngineRequest:
        """Exactly one of prompt and prompt_token_ids.

        Raises:
            InvalidRequestError: names the field, the value and the limit.
        """
        if (prompt is None) == (prompt_token_ids is None):
            raise InvalidRequestError(
                f"need exactly one of text_input and input_ids, got {'neither' if prompt is None else 'both'}"
            )
        if prompt is not None:
            token_ids = self._tokenize(prompt)
        else:
            assert prompt_token_ids is not None
            token_ids = self._check_token_ids(prompt_token_ids)
        self._check_length(len(token_ids))
        self._check_stop(sampling_params)
        return EngineRequest(request_id, token_ids, sampling_params, priority)

    def _tokenize(self, prompt: str) -> NDArray[np.int32]:
        if self._tokenizer is None:
            raise InvalidRequestError("text_input: this model has no tokenizer; send input_ids")
        if not prompt:
            raise InvalidRequestError("text_input is empty: must have at least 1 character")
        max_chars = self._info.max_model_len * _MAX_CHARS_PER_TOKEN
        if len(prompt) > max_chars:
            raise InvalidRequestError(f"text_input has {len(prompt)} characters: must have at most {max_chars}")
        token_ids = self._tokenizer(prompt)["input_ids"]
        return np.asarray(token_ids, dtype=np.int32)

    def _check_token_ids(self, token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        try:
            checked = np.asarray(token_ids, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequestError("input_ids: must be whole numbers") from None
        if checked.ndim != 1:
            raise InvalidRequestError(f"input_ids has {checked.ndim} dimensions: must have 1")
        limit = self._info.vocab_size
        outside = checked[(checked < 0) | (checked >= limit)]
        if len(outside):
            raise InvalidRequestError(
                f"input_ids has {outside[0]}: must be 0 to {limit - 1}, the vocabulary's size less 1"
            )
        return checked.astype(np.int32)

    def _check_length(self, num_tokens: int) -> None:
        info = self._info
        if num_tokens == 0:
            raise InvalidRequestError("the prompt has 0 tokens: must have at least 1")
        if num_tokens >= info.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens: must have at most {info.max_model_len - 1}, "
                f"one less than max_model_len ({info.max_model_len})"
            )
        cache_tokens = info.num_blocks * info.block_size
        if num_tokens >= cache_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_tokens} tokens: must have at most {cache_tokens - 1}, one less than the KV cache "
                f"holds ({info.num_blocks} blocks of {info.block_size})"
            )

    def _check_stop(self, params: SamplingParams) -> None:
        outside = [token_id for token_id in params.stop_token_ids if token_id >= self._info.vocab_size]
        if outside:
            raise InvalidRequestError(f"stop_token_ids has {outside[0]}: must be 0 to {self._info.vocab_size - 1}")
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop: this model has no tokenizer; use stop_token_ids")
