"""Adaptive speculation, the engine's part: what a draft costs, and so how likely it must be to pay."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import SchedulerOutputs

ALL_DRAFTS, NO_DRAFTS = 0.0, 1.0

_SIZES_PER_DOUBLING = 2
_MAX_AGE = 500  # decode steps
_TRIED = 0.2  # so likely drafts are verified to see what they cost
_WEIGHT = 0.125  # of one step among those of its size
_MOST_LONGER = 1.5  # times the average
_OPTIMISM = 0.1  # by how much the likeliest drafts of many sequences are thought to bring too much


class DraftPolicy:
    """Learns from decode steps how long one takes by how many tokens it computes.

    Of all drafts those are to be verified, the likeliest first, with which a step brings the most outputs a second.
    Sizes of steps that are not known, or not any more, are tried: so it adapts when contexts, the number of sequences
    or the machine's load change.
    """

    def __init__(self, num_speculative_tokens: int, drafter_computes: bool = False) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._drafter_computes = drafter_computes
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
        speeds = outputs / self._seconds(known, num_seqs + np.arange(len(outputs)))
        speeds[0] *= 1 + _OPTIMISM * (1 - 1 / num_seqs)  # among those of one there was no choice
        num_drafts = int(np.argmax(speeds))
        return float(np.nextafter(likeliest[num_drafts - 1], 0.0)) if num_drafts else NO_DRAFTS

    def take_step(self, batch: SchedulerOutputs, seconds: float) -> None:
        """A step that kept the device for so long. A prefill says nothing about decode steps."""
        # A drafter that begins computes also what it missed; one that ends computes nothing for the last drafts.
        is_steady = bool(batch.draft_query_lens.any()) == (batch.num_sampled_rows > batch.num_sampled)
        if not batch.is_prefill and (is_steady or not self._drafter_computes):
            self.take(batch.num_tokens, seconds)

    def take(self, num_tokens: int, seconds: float) -> None:
        """A decode step that computed so many tokens and kept the device for so long."""
        self._num_steps += 1
        self._costs.setdefault(_size_class(num_tokens), _StepCost()).take(num_tokens, seconds, self._num_steps)

    @staticmethod
    def _seconds(known: dict[int, _StepCost], num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of steps of these sizes: between those that are known, and beyond them as between the last two."""
        costs = [known[size] for size in sorted(known)]
        sizes = np.array([cost.num_tokens for cost in costs])
        seconds = np.maximum.accumulate([cost.seconds for cost in costs])
        beyond = np.maximum(num_tokens - sizes[-1], 0) * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        in_all: NDArray[np.float64] = np.interp(num_tokens, sizes, seconds) + beyond
        return in_all


def _size_class(num_tokens: float) -> int:
    return round(_SIZES_PER_DOUBLING * math.log2(num_tokens))


class _StepCost:
    """Of steps of about one size: averages, of their tokens too, for under load each of them takes its time.

    What else happens on a machine makes single steps much longer, which counts only so far.
    """

    def __init__(self) -> None:
        self.num_tokens = self.seconds = 0.0
        self._num_taken = 0
        self._last_step = 0

    def is_known(self, now: int) -> bool:
        return now - self._last_step <= _MAX_AGE and self._num_taken > 1

    def take(self, num_tokens: int, seconds: float, now: int) -> None:
        if now - self._last_step > _MAX_AGE:
            self._num_taken = 0
        self._num_taken += 1
        self._last_step = now
        weight = max(1 / self._num_taken, _WEIGHT)
        self.num_tokens += weight * (num_tokens - self.num_tokens)
        if self._num_taken > 1:
            seconds = min(seconds, _MOST_LONGER * self.seconds)
        self.seconds += weight * (seconds - self.seconds)
