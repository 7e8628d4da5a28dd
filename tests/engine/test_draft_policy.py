"""How many drafts are verified follows what they cost and how often they are right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from deepinfer_backend.engine.draft_policy import ALL_DRAFTS, NO_DRAFTS, DraftPolicy
from tests.core.scheduler_driver import SchedulerDriver

NUM_SPECULATIVE_TOKENS = 4
NUM_OUTPUTS = 150

# Seconds of a step by its tokens.
MACHINES: dict[str, Callable[[int], float]] = {
    "reads weights": lambda num_tokens: 20 + 0.1 * num_tokens,
    "reads weights, then computes": lambda num_tokens: max(20, 3 * num_tokens),
    "computes": lambda num_tokens: 3 * num_tokens,
}

ThresholdOf = Callable[[DraftPolicy, NDArray[np.float64]], float]


def seconds_for(machine: str, draft_quality: int, num_seqs: int, threshold_of: ThresholdOf) -> float:
    """How long that many sequences take. draft_quality: of four drafts so many are right."""
    driver = SchedulerDriver(
        zero_overhead_scheduling=False,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        max_num_seqs=num_seqs,
        num_blocks=128 * num_seqs,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_extra_logits=256,
    )
    for index in range(num_seqs):
        driver.add(f"{index}", [2, 3, 4], NUM_OUTPUTS, ignore_eos=True, seed=index, draft_quality=draft_quality)
    policy, seconds = DraftPolicy(NUM_SPECULATIVE_TOKENS), 0.0
    while driver.live_seq_ids():
        batch = driver.step(draft_threshold=threshold_of(policy, driver.scheduler.acceptance_rates))
        if not batch.is_prefill:
            step_s = MACHINES[machine](batch.num_tokens)
            policy.take(batch.num_tokens, step_s)
            seconds += step_s
    return seconds


@pytest.mark.parametrize("num_seqs", [1, 4])
@pytest.mark.parametrize("draft_quality", [0, 2, 4])
@pytest.mark.parametrize("machine", MACHINES)
def test_about_as_fast_as_the_better_of_always_and_never(machine: str, draft_quality: int, num_seqs: int) -> None:
    adaptive = seconds_for(machine, draft_quality, num_seqs, lambda policy, rates: policy.threshold(rates))
    always = seconds_for(machine, draft_quality, num_seqs, lambda *_: ALL_DRAFTS)
    never = seconds_for(machine, draft_quality, num_seqs, lambda *_: NO_DRAFTS)
    assert adaptive <= 1.1 * min(always, never)


def test_steps_of_uneven_length_do_not_make_drafts_look_cheap() -> None:
    """A step takes as long as it has tokens, a tenth more or less: so even nearly certain drafts cannot pay."""
    policy, noise = DraftPolicy(NUM_SPECULATIVE_TOKENS), np.random.default_rng(5)
    num_drafted, rates = 0, np.array([0.95] * 6 + [0.1] * 26)
    probabilities = np.cumprod(np.repeat(rates[:, None], NUM_SPECULATIVE_TOKENS, axis=1), axis=1)
    for _ in range(2000):
        num_drafts = int((probabilities > policy.threshold(rates)).sum())
        num_drafted += num_drafts > 0
        policy.take(32 + num_drafts, (32 + num_drafts) * noise.normal(1, 0.1))
    assert num_drafted <= 40


def test_drafts_that_no_longer_cost_anything_are_verified_again() -> None:
    policy = DraftPolicy(NUM_SPECULATIVE_TOKENS)
    for step_s in (lambda num_tokens: 3.0 * num_tokens, lambda _: 20.0):
        thresholds = []
        for _ in range(5000):
            thresholds.append(policy.threshold(np.full(8, 0.5)))
            num_tokens = 40 if thresholds[-1] < 0.5 else 8
            policy.take(num_tokens, step_s(num_tokens))
        if step_s(1) == 3.0:
            assert sum(threshold < 0.5 for threshold in thresholds) <= 24  # tried now and then
    assert sum(threshold >= 0.5 for threshold in thresholds[3000:]) <= 10  # a step without drafts is tried too
