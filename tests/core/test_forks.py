"""Requests with several sequences: forked when the prompt is computed, sharing its blocks until they write."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_backend._core import SamplingOptions
from tests.core.scheduler_driver import SchedulerDriver

PROMPT = [2, 3, 4, 5, 6, 7, 2, 3, 4, 5]  # two full blocks and half of one


def outputs_of(driver: SchedulerDriver, request_id: str) -> list[list[int]]:
    return [driver.output_tokens(seq_id) for seq_id in driver.seq_ids_of(request_id)]


def outputs_alone(seeds: range, max_tokens: int) -> list[list[int]]:
    """Of as many requests with one sequence each."""
    driver = SchedulerDriver(num_blocks=256, max_num_seqs=32)
    seq_ids = [driver.add(f"{seed}", PROMPT, max_tokens, seed=seed, ignore_eos=True) for seed in seeds]
    driver.drain()
    return [driver.output_tokens(seq_id) for seq_id in seq_ids]


def test_children_share_the_prompt_until_they_write() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 9, n=4, ignore_eos=True)
    driver.step()
    assert (driver.scheduler.num_used_blocks, driver.scheduler.num_prompted) == (3, 4)
    copies = driver.step().block_copies
    assert len(copies) == 3  # the last to write has the block for itself
    assert len(set(copies[:, 0])) == 1
    assert driver.scheduler.num_used_blocks == 2 + 4
    driver.drain()


def test_children_of_a_prompt_that_fills_whole_blocks_copy_the_last_one() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT[:8], 9, n=3, ignore_eos=True)
    driver.step()
    assert driver.scheduler.num_used_blocks == 2
    copies = driver.step().block_copies
    assert len(copies) == 2  # by the children, which compute the last token again; their parent goes on behind it
    assert driver.scheduler.num_used_blocks == 2 + 2 + 1
    driver.drain()


def test_each_sequence_is_that_of_a_request_of_its_own_with_the_next_seed() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 9, n=4, seed=70, ignore_eos=True)
    # On the same device, which compares what a seed samples with.
    alone = [driver.add(f"{seed}", PROMPT, 9, seed=seed, ignore_eos=True) for seed in range(70, 74)]
    driver.drain()
    assert outputs_of(driver, "a") == [driver.output_tokens(seq_id) for seq_id in alone]
    indices = [[o.sequence_index for o in driver.lines[seq_id].outputs] for seq_id in driver.seq_ids_of("a")]
    assert indices == [[index] * 9 for index in range(4)]


def test_more_sequences_than_max_num_seqs_take_turns() -> None:
    driver = SchedulerDriver(max_num_seqs=2)
    driver.add("a", PROMPT, 4, n=5, seed=70, ignore_eos=True)
    driver.step()
    assert (driver.scheduler.num_prompted, driver.scheduler.num_waiting) == (2, 3)
    driver.drain()
    assert outputs_of(driver, "a") == outputs_alone(range(70, 75), 4)


def test_children_go_before_requests_that_came_later() -> None:
    driver = SchedulerDriver(max_num_seqs=1, zero_overhead_scheduling=False)
    driver.add("a", PROMPT, 2, n=2, ignore_eos=True)
    later = driver.add("later", PROMPT, 1, ignore_eos=True)
    driver.step()
    child = driver.seq_ids_of("a")[1]
    while not driver.lines[later].ended:
        driver.step()
    assert driver.lines[child].ended
    driver.drain()


@pytest.mark.parametrize("prompt_length", [1, 4, 10])
def test_each_sequence_gives_its_only_token(prompt_length: int) -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT[:prompt_length], 1, n=4)
    driver.drain()
    assert [len(tokens) for tokens in outputs_of(driver, "a")] == [1, 1, 1, 1]


def test_prompt_in_chunks_forks_once_at_its_end() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.add("a", PROMPT, 3, n=3)
    assert [(driver.step().num_tokens, len(driver.lines)) for _ in range(3)] == [(4, 1), (4, 1), (2, 3)]
    driver.drain()


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_abort_before_the_fork_leaves_no_child(num_chunks: int) -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.add("a", PROMPT, 9, n=3, is_tracked=True)
    for _ in range(num_chunks):
        driver.step()
    driver.abort("a")
    assert not driver.scheduler.has_unfinished_seqs()
    driver.drain()
    assert len(driver.lines) == 1


def test_prefill_that_fails_gives_one_error_and_no_child() -> None:
    driver = SchedulerDriver()
    seq_id = driver.add("a", PROMPT, 9, n=3, is_tracked=True)
    driver.step(fails=True)
    assert (len(driver.lines), driver.lines[seq_id].ended) == (1, "ERROR")
    driver.drain()


def test_abort_of_one_sequence_lets_the_others_go_on() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 6, n=3, seed=70, ignore_eos=True)
    driver.step()
    driver.step()
    driver.abort("a", 1)
    assert driver.scheduler.num_unfinished_requests == 1
    driver.drain()
    first, _, last = outputs_alone(range(70, 73), 6)
    assert [outputs_of(driver, "a")[index] for index in (0, 2)] == [first, last]
    assert not driver.scheduler.abort_request("a", 0)


@pytest.mark.parametrize("by_seq_id", [True, False])
def test_abort_of_one_sequence_between_processing_and_building_drops_its_output_alone(by_seq_id: bool) -> None:
    driver = SchedulerDriver()
    scheduler = driver.scheduler
    options = SamplingOptions(max_tokens=9, n=3)
    parent = scheduler.add_seq("a", np.array(PROMPT, np.int32), options)
    for num_rows in (1, 3):
        _, batch = scheduler.schedule(driver.metadata_pool)
        token_ids = np.array([[5], [6], [7]][:num_rows], np.int32)
        scheduler.process_outputs(batch, token_ids, np.ones(num_rows, np.int32))
        if num_rows == 3:
            assert scheduler.abort_seq(parent + 1) if by_seq_id else scheduler.abort_request("a", 1)
        outputs = driver.output_pool.clone(scheduler.build_request_outputs(batch, driver.output_pool))
    assert [(output.sequence_index, output.token_id) for output in outputs] == [(0, 5), (2, 7)]


def test_parent_that_ends_first_leaves_its_children_their_blocks() -> None:
    driver = SchedulerDriver(zero_overhead_scheduling=False)
    parent = driver.add("a", PROMPT, 6, n=2, seed=70, ignore_eos=True)
    driver.step()
    driver.abort_seq(parent)
    driver.step()
    driver.add("other", [7] * 10, 6, ignore_eos=True)
    driver.drain()
    assert outputs_of(driver, "a")[1] == outputs_alone(range(71, 72), 6)[0]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_children_that_are_preempted_lose_nothing(enable_prefix_caching: bool) -> None:
    driver = SchedulerDriver(num_blocks=9, enable_prefix_caching=enable_prefix_caching)
    driver.add("a", PROMPT, 16, n=4, seed=70, ignore_eos=True)
    driver.drain()
    assert driver.scheduler.num_preemptions > 0
    assert outputs_of(driver, "a") == outputs_alone(range(70, 74), 16)


def test_forks_are_told_once_and_only_of_tracked_sequences() -> None:
    driver = SchedulerDriver()
    for request_id, is_tracked in (("untracked", False), ("tracked", True)):
        options = SamplingOptions(max_tokens=9, n=3, is_tracked=is_tracked)
        driver.scheduler.add_seq(request_id, np.array(PROMPT, np.int32), options)
    assert driver.scheduler.take_forks() == []
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    driver.scheduler.process_outputs(batch, np.array([[5], [6]], np.int32), np.ones(2, np.int32))
    assert driver.scheduler.take_forks() == [(1, 4), (1, 5)]
    assert driver.scheduler.take_forks() == []


def test_tracked_sequence_is_told_freed_when_its_blocks_are_and_not_before() -> None:
    driver = SchedulerDriver()
    driver.add("untracked", PROMPT, 30, ignore_eos=True)
    seq_id = driver.add("a", PROMPT, 30, ignore_eos=True, is_tracked=True)
    driver.step()
    driver.step()
    driver.abort("a")
    driver.abort("untracked")
    driver.scheduler.free_finished_seqs()
    assert driver.scheduler.take_freed_seq_ids() == []
    assert driver.scheduler.num_used_blocks > 0
    driver.flush()
    driver.scheduler.free_finished_seqs()
    assert driver.scheduler.num_used_blocks == 0
    assert driver.scheduler.take_freed_seq_ids() == [seq_id]
    assert driver.scheduler.take_freed_seq_ids() == []
