"""Sharing, copying and finding blocks again."""

from __future__ import annotations

import pytest

from tests.core.scheduler_driver import SchedulerDriver

A = [2, 2, 2, 2, 3, 3, 3, 3, 4]
B = [5, 5, 5, 5, 6, 6, 6, 6, 7]
C = [3, 5, 3, 5, 6, 4, 6, 4, 7]


def num_cached_tokens(driver: SchedulerDriver, prompt: list[int], name: str = "again", salt: str = "") -> int:
    driver.add(name, prompt, 1, salt=salt)
    result = driver.step().num_cached_tokens
    driver.drain()
    return result


def test_full_blocks_of_an_earlier_prompt_are_found_but_never_the_whole_prompt() -> None:
    driver = SchedulerDriver()
    assert num_cached_tokens(driver, A[:8]) == 0
    assert num_cached_tokens(driver, A) == 8
    assert num_cached_tokens(driver, A[:8]) == 4
    assert num_cached_tokens(driver, A[:4]) == 0
    assert num_cached_tokens(driver, [*A[:7], 9]) == 4
    assert driver.scheduler.num_cached_tokens == 16


def test_outputs_are_found_too() -> None:
    driver = SchedulerDriver()
    seq_id = driver.add("first", A, 12, ignore_eos=True)
    driver.drain()
    text = A + driver.output_tokens(seq_id)
    assert num_cached_tokens(driver, [*text, 2, 2]) == 20


def test_running_sequences_share_their_prefix() -> None:
    driver = SchedulerDriver()
    driver.add("a", A, 9, ignore_eos=True)
    driver.step()
    driver.add("b", [*A[:8], 7], 9, ignore_eos=True)
    driver.step()
    assert driver.scheduler.num_used_blocks == 4
    driver.drain()


def test_salt_keeps_tenants_apart() -> None:
    driver = SchedulerDriver()
    assert [num_cached_tokens(driver, A, salt=salt) for salt in ("x", "y", "", "x", "y", "")] == [0, 0, 0, 8, 8, 8]


def test_without_prefix_caching_nothing_is_found() -> None:
    driver = SchedulerDriver(enable_prefix_caching=False)
    assert [num_cached_tokens(driver, A) for _ in range(2)] == [0, 0]


def test_equal_blocks_after_different_prefixes_are_not_mixed_up() -> None:
    driver = SchedulerDriver()
    assert num_cached_tokens(driver, [*A[:4], *B[:4], 9]) == 0
    assert num_cached_tokens(driver, [*C[:4], *B[:4], 9]) == 0
    assert num_cached_tokens(driver, [*B[:4], *B[:4], 9]) == 0


def test_least_recently_used_content_is_evicted_first() -> None:
    driver = SchedulerDriver(num_blocks=7)
    for prompt in (A, B):
        assert num_cached_tokens(driver, prompt) == 0
    assert num_cached_tokens(driver, A) == 8  # B is now the least recently used
    assert num_cached_tokens(driver, C) == 0  # takes the 3 blocks that hold nothing
    assert num_cached_tokens(driver, A) == 8
    assert num_cached_tokens(driver, [9, 9, 9, 9, 9]) == 0  # takes 2: the plain one and B's tail
    assert num_cached_tokens(driver, C) == 8
    assert num_cached_tokens(driver, A) == 8
    assert num_cached_tokens(driver, B) == 4


def test_free_blocks_without_content_are_used_before_cached_ones() -> None:
    driver = SchedulerDriver(num_blocks=6)
    num_cached_tokens(driver, A)
    num_cached_tokens(driver, B[:8])
    assert num_cached_tokens(driver, A) == 8


def test_tail_is_evicted_before_the_head() -> None:
    driver = SchedulerDriver(num_blocks=3)
    num_cached_tokens(driver, A)
    num_cached_tokens(driver, [9, 9, 9, 9, 9])  # needs 2: the plain one and one of the two cached
    assert num_cached_tokens(driver, A) == 4


def test_free_blocks_include_cached_ones() -> None:
    driver = SchedulerDriver()
    num_cached_tokens(driver, A)
    assert (driver.scheduler.num_free_blocks, driver.scheduler.num_used_blocks) == (64, 0)


def test_fork_shares_blocks_until_one_of_the_two_writes() -> None:
    driver = SchedulerDriver(zero_overhead_scheduling=False)
    parent = driver.add("a", A, 9, ignore_eos=True)
    driver.step()
    child = driver.fork(parent, seed=77)
    assert driver.scheduler.num_used_blocks == 3
    copies = driver.step().block_copies
    assert copies.shape == (1, 2)
    assert copies[0, 0] != copies[0, 1]
    assert driver.scheduler.num_used_blocks == 4
    assert len(driver.step().block_copies) == 0
    assert driver.scheduler.num_unfinished_requests == 1
    driver.drain()
    assert driver.output_tokens(parent)[1:] != driver.output_tokens(child)
    assert [output.sequence_index for output in driver.lines[child].outputs] == [1] * 8


def test_fork_without_a_place_waits_and_recomputes() -> None:
    driver = SchedulerDriver(max_num_seqs=1, zero_overhead_scheduling=False)
    parent = driver.add("a", A, 5, ignore_eos=True)
    driver.step()
    child = driver.fork(parent, seed=77)
    assert (driver.scheduler.num_waiting, driver.scheduler.num_prompted) == (1, 1)
    driver.drain()
    assert len(driver.lines[child].outputs) == 4


def test_fork_is_refused_before_the_prefill_and_with_a_step_in_flight() -> None:
    driver = SchedulerDriver()
    with pytest.raises(LookupError, match="no unfinished sequence 5"):
        driver.scheduler.fork_seq(5, seed=0)
    seq_id = driver.add("a", A, 9, ignore_eos=True)
    with pytest.raises(ValueError, match="has not finished its prefill"):
        driver.scheduler.fork_seq(seq_id, seed=0)
    driver.step()
    driver.step()
    with pytest.raises(ValueError, match="has a step in flight"):
        driver.scheduler.fork_seq(seq_id, seed=0)
    driver.drain()
    with pytest.raises(LookupError):
        driver.scheduler.fork_seq(seq_id, seed=0)


def test_preempted_sequence_finds_its_blocks_again_and_does_not_count_them_as_cached_prompt() -> None:
    driver = SchedulerDriver(num_blocks=6)
    driver.add("a", A[:8], 12, ignore_eos=True)
    driver.add("b", B[:8], 12, ignore_eos=True)
    driver.drain()
    assert driver.scheduler.num_preemptions > 0
    assert driver.scheduler.num_cached_tokens == 0
