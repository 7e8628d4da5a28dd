"""What is counted when, and by whom nothing is gained."""

from __future__ import annotations

import pytest

from benchmarks.workload import TokenClock, make_prompts, median_ratio, num_prompts_for


def test_no_two_prompts_begin_alike() -> None:
    prompts = make_prompts(vocab_size=49152, num_prompts=64, prompt_len=128)
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {128}
    assert prompts == make_prompts(49152, 64, 128), "every engine and every round gets the same"


@pytest.mark.parametrize(("concurrency", "num_prompts"), [(1, 2), (8, 8), (32, 32), (256, 256)])
def test_every_stream_has_a_prompt(concurrency: int, num_prompts: int) -> None:
    assert num_prompts_for(concurrency) == num_prompts


def test_a_run_counts_all_tokens_and_the_waits_in_the_order_of_the_prompts() -> None:
    clock = TokenClock()
    clock.add_sent(1, 10.0)
    clock.add_sent(0, 10.5)
    clock.add_tokens(1, 1, 11.0)
    clock.add_tokens(0, 1, 12.0)
    clock.add_tokens(1, 1, 11.2)
    clock.add_tokens(1, 2, 11.8)  # two that came together took half the time each
    clock.add_tokens(0, 1, 12.9)
    figures = clock.figures(elapsed_s=3.0)
    assert figures.num_output_tokens == 6
    assert figures.tokens_per_s == 2.0
    assert figures.first_token_s == [1.5, 1.0]
    assert figures.step_s == pytest.approx(0.3)  # of 0.2, 0.3, 0.3, 0.9


def test_one_token_each_has_no_step() -> None:
    clock = TokenClock()
    clock.add_sent(0, 0.0)
    clock.add_tokens(0, 1, 1.0)
    assert clock.figures(elapsed_s=1.0).step_s is None


def test_a_slow_minute_hits_both_of_a_pair() -> None:
    assert median_ratio([10.0, 1.0, 12.0], [5.0, 0.5, 6.0]) == 2.0
