"""The work that every engine does, and what one run of it gave: distinct prompts of one length, a closed loop.

Peers run this file in environments of their own: it needs nothing but Python.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MIN_PROMPTS = 2
_FIRST_TOKEN_ID = 20  # those before are special


@dataclass(frozen=True, slots=True)
class Work:
    """Greedy: `max_tokens` new tokens for every prompt, `concurrency` prompts at a time; the end of text is ignored."""

    prompts: list[list[int]]
    concurrency: int
    max_tokens: int
    ignore_eos: bool = True  # only llama.cpp's server is ever asked not to


@dataclass(frozen=True, slots=True)
class Figures:
    """One run: `num_output_tokens` in `elapsed_s`, prefill included.

    first_token_s: each request's wait for its first token, in the order of the prompts. step_s: median time between two
    tokens of a sequence, which a decode step of the whole batch takes; None if no sequence had two.
    """

    num_output_tokens: int
    elapsed_s: float
    first_token_s: list[float]
    step_s: float | None = None
    device_idle_share: float | None = None  # of the run's time; only of an engine that has a device thread

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    @property
    def median_first_token_s(self) -> float:
        return statistics.median(self.first_token_s)


def make_prompts(vocab_size: int, num_prompts: int, prompt_len: int, seed: int = 0) -> list[list[int]]:
    """Random token ids: no two prompts begin alike, so that a prefix cache helps nobody."""
    rng = random.Random(seed)
    return [[rng.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(prompt_len)] for _ in range(num_prompts)]


def num_prompts_for(concurrency: int) -> int:
    """One for every stream: all of them prefill, then all of them decode, as llama.cpp's bench does it."""
    return max(concurrency, _MIN_PROMPTS)


class TokenClock:
    """When each request was sent and got its tokens; makes the figures of a run.

    add_sent and add_tokens are called in the order in which things happen, by one thread.
    """

    def __init__(self) -> None:
        self._sent_at: dict[int, float] = {}
        self._first_at: dict[int, float] = {}
        self._last_at: dict[int, float] = {}
        self._gaps_s: list[float] = []
        self._num_tokens = 0

    def add_sent(self, request: int, now: float) -> None:
        self._sent_at[request] = now

    def add_tokens(self, request: int, num_tokens: int, now: float) -> None:
        """A gap counts once for each of the tokens that ended it together, as equal parts."""
        if request in self._last_at:
            gap_s = (now - self._last_at[request]) / num_tokens
            self._gaps_s += [gap_s] * num_tokens
        else:
            self._first_at[request] = now
        self._last_at[request] = now
        self._num_tokens += num_tokens

    def figures(self, elapsed_s: float, device_idle_share: float | None = None) -> Figures:
        return Figures(
            num_output_tokens=self._num_tokens,
            elapsed_s=elapsed_s,
            first_token_s=[self._first_at[request] - self._sent_at[request] for request in sorted(self._first_at)],
            step_s=statistics.median(self._gaps_s) if self._gaps_s else None,
            device_idle_share=device_idle_share,
        )


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios of what was measured side by side: a slow minute of the machine hits both of a pair."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
