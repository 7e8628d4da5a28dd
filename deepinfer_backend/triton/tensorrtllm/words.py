"""Words that stop, that are bad or that are favoured: a client's texts or token ids → what the engine takes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import InvalidRequestError, shown

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_ABS_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class StopWords:
    """Texts, found across the borders of tokens, and special tokens, which are not part of the text."""

    texts: list[str]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Biases:
    """`added`: token id → what is added to its logit. `banned`: tokens that must not come."""

    added: dict[int, float]
    banned: list[int]


class Words:
    """Reads the words of requests with the model's tokenizer, a transformers one or None. May be used from any thread.

    Raises (every method):
        InvalidRequestError: names the input, what it holds and what it must.
    """

    def __init__(self, tokenizer: Any, config: EngineConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self.eos_token_id: int | None = None
        self._special_ids: frozenset[int] = frozenset()
        if tokenizer is not None:
            self.eos_token_id = tokenizer.eos_token_id
            added = tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
            self._special_ids = frozenset(id_ for id_, token in added if token.special)

    def stop_words_of_texts(self, name: str, texts: Iterable[str]) -> StopWords:
        return self._stop_words(name, [(text, self.encode(name, text)) for text in texts])

    def stop_words_of_token_ids(self, name: str, words: Iterable[Sequence[int]]) -> StopWords:
        return self._stop_words(name, [(self._decode(name, word), word) for word in words])

    def bad_words(self, name: str, words: list[list[int]]) -> list[list[int]]:
        if len(words) > self._config.max_bad_words:
            raise InvalidRequestError(
                f"{name} has {len(words)} entries: must have at most {self._config.max_bad_words} (max_bad_words)"
            )
        return words

    def biases_of_texts(self, words_name: str, texts: Sequence[str], weights: NDArray[Any]) -> Biases:
        """Each token of a text gets the text's weight; one of several texts, all of theirs."""
        if len(texts) != len(weights):
            raise InvalidRequestError(
                f"{words_name} has {len(texts)} entries: must have as many as embedding_bias_weights, {len(weights)}"
            )
        sums: defaultdict[int, float] = defaultdict(float)
        for text, weight in zip(texts, weights.tolist(), strict=True):
            for token_id in self.encode(words_name, text):
                sums[token_id] += weight
        return self._biases("embedding_bias_weights", sums)

    def biases_of_vector(self, name: str, vector: NDArray[Any]) -> Biases:
        """vector: one number per token of the vocabulary, or none at all."""
        return self._biases(name, {int(token_id): float(vector[token_id]) for token_id in np.flatnonzero(vector)})

    def encode(self, name: str, text: str) -> list[int]:
        """The text's tokens, without those that stand around every text."""
        token_ids: list[int] = self._needed_tokenizer(name).encode(text, add_special_tokens=False)
        return token_ids

    def _decode(self, name: str, token_ids: Sequence[int]) -> str:
        tokenizer = self._needed_tokenizer(name)
        outside = next((id_ for id_ in token_ids if not 0 <= id_ < len(tokenizer)), None)
        if outside is not None:
            raise InvalidRequestError(f"{name} has token {outside}: must be 0 to {len(tokenizer) - 1}")
        return str(tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _needed_tokenizer(self, name: str) -> Any:
        if self._tokenizer is None:
            raise InvalidRequestError(f"{name} is set: must be left out, since this model has no tokenizer")
        return self._tokenizer

    def _stop_words(self, name: str, words: Iterable[tuple[str, Sequence[int]]]) -> StopWords:
        stop = StopWords([], [])
        for text, token_ids in words:
            special_ids = self._special_ids.intersection(token_ids)
            if len(token_ids) == 1 and (special_ids or _REPLACEMENT in text):
                stop.token_ids.append(token_ids[0])
            elif special_ids:
                # Special tokens are not in the text that is searched, so such a word would never be found.
                raise InvalidRequestError(f"{name} has {shown(text)}: must be text, or one special token")
            elif not text or _REPLACEMENT in text:
                raise InvalidRequestError(f"{name} has the tokens {shown(list(token_ids))}: must be whole characters")
            else:
                stop.texts.append(text)
        return stop

    def _biases(self, name: str, by_token: dict[int, float]) -> Biases:
        limit = self._config.max_logit_bias_entries
        if len(by_token) > limit:
            raise InvalidRequestError(
                f"{name} changes {len(by_token)} tokens: must be at most {limit} (max_logit_bias_entries)"
            )
        for token_id, bias in by_token.items():
            if not (abs(bias) <= _MAX_ABS_BIAS or bias == -math.inf):
                raise InvalidRequestError(
                    f"{name} is {bias} for token {token_id}: must be {-_MAX_ABS_BIAS} to {_MAX_ABS_BIAS}, or -inf"
                )
        banned = [token_id for token_id, bias in by_token.items() if bias == -math.inf]
        return Biases({id_: bias for id_, bias in by_token.items() if bias != -math.inf}, banned)
