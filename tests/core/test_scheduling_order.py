"""Who goes first, who waits, who has to give up their blocks."""

from __future__ import annotations

import time

import pytest

from tests.core.scheduler_driver import SchedulerDriver

PROMPT = [2, 3, 4, 5, 6]


def kinds_of_steps(driver: SchedulerDriver, num_steps: int) -> str:
    """P for a prefill step, D for a decode step, - for an empty one."""
    kinds = ""
    for _ in range(num_steps):
        batch = driver.step()
        kinds += "-" if batch.is_empty() else "P" if batch.is_prefill else "D"
    return kinds


def scheduled_ids(driver: SchedulerDriver) -> list[int]:
    """Launches one step and returns the sequences in it, in batch order."""
    driver.step()
    if driver.inflight is not None:
        return driver.inflight.seq_ids
    return []


@pytest.mark.parametrize("max_consecutive_prefills", [1, 2, 3])
def test_decode_runs_after_at_most_max_consecutive_prefills(max_consecutive_prefills: int) -> None:
    driver = SchedulerDriver(
        max_num_batched_tokens=5, max_consecutive_prefills=max_consecutive_prefills, enable_prefix_caching=False
    )
    driver.add("running", PROMPT, 40, ignore_eos=True)
    assert kinds_of_steps(driver, 2) == "PD"
    for index in range(7):
        driver.add(f"waiting {index}", PROMPT, 40, ignore_eos=True)
    turn = "P" * max_consecutive_prefills + "D"
    assert kinds_of_steps(driver, len(turn) * 2) == turn * 2


@pytest.mark.parametrize("prefill_attempt_interval", [1, 2, 4])
def test_prefill_is_attempted_every_prefill_attempt_interval_decodes(prefill_attempt_interval: int) -> None:
    driver = SchedulerDriver(
        max_num_batched_tokens=5,
        max_consecutive_prefills=1,
        prefill_attempt_interval=prefill_attempt_interval,
        enable_prefix_caching=False,
    )
    for index in range(8):
        driver.add(f"{index}", PROMPT, 40, ignore_eos=True)
    turn = "P" + "D" * prefill_attempt_interval
    # The first prefill has nothing to starve, so its turn goes on for one step.
    assert kinds_of_steps(driver, 1) == "P"
    assert kinds_of_steps(driver, len(turn) * 3) == turn * 3


def test_attempt_that_admits_nothing_decodes_at_once() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    driver.add("running", PROMPT, 5, ignore_eos=True)
    driver.step()
    driver.add("waiting", PROMPT, 5, ignore_eos=True)
    assert kinds_of_steps(driver, 4) == "DDDD"
    driver.drain()


def test_idle_scheduler_attempts_a_prefill_at_once() -> None:
    driver = SchedulerDriver(prefill_attempt_interval=4)
    driver.add("a", PROMPT, 30, ignore_eos=True)
    kinds_of_steps(driver, 6)
    driver.add("b", PROMPT, 30, ignore_eos=True)
    assert kinds_of_steps(driver, 1) == "P"


def test_lower_priority_value_is_admitted_first_then_arrival() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=5, enable_prefix_caching=False, zero_overhead_scheduling=False)
    names = {"late": 1, "second": 0, "third": 0, "first": -1}
    seq_ids = {name: driver.add(name, PROMPT, 1, priority=priority) for name, priority in names.items()}
    order = []
    for _ in names:
        before = set(driver.live_seq_ids())
        driver.step()
        order += [name for name, seq_id in seq_ids.items() if seq_id in before - set(driver.live_seq_ids())]
    assert order == ["first", "second", "third", "late"]


@pytest.mark.parametrize(("aging_s", "order"), [(1e-4, ["old", "urgent"]), (1e4, ["urgent", "old"])])
def test_what_waits_long_enough_comes_before_what_is_urgent_and_new(aging_s: float, order: list[str]) -> None:
    driver = SchedulerDriver(
        max_num_batched_tokens=5,
        enable_prefix_caching=False,
        zero_overhead_scheduling=False,
        priority_aging_s=aging_s,
    )
    seq_ids = {driver.add("old", PROMPT, 1, priority=1): "old"}
    added_s = time.monotonic()
    while time.monotonic() - added_s < 2e-4:
        pass
    seq_ids[driver.add("urgent", PROMPT, 1)] = "urgent"
    ended = []
    for _ in order:
        before = set(driver.live_seq_ids())
        driver.step()
        ended += [seq_ids[seq_id] for seq_id in before - set(driver.live_seq_ids())]
    assert ended == order


def test_nobody_is_admitted_past_a_head_that_does_not_fit() -> None:
    driver = SchedulerDriver(num_blocks=8, enable_prefix_caching=False)
    driver.add("running", [2] * 12, 8, ignore_eos=True)
    driver.step()
    driver.add("head", [3] * 24, 1)
    driver.add("small", [4], 1)
    driver.step()
    assert driver.scheduler.num_waiting == 2
    driver.drain()


def test_chunk_begun_goes_on_while_a_better_head_does_not_fit() -> None:
    driver = SchedulerDriver(num_blocks=8, max_num_batched_tokens=8, enable_prefix_caching=False)
    begun = driver.add("begun", [2] * 24, 1)
    driver.step()
    driver.add("head", [3] * 24, 1, priority=-1)
    assert driver.step().num_tokens == 8
    driver.step()
    assert driver.lines[begun].ended
    driver.drain()


def test_only_the_last_chunk_samples() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.add("a", [2, 3, 4, 5, 6, 7, 2, 3, 4, 5], 2)
    assert [(batch.num_tokens, batch.num_sampled) for batch in (driver.step() for _ in range(3))] == [
        (4, 0),
        (4, 0),
        (2, 1),
    ]
    driver.drain()


@pytest.mark.parametrize(("worst", "priorities"), [(2, (0, 0, 0)), (1, (0, 1, 0)), (0, (1, 0, 0))])
def test_latest_of_the_lowest_priority_is_preempted(worst: int, priorities: tuple[int, ...]) -> None:
    driver = SchedulerDriver(num_blocks=7, enable_prefix_caching=False)
    seq_ids = [
        driver.add(f"{index}", [2 + index] * 7, 20, priority=priority, ignore_eos=True)
        for index, priority in enumerate(priorities)
    ]
    batch = driver.step()
    while batch.num_preempted == 0:
        batch = driver.step()
    assert batch.num_preempted == 1
    assert driver.inflight is not None
    assert set(driver.inflight.seq_ids) == set(seq_ids) - {seq_ids[worst]}
    driver.drain()
    assert all(len(driver.lines[seq_id].outputs) == 20 for seq_id in seq_ids)
    assert driver.scheduler.num_preemptions > 0


def test_sequence_between_two_chunks_is_preempted_too() -> None:
    driver = SchedulerDriver(
        num_blocks=8,
        max_num_batched_tokens=4,
        max_consecutive_prefills=1,
        prefill_attempt_interval=6,
        enable_prefix_caching=False,
    )
    running = driver.add("running", [2] * 4, 20, ignore_eos=True)
    driver.step()
    chunked = driver.add("chunked", [3] * 16, 1)
    while driver.scheduler.num_preemptions == 0:
        assert driver.lines[running].ended == ""
        driver.step()
    assert driver.inflight is not None
    assert driver.inflight.seq_ids == [running]
    assert driver.lines[chunked].outputs == []
    assert (driver.scheduler.num_waiting, driver.scheduler.num_running) == (1, 1)
    driver.drain()


def test_time_of_the_first_scheduling_is_told_with_every_output() -> None:
    driver = SchedulerDriver(num_blocks=9, enable_prefix_caching=False)
    begin = time.monotonic_ns()
    driver.add("a", [2] * 10, 16, n=3, ignore_eos=True)
    driver.step()
    end = time.monotonic_ns()
    driver.drain()
    assert driver.scheduler.num_preemptions > 0
    times = {output.first_scheduled_time_ns for line in driver.lines.values() for output in line.outputs}
    assert len(times) == 1
    assert begin <= times.pop() <= end


def test_sequences_in_a_step_are_in_the_order_in_which_they_are_served() -> None:
    driver = SchedulerDriver()
    late, first, second = (driver.add(f"{p}-{i}", PROMPT, 9, priority=p) for i, p in enumerate([1, 0, 0]))
    driver.step()
    assert scheduled_ids(driver) == [first, second, late]


def test_certain_end_by_length_is_not_scheduled_again() -> None:
    driver = SchedulerDriver()
    driver.add("by max_tokens", PROMPT, 3, ignore_eos=True)
    assert kinds_of_steps(driver, 4) == "PDD-"
    assert not driver.scheduler.has_unfinished_seqs()
    driver.drain()
    driver = SchedulerDriver(max_model_len=8)
    driver.add("by max_model_len", PROMPT, 100, ignore_eos=True)
    assert kinds_of_steps(driver, 4) == "PDD-"
    driver.drain()


def test_sequence_longer_than_the_cache_ends_by_length() -> None:
    driver = SchedulerDriver(num_blocks=3, block_size=4)
    seq_id = driver.add("a", PROMPT, 100, ignore_eos=True)
    driver.drain()
    assert len(driver.lines[seq_id].outputs) == 12 - len(PROMPT)
    assert driver.lines[seq_id].ended == "LENGTH"


def test_decode_batch_keeps_to_the_token_budget() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=2, max_num_seqs=8)
    for index in range(5):
        driver.add(f"{index}", [2, 3], 4, ignore_eos=True)
    driver.drain()


def test_schedule_with_a_second_step_in_flight_is_refused() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 9, ignore_eos=True)
    driver.step()
    batches = [driver.scheduler.schedule(driver.metadata_pool)[1] for _ in range(2)]
    assert not any(batch.is_empty() for batch in batches)
    with pytest.raises(RuntimeError, match="more than one step in flight"):
        driver.scheduler.schedule(driver.metadata_pool)


def test_schedule_with_a_prefill_in_flight_is_refused() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 9)
    driver.scheduler.schedule(driver.metadata_pool)
    with pytest.raises(RuntimeError, match="prefill step in flight"):
        driver.scheduler.schedule(driver.metadata_pool)
