"""A bounded random sample of the times between tokens."""

from __future__ import annotations

import random
import threading


class TokenGaps:
    """At most `max_values` of the values added since the last `take`, each as likely as any other to be among them.

    Algorithm R (Vitter, Random Sampling with a Reservoir, 1985). Any thread may call any method.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._random = random.Random()
        self._lock = threading.Lock()  # guards the two below
        self._values: list[float] = []
        self._num_added = 0

    def add(self, num_tokens: int, gap_s: float) -> None:
        """So many tokens came, each `gap_s` seconds after the one before."""
        with self._lock:
            for _ in range(num_tokens):
                self._num_added += 1
                if len(self._values) < self._max_values:
                    self._values.append(gap_s)
                elif (place := int(self._random.random() * self._num_added)) < self._max_values:
                    self._values[place] = gap_s

    def take(self) -> list[float]:
        with self._lock:
            values, self._values, self._num_added = self._values, [], 0
        return values
