"""How sequences end, and what happens to what they held."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer_backend._core import RequestOutput, SamplingOptions, Scheduler, SchedulerConfig, SchedulerOutputs
from tests.core.fake_model import EOS, next_token
from tests.core.scheduler_driver import SchedulerDriver

PROMPT = [2, 3, 4, 5, 6]


class Script:
    """Drives one sequence with tokens of our choice, step by step, without zero-overhead scheduling."""

    def __init__(self, **options: Any) -> None:
        self.driver = SchedulerDriver()
        self.scheduler = self.driver.scheduler
        self.scheduler.add_seq("a", np.array(PROMPT, dtype=np.int32), SamplingOptions(**options))

    def step(self, *tokens: int) -> list[RequestOutput]:
        _, batch = self.scheduler.schedule(self.driver.metadata_pool)
        token_ids = np.array([tokens], dtype=np.int32).reshape(1, len(tokens))
        return self.process(batch, token_ids, np.array([len(tokens)], dtype=np.int32))

    def process(self, batch: SchedulerOutputs, token_ids: Any, num_tokens: Any) -> list[RequestOutput]:
        self.scheduler.process_outputs(batch, token_ids, num_tokens)
        return self.driver.output_pool.clone(self.scheduler.build_request_outputs(batch, self.driver.output_pool))


def ends(outputs: list[RequestOutput]) -> list[tuple[int, str, int]]:
    return [(output.token_id, output.finish_reason.name, output.stop_token_id) for output in outputs]


def test_eos_ends_with_reason_stop() -> None:
    assert ends(Script(max_tokens=9, eos_token_ids=[7]).step(7)) == [(7, "STOP", 7)]


def test_stop_token_ends_even_with_ignore_eos() -> None:
    script = Script(max_tokens=9, eos_token_ids=[7], stop_token_ids=[8], ignore_eos=True)
    assert ends(script.step(7)) == [(7, "NONE", -1)]
    assert ends(script.step(8)) == [(8, "STOP", 8)]


def test_end_token_counts_only_after_min_tokens_other_outputs() -> None:
    script = Script(max_tokens=9, min_tokens=2, eos_token_ids=[7])
    assert [ends(script.step(7)) for _ in range(3)] == [[(7, "NONE", -1)], [(7, "NONE", -1)], [(7, "STOP", 7)]]


def test_end_token_at_max_tokens_is_a_stop() -> None:
    assert ends(Script(max_tokens=1, eos_token_ids=[7]).step(7)) == [(7, "STOP", 7)]


def test_max_tokens_ends_with_reason_length() -> None:
    script = Script(max_tokens=2)
    assert ends(script.step(7)) == [(7, "NONE", -1)]
    assert ends(script.step(7)) == [(7, "LENGTH", -1)]


def test_step_may_give_a_sequence_no_token() -> None:
    script = Script(max_tokens=9)
    assert script.step() == []
    assert ends(script.step(5)) == [(5, "NONE", -1)]


def first_eos_after(num_tokens: int, max_tokens: int = 30) -> int:
    """A seed whose sequence ends with EOS after a few tokens."""
    for seed in range(10_000):
        outputs: list[int] = []
        while len(outputs) < max_tokens and EOS not in outputs:
            outputs.append(next_token(PROMPT + outputs, seed))
        if len(outputs) == num_tokens and outputs[-1] == EOS:
            return seed
    raise AssertionError("no such seed")


def test_what_was_sampled_after_the_end_is_dropped_and_blocks_wait_for_it() -> None:
    driver = SchedulerDriver()
    seq_id = driver.add("a", PROMPT, 30, seed=first_eos_after(3))
    for _ in range(3):
        driver.step()
    assert driver.lines[seq_id].ended == ""
    driver.step()
    assert driver.lines[seq_id].ended == "STOP"
    assert driver.inflight is not None
    assert driver.inflight.seq_ids == [seq_id]
    assert not driver.scheduler.has_unfinished_seqs()
    assert driver.scheduler.num_used_blocks == 2
    assert driver.flush() == []
    driver.scheduler.free_finished_seqs()
    assert driver.scheduler.num_used_blocks == 0


def test_aborted_sequence_gives_no_output_and_keeps_blocks_until_its_step_is_done() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 30, ignore_eos=True)
    driver.step()
    driver.step()
    driver.abort("a")
    driver.scheduler.free_finished_seqs()
    assert driver.scheduler.num_unfinished_requests == 0
    assert driver.scheduler.num_used_blocks == 2
    assert driver.flush() == []
    driver.scheduler.free_finished_seqs()
    assert driver.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("num_steps", [0, 1])
def test_abort_of_a_sequence_in_no_step_frees_it_at_the_next_schedule(num_steps: int) -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 30, ignore_eos=True)
    for _ in range(num_steps):
        driver.step()
    driver.abort("a")
    assert driver.step().is_empty()
    assert driver.scheduler.num_used_blocks == 0


def test_abort_between_processing_and_building_drops_the_outputs() -> None:
    driver = SchedulerDriver()
    for request_id in ("a", "b"):
        driver.scheduler.add_seq(request_id, np.array(PROMPT, dtype=np.int32), SamplingOptions(max_tokens=5))
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    driver.scheduler.process_outputs(batch, np.array([[7], [7]], np.int32), np.ones(2, np.int32))
    assert driver.scheduler.abort_request("a")
    handles = driver.scheduler.build_request_outputs(batch, driver.output_pool)
    assert [output.request_id for output in driver.output_pool.clone(handles)] == ["b"]


def test_abort_of_an_unknown_or_ended_request_is_false() -> None:
    driver = SchedulerDriver()
    assert not driver.scheduler.abort_request("a")
    driver.add("a", PROMPT, 1)
    driver.drain()
    assert not driver.scheduler.abort_request("a")


def test_request_id_is_free_again_after_its_end() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 30, ignore_eos=True)
    with pytest.raises(ValueError, match="'a' is that of an unfinished request"):
        driver.add("a", PROMPT, 30)
    driver.step()
    driver.step()
    driver.abort("a")
    again = driver.add("a", PROMPT, 3, ignore_eos=True)
    driver.drain()
    assert len(driver.lines[again].outputs) == 3


def test_failed_step_ends_its_sequences_only() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=5)
    failing = driver.add("failing", PROMPT, 9, ignore_eos=True)
    driver.step()
    other = driver.add("other", [7, 6, 5], 9, ignore_eos=True)
    driver.step()
    driver.step()
    driver.abort("other")
    again = driver.add("again", [7, 6, 5], 9, ignore_eos=True)
    driver.step(fails=True)
    driver.drain()
    assert driver.lines[other].ended == "abort"
    assert {driver.lines[failing].ended, driver.lines[again].ended} == {"ERROR", "LENGTH"}


def test_blocks_of_a_failed_step_are_not_found_in_the_prefix_cache() -> None:
    driver = SchedulerDriver()
    prompt = [2, 3, 4, 5, 6, 7, 2, 3, 4]
    driver.add("a", prompt, 3)
    driver.step(fails=True)
    driver.add("b", prompt, 3)
    assert driver.step().num_cached_tokens == 0
    driver.drain()
    driver.add("c", prompt, 3)
    assert driver.step().num_cached_tokens == 8
    driver.drain()


def processing_errors() -> list[tuple[str, Callable[[Scheduler, SchedulerOutputs], None]]]:
    ones, token = np.ones(1, np.int32), np.array([[7]], np.int32)
    return [
        ("samples 1 rows, got 2", lambda s, b: s.process_outputs(b, np.zeros((2, 1), np.int32), np.ones(2, np.int32))),
        ("one entry per row", lambda s, b: s.process_outputs(b, token, np.ones(2, np.int32))),
        ("shape", lambda s, b: s.process_outputs(b, np.zeros(1, np.int32), ones)),
        ("num_tokens must be 0 to 1", lambda s, b: s.process_outputs(b, token, ones * 2)),
        ("num_tokens must be 0 to 1", lambda s, b: s.process_outputs(b, token, -ones)),
        ("negative", lambda s, b: s.process_outputs(b, -token, ones)),
    ]


@pytest.mark.parametrize(("message", "process"), processing_errors())
def test_outputs_that_do_not_match_the_step_are_refused_and_change_nothing(
    message: str, process: Callable[[Scheduler, SchedulerOutputs], None]
) -> None:
    script = Script(max_tokens=9)
    _, batch = script.scheduler.schedule(script.driver.metadata_pool)
    with pytest.raises(ValueError, match=message):
        process(script.scheduler, batch)
    script.scheduler.check_invariants()
    assert len(script.process(batch, np.array([[7]], np.int32), np.ones(1, np.int32))) == 1


def test_step_is_processed_once_and_in_order() -> None:
    script = Script(max_tokens=9)
    script.step(7)
    scheduler, pool = script.scheduler, script.driver.metadata_pool
    first, second = scheduler.schedule(pool)[1], scheduler.schedule(pool)[1]
    tokens = (np.array([[7]], np.int32), np.ones(1, np.int32))
    with pytest.raises(ValueError, match="earlier one was not"):
        scheduler.process_outputs(second, *tokens)
    with pytest.raises(ValueError, match="was not processed"):
        scheduler.build_request_outputs(first, script.driver.output_pool)
    scheduler.process_outputs(first, *tokens)
    with pytest.raises(ValueError, match="processed already"):
        scheduler.process_outputs(first, *tokens)
    with pytest.raises(ValueError, match="processed already"):
        scheduler.fail_step(first, script.driver.output_pool)


def test_step_that_the_next_one_builds_on_must_give_a_token() -> None:
    script = Script(max_tokens=9)
    script.step(7)
    first = script.scheduler.schedule(script.driver.metadata_pool)[1]
    script.scheduler.schedule(script.driver.metadata_pool)
    with pytest.raises(ValueError, match="row 0: has no token, but the step after it builds on one"):
        script.scheduler.process_outputs(first, np.array([[7]], np.int32), np.zeros(1, np.int32))


def test_limits_are_checked_by_the_constructors() -> None:
    limits: dict[str, Any] = {
        "num_blocks": 4,
        "block_size": 4,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "max_model_len": 8,
    }
    for name in [*limits, "max_num_extra_logits", "max_consecutive_prefills", "prefill_attempt_interval"]:
        with pytest.raises(ValueError, match=f"{name}: must be"):
            SchedulerConfig(**{**limits, name: 0})
    for num_drafts in (-1, 1):  # a token and its drafts must fit in a step
        with pytest.raises(ValueError, match=f"num_speculative_tokens: must be 0 to 0, got {num_drafts}"):
            SchedulerConfig(**limits, num_speculative_tokens=num_drafts)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        SchedulerConfig(**{**limits, "num_blocks": 1, "block_size": 1})
    with pytest.raises(ValueError, match="max_tokens: must be"):
        SamplingOptions(max_tokens=0)
    wrong: dict[str, Any] = {
        "min_tokens": 2,
        "temperature": math.inf,
        "top_k": -1,
        "top_p": 0.0,
        "min_p": math.nan,
        "n": 0,
        "num_logprobs": -2,
        "lora_id": -1,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name}: must be"):
            SamplingOptions(**{"max_tokens": 1, name: value})


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "is empty"), ([2] * 12, "in the KV cache"), ([2] * 100, "in the KV cache")]
)
def test_prompt_that_cannot_run_is_refused_with_its_limit(prompt: list[int], message: str) -> None:
    driver = SchedulerDriver(num_blocks=3, block_size=4)
    with pytest.raises(ValueError, match=message):
        driver.add("a", prompt)
    driver.add("a", [2] * 11)
    driver.drain()
