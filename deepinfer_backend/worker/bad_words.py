"""Which tokens would complete a token sequence that the output must not contain."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """One sequence's bad words and its output."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """words: token sequences of at least one token."""
        self._always = np.array(sorted({word[0] for word in words if len(word) == 1}), dtype=np.int64)
        self._by_last_of_prefix: dict[int, list[tuple[list[int], int]]] = {}
        for *prefix, last in words:
            if prefix:
                self._by_last_of_prefix.setdefault(prefix[-1], []).append((prefix, last))
        self._tokens: list[int] = []

    def append(self, token_id: int) -> None:
        """The sequence's next output token."""
        self._tokens.append(token_id)

    def take_back(self) -> None:
        """Undoes the last append."""
        self._tokens.pop()

    def completions(self) -> NDArray[np.int64]:
        """The tokens that must not come next, none twice."""
        tokens = self._tokens
        words = self._by_last_of_prefix.get(tokens[-1], ()) if tokens else ()
        completed = [last for prefix, last in words if tokens[-len(prefix) :] == prefix]
        return np.union1d(self._always, completed).astype(np.int64) if completed else self._always

    def fork(self) -> BadWords:
        other = copy.copy(self)
        other._tokens = self._tokens.copy()
        return other
