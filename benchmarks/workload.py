"""The work that every benchmark does: distinct prompts of one length, a fixed number of new tokens, a closed loop."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

PROMPT_LEN = 128
MAX_TOKENS = 128
NUM_PROMPTS = 32


def prompts(vocab_size: int, num_prompts: int = NUM_PROMPTS) -> list[list[int]]:
    """Random token ids: no two prompts begin alike, so that the prefix cache helps nobody."""
    rng = random.Random(0)
    return [[rng.randrange(20, vocab_size) for _ in range(PROMPT_LEN)] for _ in range(num_prompts)]


@dataclass(frozen=True, slots=True)
class Figures:
    """One run: `num_output_tokens` in `elapsed_s`; first_token_s: each request's wait for its first token."""

    num_output_tokens: int
    elapsed_s: float
    first_token_s: list[float]
    device_idle_share: float | None = None  # of the time in which decode steps were running; offline only

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    @property
    def median_first_token_ms(self) -> float:
        return statistics.median(self.first_token_s) * 1e3


def median_run(runs: list[Figures]) -> Figures:
    return sorted(runs, key=lambda run: run.tokens_per_s)[len(runs) // 2]
