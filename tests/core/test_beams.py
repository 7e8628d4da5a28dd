"""Beams: held after each step until their next token comes from outside, and in nobody's way meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_backend._core import SamplingOptions
from tests.core.fake_model import EOS
from tests.core.scheduler_driver import SchedulerDriver

PROMPT = [2, 3, 4, 5, 6, 7, 2, 3, 4, 5]


def start(driver: SchedulerDriver, **params: Any) -> int:
    """A beam that is held after its prefill."""
    seq_id = driver.add("beam", PROMPT, 6, ignore_eos=True, is_beam=True, **params)
    driver.step()
    assert driver.scheduler.is_held(seq_id)
    return seq_id


def test_held_sequence_is_in_no_step_until_its_token_comes() -> None:
    driver = SchedulerDriver()
    beam = start(driver)
    assert driver.step().is_empty()
    assert driver.scheduler.has_unfinished_seqs()
    driver.append_token(beam, 5)
    assert not driver.scheduler.is_held(beam)
    assert driver.step().num_tokens == 1
    assert driver.step().is_empty()  # what it samples is in flight, and nobody knows the next token
    driver.drain()


def test_no_output_comes_of_a_beam() -> None:
    driver = SchedulerDriver()
    beam = start(driver)
    driver.drain()
    assert driver.lines[beam].outputs == []


def test_fork_of_a_held_sequence_is_held_and_shares_its_blocks() -> None:
    driver = SchedulerDriver()
    beam = start(driver)
    fork = driver.fork(beam, seed=0)
    assert driver.held_seq_ids() == [beam, fork]
    assert driver.scheduler.num_used_blocks == 3
    assert driver.step().is_empty()
    driver.append_token(fork, 5)
    driver.append_token(beam, 6)
    batch = driver.step()
    assert (batch.num_seqs, len(batch.block_copies)) == (2, 1)
    driver.drain()


def test_token_for_a_sequence_that_is_not_held_is_refused() -> None:
    driver = SchedulerDriver()
    with pytest.raises(LookupError, match="no unfinished sequence 3"):
        driver.scheduler.append_token(3, 5)
    assert not driver.scheduler.is_held(3)
    other = driver.add("other", PROMPT, 9, ignore_eos=True)
    beam = driver.add("beam", PROMPT, 9, ignore_eos=True, is_beam=True)
    for seq_id in (other, beam):
        with pytest.raises(ValueError, match="is not held"):
            driver.scheduler.append_token(seq_id, 5)
    driver.step()
    with pytest.raises(ValueError, match="is not held"):
        driver.scheduler.append_token(other, 5)
    with pytest.raises(ValueError, match="token_id: must be 0 or more, got -1"):
        driver.scheduler.append_token(beam, -1)
    driver.append_token(beam, 5)
    with pytest.raises(ValueError, match="is not held"):
        driver.scheduler.append_token(beam, 5)
    driver.abort_seq(beam)
    with pytest.raises(LookupError):
        driver.scheduler.append_token(beam, 5)
    driver.drain()


def test_token_that_ends_a_held_sequence_gives_no_output() -> None:
    driver = SchedulerDriver()
    beam = driver.add("beam", PROMPT, 6, is_beam=True)
    driver.step()
    driver.append_token(beam, EOS)
    assert not driver.scheduler.has_unfinished_seqs()
    assert driver.step().is_empty()
    driver.drain()
    assert driver.lines[beam].outputs == []


def test_step_that_fails_ends_a_beam_with_an_error() -> None:
    driver = SchedulerDriver()
    beam = start(driver)
    driver.append_token(beam, 5)
    driver.step(fails=True)
    (output,) = driver.flush()
    assert (output.finish_reason.name, output.token_id, output.output_index) == ("ERROR", -1, 1)
    driver.drain()


def preempted_and_held(driver: SchedulerDriver) -> int:
    """A beam that a sequence served before it took the blocks from while it was held."""
    urgent = driver.add("urgent", [7] * 10, 20, priority=-1, ignore_eos=True)
    driver.step()
    beam = start(driver)
    while driver.scheduler.num_preemptions == 0:
        driver.step()
    driver.abort_seq(urgent)
    driver.flush()
    assert (driver.held_seq_ids(), driver.scheduler.num_waiting) == ([beam], 1)
    return beam


def test_preempted_beam_that_is_held_blocks_nobody_behind_it() -> None:
    driver = SchedulerDriver(num_blocks=7, enable_prefix_caching=False)
    preempted_and_held(driver)
    assert driver.step().is_empty()
    later = driver.add("later", [6] * 10, 3, ignore_eos=True)
    for _ in range(4):
        driver.step()
    assert driver.lines[later].ended == "LENGTH"
    driver.drain()


def test_preempted_beam_that_is_held_may_be_forked_and_goes_on() -> None:
    driver = SchedulerDriver(num_blocks=7, enable_prefix_caching=False)
    beam = preempted_and_held(driver)
    fork = driver.fork(beam, seed=0)
    assert (driver.held_seq_ids(), driver.scheduler.num_waiting) == ([beam, fork], 2)
    driver.append_token(beam, 5)
    driver.append_token(fork, 6)
    assert driver.step().num_tokens == 2 * (len(PROMPT) + 1)
    driver.drain()


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"num_blocks": 4}, {"num_blocks": 8, "max_num_seqs": 3}])
def test_beams_that_do_not_fit_beside_each_other_take_turns(limits: dict[str, Any]) -> None:
    driver = SchedulerDriver(**limits)
    beam = start(driver)
    driver.add("later", [7] * 10, 3, ignore_eos=True)
    for token in range(3):
        driver.append_token(driver.fork(beam, seed=0), token)
    driver.append_token(beam, 5)
    driver.drain(max_steps=60)


def test_held_sequence_that_is_served_last_gives_way_first() -> None:
    driver = SchedulerDriver(max_num_seqs=2)
    last = driver.add("last", PROMPT, 6, ignore_eos=True, is_beam=True, priority=1)
    first = driver.add("first", PROMPT, 6, ignore_eos=True, is_beam=True)
    driver.step()
    driver.add("other", [7] * 10, 1, priority=2)
    assert driver.step().num_preempted == 1
    driver.append_token(first, 5)
    assert not driver.step().is_prefill  # what it had computed is still there
    driver.append_token(last, 5)
    assert driver.step().is_prefill
    driver.drain()


def test_held_sequences_keep_their_blocks_while_something_else_goes_on() -> None:
    driver = SchedulerDriver(max_num_seqs=2)
    start(driver)
    driver.add("running", [7] * 10, 9, ignore_eos=True)
    waiting = driver.add("waiting", [6] * 10, 1, ignore_eos=True)
    while not driver.lines[waiting].ended:
        driver.step()
    assert driver.scheduler.num_preemptions == 0
    driver.drain()


def test_beam_with_several_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="n: must be 1 for a beam, got 2"):
        SamplingOptions(max_tokens=1, n=2, is_beam=True)
