"""Prompt → checked token ids: the last place where a request can be refused before it is queued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.chat import Chat
from deepinfer_backend.engine.messages import EmbeddingParams, EngineInfo, EngineRequest
from deepinfer_backend.engine.request_limits import (
    check_limits,
    check_media,
    check_prompt_length,
    check_text,
    max_prompt_tokens,
)
from deepinfer_backend.errors import InvalidRequestError, shown
from deepinfer_backend.media.medium import Medium
from deepinfer_backend.media.prompt import MediaPrompt
from deepinfer_backend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TextWithMedia:
    """A text in which the model's own placeholders stand for these media, in their order."""

    text: str
    media: list[Medium]


Prompt = str | Chat | TextWithMedia | Sequence[int] | NDArray[np.integer[Any]]
"""What a client can send as a prompt: a text, a conversation, or token ids."""

# No vocabulary has tokens this long on average: longer text cannot fit and is refused before it is tokenized.
_MAX_CHARS_PER_TOKEN = 64
# What an embedding request can say besides its dimensions.
_EMBEDDING_FIELDS = frozenset({"cache_salt", "lora_name", "truncate_prompt_tokens"})


def max_prompt_chars(info: EngineInfo) -> int:
    """No longer text can be a prompt of the engine's model."""
    return info.max_model_len * _MAX_CHARS_PER_TOKEN


class InputProcessor:
    """Turns what a client sent into an EngineRequest. May be used from any thread.

    tokenizer: a transformers tokenizer, or None for a model that takes token ids only.
    """

    def __init__(self, tokenizer: Any, info: EngineInfo, config: EngineConfig) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._config = config

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        stream: bool = False,
        embedding: EmbeddingParams | None = None,
        bad_words_token_ids: Sequence[list[int]] = (),
        wants_logprobs: bool = False,
        wants_cumulative_logprob: bool = False,
        wants_prompt_logprobs: bool = False,
    ) -> EngineRequest:
        """The request with the model's own defaults for what `sampling_params` leaves out.

        What the client wants to be told turns on what computes it: `logprobs` or `prompt_logprobs` of 0, if they were
        left out. `bad_words_token_ids`: token sequences that are bad words besides those of `sampling_params`.

        Raises:
            InvalidRequestError: names the field, the value and the limit.
        """
        if embedding is not None:
            params = self._params_of_embedding(sampling_params, embedding)
        else:
            params = sampling_params.with_defaults(self._info.default_sampling_params)
            params = _turn_on_logprobs(params, wants_logprobs, wants_cumulative_logprob, wants_prompt_logprobs)
        check_limits(params, self._info, self._config)
        self._check_needs_of_text(params)
        if params.beam_width > 1 and stream:
            raise InvalidRequestError(
                f"beam_width is {params.beam_width}: must be 1 when stream is true (beams are known at the end only)"
            )
        bad_words = [*self._tokenize_bad_words(params.bad_words), *bad_words_token_ids]
        self._check_bad_words(bad_words)
        media = self._media_prompt(prompt, params)
        if media is not None:
            token_ids = np.empty(0, dtype=np.int32)
            return EngineRequest(request_id, token_ids, params, priority, bad_words, embedding, media=media)
        token_ids = self._truncate(self._token_ids(prompt), params.truncate_prompt_tokens)
        check_prompt_length(len(token_ids), self._info)
        return EngineRequest(request_id, token_ids, params, priority, bad_words, embedding)

    def _media_prompt(self, prompt: Prompt, params: SamplingParams) -> MediaPrompt | None:
        """None if there are no media."""
        if isinstance(prompt, TextWithMedia):
            check_text("text_input", prompt.text, max_prompt_chars(self._info))
            media = MediaPrompt(prompt.media, text=prompt.text)
        elif isinstance(prompt, Chat) and prompt.media:
            media = prompt.media_prompt()
        else:
            return None
        check_media(media.media, self._info, self._config)
        if params.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {params.truncate_prompt_tokens}: must be left out with images and videos"
            )
        return media

    def _token_ids(self, prompt: Prompt) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            return self._tokenize(prompt)
        if isinstance(prompt, Chat):
            max_chars, in_parts = max_prompt_chars(self._info), bool(self._info.modalities)
            return np.asarray(prompt.tokenize(self._tokenizer, max_chars, in_parts=in_parts), dtype=np.int32)
        assert not isinstance(prompt, TextWithMedia)
        return self._check_token_ids(prompt)

    def _tokenize(self, prompt: str) -> NDArray[np.int32]:
        if self._tokenizer is None:
            raise InvalidRequestError("text_input: this model has no tokenizer; send input_ids")
        if not prompt:
            raise InvalidRequestError("text_input is empty: must have at least 1 character")
        check_text("text_input", prompt, max_prompt_chars(self._info))
        return np.asarray(self._tokenizer(prompt)["input_ids"], dtype=np.int32)

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

    def _truncate(self, token_ids: NDArray[np.int32], num_kept: int | None) -> NDArray[np.int32]:
        if num_kept is None:
            return token_ids
        return token_ids[-(max_prompt_tokens(self._info) if num_kept == -1 else num_kept) :]

    def _check_needs_of_text(self, params: SamplingParams) -> None:
        if self._tokenizer is not None:
            return
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) not in (None, []):
                raise InvalidRequestError(f"{name} is set: must be left out, since this model has no tokenizer")
        if params.detokenize and "detokenize" in params.model_fields_set:
            raise InvalidRequestError("detokenize is True: must be false, since this model has no tokenizer")

    def _tokenize_bad_words(self, bad_words: Iterable[str]) -> list[list[int]]:
        """vLLM's rule: each text as it begins an output and, behind a space, as it goes on in one.

        The second counts only where the space is part of a token, so that it is as long as the first and begins
        otherwise; else the first is its end and stands for both.
        """
        sequences: list[list[int]] = []
        for text in bad_words:
            word = text.lstrip(" ")
            first = self._encode(word)
            if not first:
                raise InvalidRequestError(f"bad_words has {shown(text)}: must have at least 1 token besides spaces")
            second = self._encode(" " + word)
            sequences.append(first)
            if len(second) == len(first) and second[0] != first[0]:
                sequences.append(second)
        return sequences

    def _check_bad_words(self, sequences: Iterable[Sequence[int]]) -> None:
        for token_id in (token_id for sequence in sequences for token_id in sequence):
            if not 0 <= token_id < self._info.vocab_size:
                raise InvalidRequestError(f"bad_words has token {token_id}: must be 0 to {self._info.vocab_size - 1}")

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _params_of_embedding(self, params: SamplingParams, embedding: EmbeddingParams) -> SamplingParams:
        for name in sorted(params.model_fields_set - _EMBEDDING_FIELDS):
            raise InvalidRequestError(
                f"{name} is set: an embedding request can have only {', '.join(sorted(_EMBEDDING_FIELDS))}"
            )
        limit = self._info.hidden_size
        if embedding.dimensions is not None and not 1 <= embedding.dimensions <= limit:
            raise InvalidRequestError(
                f"dimensions is {embedding.dimensions}: must be 1 to {limit}, the model's hidden size"
            )
        return params.with_defaults({"max_tokens": 1})


def _turn_on_logprobs(
    params: SamplingParams, wants_logprobs: bool, wants_cumulative_logprob: bool, wants_prompt_logprobs: bool
) -> SamplingParams:
    if params.beam_width > 1:
        for name, wants in (("return_logprobs", wants_logprobs), ("return_prompt_logprobs", wants_prompt_logprobs)):
            if wants:
                raise InvalidRequestError(f"{name} is True: must be false when beam_width is over 1")
        return params  # a beam always has its cumulative log-probability
    wanted = {"logprobs": wants_logprobs or wants_cumulative_logprob, "prompt_logprobs": wants_prompt_logprobs}
    missing = {name: 0 for name, wants in wanted.items() if wants and getattr(params, name) is None}
    return params.model_copy(update=missing) if missing else params
