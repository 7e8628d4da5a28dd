"""Prompts that one scheduler's engine computes and another's decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_backend._core import PromptedSequence, SamplingOptions
from tests.core.scheduler_driver import SchedulerDriver

PROMPT = [2, 3, 4, 5, 6, 7, 2, 4, 6, 3]
ENDLESS: dict[str, Any] = {"ignore_eos": True}


def prompt_engine(**limits: Any) -> SchedulerDriver:
    return SchedulerDriver(is_prompt_engine=True, **limits)


def test_a_prompt_engine_computes_prompts_and_first_tokens_alone() -> None:
    driver = prompt_engine(max_num_batched_tokens=4)
    seq_ids = [driver.add(f"{seed}", PROMPT[seed:], 8, seed=seed, **ENDLESS) for seed in range(3)]
    for _ in range(20):
        driver.step()
    assert driver.scheduler.num_prompted == 3
    assert [len(driver.output_tokens(seq_id)) for seq_id in seq_ids] == [1, 1, 1]
    blocks = driver.scheduler.prompted_blocks("0")
    assert len(blocks) == 3 and driver.scheduler.num_used_blocks >= 3
    driver.abort("0")
    assert len(driver.scheduler.prompted_blocks("0")) == 0
    driver.abort("1")
    driver.abort("2")
    driver.drain()


def test_prompts_that_nobody_takes_keep_their_blocks_and_others_wait() -> None:
    driver = prompt_engine(num_blocks=7, enable_prefix_caching=False)
    for seed in range(3):
        driver.add(f"{seed}", PROMPT, 8, seed=seed, **ENDLESS)
    for _ in range(10):
        driver.step()
    assert (driver.scheduler.num_prompted, driver.scheduler.num_waiting) == (2, 1)
    assert driver.scheduler.num_preemptions == 0
    driver.abort("1")
    driver.step()
    assert driver.scheduler.num_prompted == 2 and len(driver.scheduler.prompted_blocks("2")) == 3
    driver.abort("0")
    driver.abort("2")
    driver.drain()


def test_one_that_ends_with_its_first_token_is_not_kept() -> None:
    driver = prompt_engine()
    driver.add("short", PROMPT, 1)
    driver.step()
    driver.drain()


def test_a_prompted_sequence_goes_on_where_the_other_engine_ended() -> None:
    driver = SchedulerDriver()
    seq_id = driver.add_prompted("handed", PROMPT, 8, **ENDLESS)
    assert seq_id is not None
    assert driver.step().is_empty()
    (awaited,) = driver.awaiting()
    assert (awaited.seq_id, awaited.first_block, len(awaited.blocks)) == (seq_id, 0, 3)
    assert driver.step().is_empty() and driver.scheduler.awaits_blocks(seq_id)
    driver.receive(awaited, 3)
    assert not driver.step().is_prefill
    driver.drain()
    assert len(driver.output_tokens(seq_id)) == 7


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_what_does_not_arrive_is_computed_here(num_blocks: int) -> None:
    driver = SchedulerDriver()
    seq_id = driver.add_prompted("handed", PROMPT, 8, **ENDLESS)
    assert seq_id is not None
    driver.step()
    driver.receive(driver.awaiting()[0], num_blocks)
    batch = driver.step()
    assert batch.is_prefill and batch.num_tokens == len(PROMPT) + 1 - 4 * num_blocks
    driver.drain()
    assert len(driver.output_tokens(seq_id)) == 7


def test_what_the_prefix_cache_has_is_not_awaited() -> None:
    driver = SchedulerDriver()
    for request_id, first_block in (("first", 0), ("second", 2)):
        driver.add_prompted(request_id, PROMPT, 4, **ENDLESS)
        driver.step()
        (awaited,) = driver.awaiting()
        assert (awaited.first_block, len(awaited.blocks)) == (first_block, 3 - first_block)
        driver.drain()


def test_what_is_awaited_is_not_preempted_for_others() -> None:
    driver = SchedulerDriver(num_blocks=8, enable_prefix_caching=False)
    driver.add("running", PROMPT, 20, **ENDLESS)
    driver.step()
    driver.add_prompted("handed", PROMPT[1:], 4, seed=1, **ENDLESS)
    driver.step()
    (awaited,) = driver.awaiting()
    while driver.scheduler.num_preemptions == 0:
        driver.step()
    assert driver.awaiting() == [awaited] and driver.scheduler.awaits_blocks(awaited.seq_id)
    driver.drain()


def test_one_that_is_aborted_while_it_waits_gives_its_blocks_back() -> None:
    driver = SchedulerDriver()
    seq_id = driver.add_prompted("handed", PROMPT, 8, **ENDLESS)
    assert seq_id is not None
    driver.step()
    driver.abort("handed")
    assert not driver.scheduler.awaits_blocks(seq_id)
    with pytest.raises(LookupError):
        driver.scheduler.blocks_arrived(seq_id, 3)
    driver.drain()


@pytest.mark.parametrize(
    ("options", "first_token", "message"),
    [
        ({"max_tokens": 8, "n": 2}, 3, "n: a request whose prompt is computed elsewhere has one sequence"),
        ({"max_tokens": 1}, 3, "first_token_id: the sequence ends with it"),
        ({"max_tokens": 8, "stop_token_ids": [3]}, 3, "first_token_id: the sequence ends with it"),
        ({"max_tokens": 8}, -1, "first_token_id: must be 0 or more, got -1"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(options: dict[str, Any], first_token: int, message: str) -> None:
    scheduler = SchedulerDriver().scheduler
    prompted = PromptedSequence(first_token_id=first_token)
    with pytest.raises(ValueError, match=message):
        scheduler.add_prompted_seq("handed", np.array(PROMPT, np.int32), prompted, SamplingOptions(**options))
    assert not scheduler.has_unfinished_seqs()


def test_a_number_of_blocks_that_cannot_be_is_refused() -> None:
    driver = SchedulerDriver()
    seq_id = driver.add_prompted("handed", PROMPT, 8, **ENDLESS)
    assert seq_id is not None
    driver.step()
    with pytest.raises(ValueError, match="num_blocks: must be 0 to 3, got 4"):
        driver.scheduler.blocks_arrived(seq_id, 4)
    driver.drain()
