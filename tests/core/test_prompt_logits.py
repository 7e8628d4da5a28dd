"""Steps give logits for each token of a prompt that wants them, and for no more than fit."""

from __future__ import annotations

import pytest

from tests.core.scheduler_driver import SchedulerDriver

PROMPT = [2, 3, 4, 5, 6, 7, 2, 3, 4, 5]


def test_logits_of_a_prompt_come_in_chunks_of_max_num_extra_logits() -> None:
    driver = SchedulerDriver(max_num_extra_logits=4)
    seq_id = driver.add("a", PROMPT, 3, prompt_logprobs=True)
    spans = [driver.step().prompt_logits.tolist() for _ in range(4)]
    assert spans == [[[seq_id, 0, 4]], [[seq_id, 4, 4]], [[seq_id, 8, 1]], []]
    driver.drain()


def test_two_prompts_share_the_room_of_a_step() -> None:
    driver = SchedulerDriver(max_num_extra_logits=12)
    first = driver.add("a", PROMPT, 3, prompt_logprobs=True)
    second = driver.add("b", PROMPT, 3, prompt_logprobs=True)
    third = driver.add("c", PROMPT, 3, prompt_logprobs=True)
    other = driver.add("d", PROMPT, 3)
    assert driver.step().prompt_logits.tolist() == [[first, 0, 9], [second, 0, 3]]
    assert driver.lines[other].outputs == []  # behind one that waits for room
    assert driver.step().prompt_logits.tolist() == [[second, 3, 6], [third, 0, 6]]
    driver.drain()


def test_prompt_that_wants_logits_is_not_taken_from_the_cache_but_put_there() -> None:
    driver = SchedulerDriver(max_num_extra_logits=64)
    for _ in range(2):
        driver.add("a", PROMPT, 1, prompt_logprobs=True)
        batch = driver.step()
        assert (batch.num_tokens, batch.num_cached_tokens) == (10, 0)
        driver.drain()
    driver.add("b", PROMPT, 1)
    assert driver.step().num_cached_tokens == 8
    driver.drain()


def test_chunk_cut_short_by_its_logits_leaves_the_rest_of_the_step_to_others() -> None:
    driver = SchedulerDriver(max_num_extra_logits=4)
    driver.add("a", PROMPT, 3, prompt_logprobs=True, lora_id=1)
    other = driver.add("b", PROMPT, 3, is_tracked=True, lora_id=2)
    batch = driver.step()
    assert (batch.num_tokens, batch.num_sampled) == (4 + len(PROMPT), 1)
    assert (batch.tracked_rows.tolist(), batch.tracked_seq_ids.tolist()) == ([0], [other])
    assert batch.lora_ids.tolist() == [1, 2]
    driver.drain()


def test_prompt_of_one_token_has_none() -> None:
    driver = SchedulerDriver()
    driver.add("a", [2], 2, prompt_logprobs=True)
    assert driver.step().num_prompt_logits == 0
    driver.drain()


def test_children_that_compute_the_prompt_again_give_no_logits_of_it() -> None:
    driver = SchedulerDriver(max_num_seqs=1, max_num_extra_logits=64)
    driver.add("a", PROMPT, 2, prompt_logprobs=True, n=3)
    num_prompt_logits = 0
    while driver.scheduler.has_unfinished_seqs():
        num_prompt_logits += driver.step().num_prompt_logits
    assert num_prompt_logits == len(PROMPT) - 1
    driver.drain()


@pytest.mark.parametrize("n", [1, 3])
def test_logits_are_not_given_again_when_a_sequence_with_outputs_is_recomputed(n: int) -> None:
    driver = SchedulerDriver(num_blocks=7, max_num_extra_logits=64)
    driver.add("a", PROMPT, 14, prompt_logprobs=True, n=n, ignore_eos=True)
    driver.add("b", PROMPT[::-1], 14, prompt_logprobs=True, ignore_eos=True)
    num_prompt_logits = 0
    while driver.scheduler.has_unfinished_seqs():
        num_prompt_logits += driver.step().num_prompt_logits
    assert driver.scheduler.num_preemptions > 0
    assert num_prompt_logits == 2 * (len(PROMPT) - 1)
    driver.drain()
