"""Which tokens would complete a token sequence that the output must not contain."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """One sequence's bad words and the end of its output, as long as the longest word needs."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """words: token sequences of at least one token."""
        self._always = np.array(sorted({word[0] for word in words if len(word) == 1}), dtype=np.int64)
        self._by_last_of_prefix: dict[int, list[tuple[list[int], int]]] = {}
        for *prefix, last in words:
            if prefix:
                self._by_last_of_prefix.setdefault(prefix[-1], []).append((prefix, last))
        self._last_tokens: deque[int] = deque(maxlen=max(len(word) for word in words) - 1)

    def append(self, token_id: int) -> None:
        """The sequence's next output token."""
        self._last_tokens.append(token_id)

    def completions(self) -> NDArray[np.int64]:
        """The tokens that must not come next, none twice."""
        last_tokens = list(self._last_tokens)
        words = self._by_last_of_prefix.get(last_tokens[-1], ()) if last_tokens else ()
        completed = [last for prefix, last in words if last_tokens[-len(prefix) :] == prefix]
        return np.union1d(self._always, completed).astype(np.int64) if completed else self._always

    def fork(self) -> BadWords:
        other = copy.copy(self)
        other._last_tokens = self._last_tokens.copy()
        return other
