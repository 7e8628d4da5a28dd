"""Adaptive speculation, the engine's part: what a draft costs, and so how likely it must be to pay."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ALL_DRAFTS, NO_DRAFTS = 0.0, 1.0

_SIZES_PER_DOUBLING = 2
_MAX_AGE = 2000  # decode steps
_TRIED = 0.2  # so likely drafts are verified to see what they cost


class DraftPolicy:
    """Learns from decode steps how long one takes by how many tokens it computes.

    Of all drafts those are to be verified, the likeliest first, with which a step brings the most outputs a second.
    Sizes of steps that are not known, or not any more, are tried: so it adapts when contexts, the number of sequences
    or the machine's load change.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._costs: dict[int, _StepCost] = {}
        self._num_steps = 0

    def threshold(self, acceptance_rates: NDArray[np.float64]) -> float:
        """Above which probability of becoming an output a draft is to be verified in the next decode step.

        acceptance_rates: [num_seqs], of the drafts of each sequence that the step may compute.
        """
        num_seqs = len(acceptance_rates)
        if not num_seqs:
            return ALL_DRAFTS
        known = {size: cost for size, cost in self._costs.items() if cost.is_known(self._num_steps)}
        plain, most = _size_class(num_seqs), _size_class(num_seqs * (1 + self._num_speculative_tokens))
        if plain not in known and plain - 1 not in known:
            return NO_DRAFTS
        if not any(plain < size <= most for size in known):
            return _TRIED
        # A draft counts if all before it are right too.
        columns = np.repeat(acceptance_rates[:, None], self._num_speculative_tokens, axis=1)
        likeliest = np.sort(np.cumprod(columns, axis=1), axis=None)[::-1]
        outputs = num_seqs + np.concatenate([[0.0], np.cumsum(likeliest)])
        num_drafts = int(np.argmax(outputs / self._seconds(known, num_seqs + np.arange(len(outputs)))))
        return float(np.nextafter(likeliest[num_drafts - 1], 0.0)) if num_drafts else NO_DRAFTS

    def take(self, num_tokens: int, seconds: float) -> None:
        """A decode step that computed so many tokens and kept the device for so long."""
        self._num_steps += 1
        self._costs.setdefault(_size_class(num_tokens), _StepCost()).take(num_tokens, seconds, self._num_steps)

    @staticmethod
    def _seconds(known: dict[int, _StepCost], num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of steps of these sizes: between those that are known, and beyond them as between the last two."""
        costs = [known[size] for size in sorted(known)]
        sizes = np.array([cost.num_tokens for cost in costs], np.float64)
        seconds = np.maximum.accumulate([cost.seconds for cost in costs])
        beyond = np.maximum(num_tokens - sizes[-1], 0) * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        in_all: NDArray[np.float64] = np.interp(num_tokens, sizes, seconds) + beyond
        return in_all


def _size_class(num_tokens: float) -> int:
    return round(_SIZES_PER_DOUBLING * math.log2(num_tokens))


class _StepCost:
    """Of steps of about one size."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._last_step = 0
        self._last_two_s = (math.inf, math.inf)

    @property
    def seconds(self) -> float:
        """The shorter one: what else happens on a machine makes a step longer and never shorter."""
        return min(self._last_two_s)

    def is_known(self, now: int) -> bool:
        return now - self._last_step <= _MAX_AGE and max(self._last_two_s) < math.inf

    def take(self, num_tokens: int, seconds: float, now: int) -> None:
        previous_s = self._last_two_s[1] if now - self._last_step <= _MAX_AGE else math.inf
        self._last_two_s = (previous_s, seconds)
        self.num_tokens, self._last_step = num_tokens, now
