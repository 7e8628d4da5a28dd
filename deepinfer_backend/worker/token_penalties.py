"""The tokens that repetition_penalty, presence_penalty and frequency_penalty change in one sequence."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
from numpy.typing import NDArray


class TokenPenalties:
    """Which tokens the sequence has had, and what presence and frequency cost each; grows by appending.

    No token is in it twice. The prompt's tokens cost nothing until they are in the output too.
    """

    def __init__(
        self, prompt_token_ids: NDArray[np.int32], *, presence_penalty: float, frequency_penalty: float
    ) -> None:
        """prompt_token_ids: those of the prompt that count; in any order."""
        self._prompt_token_ids = np.unique(prompt_token_ids).astype(np.int64)
        self._num_tokens = len(self._prompt_token_ids)
        self._token_ids = self._prompt_token_ids.copy()
        self._costs = np.zeros(self._num_tokens, dtype=np.float32)
        self._positions: dict[int, int] = {}  # of the output's tokens
        self._counts: Counter[int] = Counter()
        self._presence_penalty = presence_penalty
        self._frequency_penalty = frequency_penalty

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[num_tokens]; valid until the next append or take_back."""
        return self._token_ids[: self._num_tokens]

    @property
    def costs(self) -> NDArray[np.float32]:
        """[num_tokens]: what is taken from each token's logit; valid until the next append or take_back."""
        return self._costs[: self._num_tokens]

    def append(self, token_id: int) -> None:
        if token_id not in self._positions:
            self._positions[token_id] = self._first_position(token_id)
        self._counts[token_id] += 1
        self._set_cost(token_id)

    def take_back(self, token_id: int) -> None:
        """Undoes the last append, which was of this token."""
        self._counts[token_id] -= 1
        if self._counts[token_id]:
            self._set_cost(token_id)
            return
        position = self._positions.pop(token_id)
        self._costs[position] = 0
        if position >= len(self._prompt_token_ids):
            self._num_tokens -= 1

    def fork(self) -> TokenPenalties:
        other = copy.copy(self)
        other._token_ids = self._token_ids.copy()
        other._costs = self._costs.copy()
        other._positions = self._positions.copy()
        other._counts = self._counts.copy()
        return other

    def _set_cost(self, token_id: int) -> None:
        cost = self._presence_penalty + self._frequency_penalty * self._counts[token_id]
        self._costs[self._positions[token_id]] = cost

    def _first_position(self, token_id: int) -> int:
        in_prompt = int(np.searchsorted(self._prompt_token_ids, token_id))
        if in_prompt < len(self._prompt_token_ids) and self._prompt_token_ids[in_prompt] == token_id:
            return in_prompt
        if self._num_tokens == len(self._token_ids):
            grown = max(64, 2 * self._num_tokens) - self._num_tokens
            self._token_ids = np.concatenate([self._token_ids, np.zeros(grown, dtype=np.int64)])
            self._costs = np.concatenate([self._costs, np.zeros(grown, dtype=np.float32)])
        position = self._num_tokens
        self._token_ids[position] = token_id
        self._num_tokens += 1
        return position
