"""Steps that verify drafts: how many a row has, what it writes and reads, and what becomes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_backend._core import RequestOutput, SamplingOptions, SchedulerOutputs, StepArrays
from tests.core.fake_device import TopLogprobs, make_arrays, make_logprobs
from tests.core.fake_model import EOS, NO_TOKEN, next_token
from tests.core.scheduler_driver import SchedulerDriver

PROMPT = [2, 3, 4, 5, 6]


class Script:
    """One sequence whose tokens and drafts we choose, step by step."""

    def __init__(self, num_speculative_tokens: int, **options: Any) -> None:
        self.width = num_speculative_tokens
        self.driver = SchedulerDriver(num_speculative_tokens=num_speculative_tokens, max_num_extra_logits=8)
        self.scheduler = self.driver.scheduler
        self.scheduler.add_seq("a", np.array(PROMPT, np.int32), SamplingOptions(**{"max_tokens": 40, **options}))
        self.arrays = make_arrays(64, 8, 16, max_extra_logits=8)

    def launch(self, draft_threshold: float = 0.0) -> SchedulerOutputs:
        _, batch = self.scheduler.schedule(self.driver.metadata_pool, draft_threshold=draft_threshold)
        batch.write(StepArrays(**self.arrays))
        return batch

    def take(
        self, batch: SchedulerOutputs, tokens: list[int], drafts: list[int] | None, **more: Any
    ) -> list[RequestOutput]:
        token_ids = np.array([tokens + [NO_TOKEN] * (1 + self.width - len(tokens))], np.int32)
        proposed = None if drafts is None else np.array([drafts + [NO_TOKEN] * (self.width - len(drafts))], np.int32)
        num_tokens = np.array([len(tokens)], np.int32)
        self.scheduler.process_outputs(batch, token_ids, num_tokens, drafts=proposed, **more)
        self.scheduler.check_invariants()
        return self.driver.output_pool.clone(self.scheduler.build_request_outputs(batch, self.driver.output_pool))

    def step(self, tokens: list[int], drafts: list[int] | None, draft_threshold: float = 0.0) -> int:
        """Returns how many drafts it verified."""
        batch = self.launch(draft_threshold)
        self.take(batch, tokens, drafts)
        return batch.num_sampled_rows - 1

    def written(self, name: str, number: int) -> list[int]:
        values: list[int] = self.arrays[name][:number].tolist()
        return values


def run(driver: SchedulerDriver, seq_id: int) -> list[tuple[int, int, int]]:
    """Until the sequence has ended: tokens computed, outputs so far and blocks used, for each step."""
    steps = []
    while not driver.lines[seq_id].ended:
        num_tokens = driver.step().num_tokens
        steps.append((num_tokens, len(driver.lines[seq_id].outputs), driver.scheduler.num_used_blocks))
    return steps


def counts(driver: SchedulerDriver) -> tuple[int, int, list[int]]:
    scheduler = driver.scheduler
    return (
        scheduler.num_draft_tokens,
        scheduler.num_accepted_draft_tokens,
        scheduler.num_accepted_by_position.tolist(),
    )


def draft_driver(**limits: Any) -> SchedulerDriver:
    return SchedulerDriver(**{"num_speculative_tokens": 3, "max_num_extra_logits": 16, **limits})


def test_drafts_that_are_always_right_give_four_tokens_a_step() -> None:
    driver = draft_driver(zero_overhead_scheduling=False)
    seq_id = driver.add("a", PROMPT, 13, ignore_eos=True, draft_quality=4)
    # The prompt is in positions 0 to 4; each step computes the last token and three more, across the ends of blocks.
    assert run(driver, seq_id) == [(5, 1, 2), (4, 5, 3), (4, 9, 4), (4, 13, 5)]
    assert counts(driver) == (9, 9, [3, 3, 3])
    driver.drain()


def test_drafts_that_are_always_wrong_give_one_token_a_step_and_none_is_computed_for_nothing_at_the_end() -> None:
    driver = draft_driver(zero_overhead_scheduling=False)
    seq_id = driver.add("a", PROMPT, 5, ignore_eos=True, draft_quality=0)
    assert run(driver, seq_id) == [(5, 1, 2), (4, 2, 3), (3, 3, 3), (2, 4, 3), (1, 5, 3)]
    assert counts(driver) == (6, 0, [0, 0, 0])
    driver.drain()


def test_drafts_that_are_right_half_the_time() -> None:
    script = Script(2)
    tokens = [[10], [11, 12], [13, 14], [15, 16]]
    drafts = [[11, 7], [13, 7], [15, 7], [17, 7]]
    assert [script.step(*step) for step in zip(tokens, drafts, strict=True)] == [0, 2, 2, 2]
    assert counts(script.driver) == (6, 3, [3, 0])
    assert script.scheduler.num_used_blocks == 3  # the last step computed positions 9 to 11
    metadata, _ = script.scheduler.schedule(script.driver.metadata_pool)
    assert (metadata[0].seqlen_q, metadata[0].seqlen_k, metadata[0].output_index) == (3, 14, 7)


def test_step_in_flight_counts_as_one_token_and_its_drafts_as_memory() -> None:
    driver = draft_driver()
    seq_id = driver.add("a", PROMPT, 13, ignore_eos=True, draft_quality=4)
    # Each step reserves for seven tokens, and the last one, of which nothing comes out, does not know that it is one.
    assert run(driver, seq_id) == [(5, 1, 2), (4, 1, 3), (4, 5, 4), (4, 9, 5), (3, 13, 5)]
    assert counts(driver) == (9, 9, [3, 3, 3])
    driver.drain()


def test_arrays_of_a_step_behind_one_in_flight() -> None:
    script = Script(3)
    first = script.launch()
    assert script.written("sample_slots", 1) == [0]
    script.take(first, [10], [11, 12, 13])
    second = script.launch()
    assert script.written("token_ids", 4) == [10, 0, 0, 0]
    assert script.written("token_sources", 4) == [-1, 1, 2, 3]
    assert script.written("positions", 4) == [5, 6, 7, 8]
    assert script.written("advance_slots", 1) == [-1]
    third = script.launch()
    assert script.written("token_sources", 4) == [0, 1, 2, 3]
    assert script.written("positions", 4) == [6, 7, 8, 9]
    assert script.written("advance_slots", 1) == [0]
    assert script.written("seq_lens", 1) == [10]
    assert (third.max_query_len, third.max_seq_len, third.max_num_blocks) == (4, 13, 4)
    assert script.written("logits_indices", 4) == [0, 1, 2, 3]
    assert script.written("sample_start_loc", 2) == [0, 4]
    assert script.written("output_indices", 1) == [2]
    assert script.written("slot_mapping", 4) == [
        4 * block + offset for block, offset in ((2, 2), (2, 3), (3, 0), (3, 1))
    ]
    script.take(second, [11, 12, 5], [6, 7, 8])
    script.take(third, [6], [])
    assert script.step([9], []) == 3
    assert script.written("positions", 4) == [9, 10, 11, 12]


def test_rows_of_logits_are_banned_while_min_tokens_may_still_hold_them_back() -> None:
    script = Script(3, min_tokens=4, eos_token_ids=[EOS])
    script.take(script.launch(), [10], [11, 12, 13])
    batch = script.launch()  # samples outputs 1 to 4
    assert batch.num_banned == 3
    assert script.written("banned_rows", 3) == [0, 1, 2]
    assert script.written("banned_token_ids", 3) == [EOS] * 3
    assert script.written("banned_until", 3) == [4] * 3
    assert script.launch().num_banned == 2  # outputs 2 to 5, or later ones


def test_end_token_among_accepted_drafts_ends_the_sequence_there() -> None:
    script = Script(3, eos_token_ids=[EOS])
    script.take(script.launch(), [10], [11, EOS, 13])
    stopped, later = script.launch(), script.launch()
    outputs = script.take(stopped, [11, EOS, 13, 14], [15, 16, 17])
    assert [(output.token_id, output.finish_reason.name) for output in outputs] == [(11, "NONE"), (EOS, "STOP")]
    assert [output.output_index for output in outputs] == [1, 2]
    assert [output.num_accepted_draft_tokens for output in outputs] == [1, 2]
    assert [output.num_draft_tokens for output in outputs] == [3, 3]
    assert not script.scheduler.has_unfinished_seqs()
    assert script.take(later, [15, 16], [1, 2, 3]) == []
    assert counts(script.driver) == (3, 2, [1, 1, 0])
    script.scheduler.free_finished_seqs()
    assert script.scheduler.num_used_blocks == 0


def test_accepted_drafts_are_found_in_the_prefix_cache_and_rejected_ones_are_not() -> None:
    script = Script(3)
    script.step([10], [11, 12, 13])
    script.step([11, 12, 13, 14], [15, 16, 17])  # positions 5 to 8: the second block is full
    script.step([15, 5], [6])  # positions 9 to 12; that of 16 and 17 is not what is there
    script.step([6, 7], [])
    script.scheduler.abort_request("a")
    known = [*PROMPT, 10, 11, 12, 13, 14, 15]
    for index, (text, num_cached) in enumerate([([*known, 5, 6], 12), ([*known, 16, 17], 8)]):
        script.scheduler.add_seq(f"{index}", np.array(text, np.int32), SamplingOptions(max_tokens=1))
        batch = script.launch()
        assert batch.num_cached_tokens == num_cached
        script.take(batch, [1], [])


def test_sequence_that_is_preempted_with_drafts_in_flight_keeps_what_they_give() -> None:
    driver = draft_driver(num_blocks=7)
    first = driver.add("first", PROMPT, 20, ignore_eos=True, draft_quality=4)
    second = driver.add("second", [*PROMPT, 7], 10, ignore_eos=True, draft_quality=4)
    driver.drain()
    assert driver.scheduler.num_preemptions > 0
    assert [len(driver.output_tokens(seq_id)) for seq_id in (first, second)] == [20, 10]


def test_abort_with_drafts_in_flight_gives_no_output_and_all_blocks_back() -> None:
    driver = draft_driver()
    seq_id = driver.add("a", PROMPT, 30, ignore_eos=True, draft_quality=4)
    for _ in range(3):
        driver.step()
    num_outputs = len(driver.lines[seq_id].outputs)
    driver.abort("a")
    assert driver.flush() == []
    assert len(driver.lines[seq_id].outputs) == num_outputs
    driver.drain()


@settings(max_examples=150, deadline=None)
@given(
    num_speculative_tokens=st.integers(1, 7),
    has_draft_model=st.booleans(),
    num_blocks=st.integers(10, 40),
    block_size=st.integers(2, 5),
    max_num_seqs=st.integers(1, 6),
    enable_prefix_caching=st.booleans(),
    zero_overhead_scheduling=st.sampled_from([True, True, False]),
    requests=st.lists(
        st.tuples(
            st.integers(1, 12),  # tokens of the prompt
            st.integers(1, 30),  # max_tokens
            st.sampled_from([None, 0, 2, 3, 4]),  # draft_quality
            st.integers(1, 3),  # n
            st.booleans(),  # ignore_eos
            st.sampled_from([-1, 1]),  # num_logprobs
        ),
        min_size=1,
        max_size=6,
    ),
    thresholds=st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.4, 1.0]), min_size=1, max_size=5),
    aborts=st.dictionaries(st.integers(2, 40), st.integers(0, 5), max_size=3),  # after which step, which request
)
def test_requests_with_drafts_have_the_tokens_of_the_plain_model(
    requests: list[tuple[int, int, int | None, int, bool, int]],
    thresholds: list[float],
    aborts: dict[int, int],
    has_draft_model: bool,
    **limits: Any,
) -> None:
    limits["num_lookahead_tokens"] = limits["num_speculative_tokens"] if has_draft_model else 0
    driver = SchedulerDriver(max_num_extra_logits=32, max_model_len=20, **limits)
    for index, (num_tokens, max_tokens, draft_quality, n, ignore_eos, num_logprobs) in enumerate(requests):
        driver.add(
            f"{index}",
            [2 + (index + i) % 6 for i in range(num_tokens)],
            max_tokens,
            seed=100 * index,
            draft_quality=draft_quality,
            n=n,
            ignore_eos=ignore_eos,
            num_logprobs=num_logprobs,
        )
    for step in range(45):
        driver.step(draft_threshold=thresholds[step % len(thresholds)])
        if step in aborts:
            driver.abort(f"{aborts[step]}")
    driver.drain()


# ---- a drafter with a model ----


def test_model_that_was_not_asked_for_some_steps_computes_what_it_missed() -> None:
    driver = draft_driver(num_lookahead_tokens=3, zero_overhead_scheduling=False, enable_prefix_caching=False)
    driver.add("a", PROMPT, 30, ignore_eos=True, draft_quality=4)
    steps = [driver.step(draft_threshold=threshold) for threshold in (0.0, 0.0, 1.0, 1.0, 0.0, 0.0)]
    # Drafts are proposed by one step and verified by the next; two tokens came without it, and two it always computes.
    assert [(batch.num_tokens, *batch.draft_query_lens.tolist()) for batch in steps] == [
        (5, 2),
        (4, 2),
        (1, 0),
        (1, 0),
        (1, 4),
        (4, 2),
    ]
    driver.drain()


def test_model_that_is_far_behind_is_not_asked_any_more() -> None:
    driver = draft_driver(num_lookahead_tokens=3, max_model_len=200)
    driver.add("a", PROMPT, 150, ignore_eos=True, draft_quality=4)
    for _ in range(70):
        driver.step(draft_threshold=1.0)
    assert driver.step().draft_query_lens.tolist() == [0]
    driver.drain()


def test_proposals_have_blocks_of_their_own_as_far_as_there_are_any() -> None:
    driver = draft_driver(num_lookahead_tokens=3, num_blocks=3, zero_overhead_scheduling=False)
    driver.add("a", PROMPT, 6, ignore_eos=True, draft_quality=4)
    prefill = driver.step()
    assert prefill.draft_query_lens.tolist() == [2]
    assert driver.scheduler.num_used_blocks == 2  # positions 5 to 7 are those of the next token and its drafts
    assert driver.step().num_tokens == 4
    assert driver.scheduler.num_used_blocks == 3
    driver.drain()


# ---- how many drafts ----


def test_drafts_take_no_block_that_a_token_needs_and_preempt_nobody() -> None:
    driver = draft_driver(num_blocks=5, zero_overhead_scheduling=False)
    driver.add("first", [2, 3, 4, 5, 6, 7, 2], 2, ignore_eos=True)  # its next token fits into its last block
    driver.add("second", [3, 4, 5, 6, 7, 2, 3, 4], 9, ignore_eos=True)  # needs the only free one
    driver.step()
    assert (driver.scheduler.num_used_blocks, driver.step().num_tokens) == (4, 2 + 3)
    assert (driver.scheduler.num_preemptions, driver.scheduler.num_draft_tokens) == (0, 3)
    driver.drain()


@pytest.mark.parametrize(
    ("limits", "num_drafts"), [({"max_num_batched_tokens": 12}, 8), ({"max_num_extra_logits": 5}, 5)]
)
def test_drafts_fill_the_step_after_everybodys_own_token(limits: dict[str, int], num_drafts: int) -> None:
    driver = draft_driver(**limits)
    for index in range(4):
        driver.add(f"{index}", [2, 3], 9, ignore_eos=True)
    driver.step()
    batch = driver.step()
    assert (batch.num_seqs, batch.num_sampled, batch.num_sampled_rows) == (4, 4, 4 + num_drafts)
    driver.drain()


def test_number_of_drafts_follows_what_became_of_those_before() -> None:
    script = Script(3)
    script.step([1], [2, 3, 4])  # begins at 0.5
    assert script.step([9], [2, 3, 4], 0.3) == 1  # 0.5 > 0.3 > 0.25; and now 0.4375
    assert script.step([2, 9], [9, 3, 4], 0.43) == 1  # right, then wrong, though nobody computed it: 0.4443359375
    assert script.step([2], [5, 6, 7], 0.45) == 0  # wrong: 0.388793945312
    assert script.step([5], [6, 7, 8], 0.45) == 0  # right: 0.465194702148
    assert script.step([6, 1], [1], 0.45) == 1  # right, then wrong
    assert script.step([1, 2], [], 0.08) == 3  # 0.46552264690399: its cube is 0.1009, its square 0.2167
    assert script.step([5], [], 1.0) == 0


def test_draft_that_is_missing_counts_as_wrong_but_not_as_a_draft() -> None:
    script = Script(3)
    script.step([1], [])
    assert script.step([2], [], 0.49) == 1  # 0.4375 from here on
    assert script.step([3], [4], 0.43) == 1
    assert script.step([4], [], 0.4) == 0  # 0.3828125
    assert counts(script.driver) == (0, 0, [0, 0, 0])


def test_step_in_which_nobody_was_asked_for_drafts_says_nothing_about_them() -> None:
    script = Script(3)
    script.step([1], None)
    for token in (2, 3, 4):
        assert script.step([token], None, 0.49) == 1
    assert counts(script.driver) == (0, 0, [0, 0, 0])


@pytest.mark.parametrize("threshold", [-0.1, float("nan")])
def test_threshold_that_is_no_probability_is_refused(threshold: float) -> None:
    driver = draft_driver()
    with pytest.raises(ValueError, match="draft_threshold: must be 0 or more, got"):
        driver.scheduler.schedule(driver.metadata_pool, draft_threshold=threshold)


# ---- slots ----


def test_slot_is_told_with_all_tokens_by_the_step_that_first_samples_for_it() -> None:
    driver = draft_driver(max_num_batched_tokens=4)
    seq_id = driver.add("a", PROMPT, 9, n=2, seed=70, ignore_eos=True)
    batches = [driver.step() for _ in range(3)]
    told = [[(slot, tokens.tolist()) for slot, tokens in batch.new_slots] for batch in batches]
    assert told == [[], [(0, PROMPT)], [(1, PROMPT)]]
    assert next_token(PROMPT, 70) == driver.output_tokens(seq_id)[0]
    driver.drain()


def test_without_drafts_no_slot_is_told() -> None:
    driver = SchedulerDriver()
    driver.add("a", PROMPT, 9)
    assert driver.step().new_slots == []


def test_slot_of_a_sequence_that_ended_goes_to_the_next_one() -> None:
    driver = draft_driver(max_num_seqs=2)
    for index in range(5):
        driver.add(f"{index}", PROMPT, 4, ignore_eos=True)
    slots: set[int] = set()
    while driver.scheduler.has_unfinished_seqs():
        slots |= {slot for slot, _ in driver.step().new_slots}
    assert slots == {0, 1}
    driver.drain()


# ---- what a step may tell ----


def test_tokens_of_a_row_have_the_logprobs_of_its_rows_of_logits() -> None:
    script = Script(3, num_logprobs=1)
    script.take(script.launch(), [10], [11, 12, 13])
    tops: list[TopLogprobs] = [[(token, -1.0)] for token in (11, 12, 5, 6)]
    told = make_logprobs([0, 1, 2, 3], [-0.5, -1.5, -2.5, -3.5], [1, 2, 3, 4], tops)
    outputs = script.take(script.launch(), [11, 12, 5], [], logprobs=told)
    assert [(output.token_id, output.logprob, output.rank, output.top_logprobs) for output in outputs] == [
        (11, -0.5, 1, [(11, -1.0)]),
        (12, -1.5, 2, [(12, -1.0)]),
        (5, -2.5, 3, [(5, -1.0)]),
    ]


def test_tokens_that_no_draft_stands_for_are_refused() -> None:
    script = Script(3)
    batch = script.launch()
    with pytest.raises(ValueError, match="row 0: num_tokens must be 0 to 1, got 2"):
        script.take(batch, [10, 11], [])
    script.take(batch, [10], [11, 12])
    batch = script.launch()
    for tokens in ([11, 5, 6], [5, 6], [11, 12, 13, 14]):
        with pytest.raises(ValueError, match="cannot be an accepted draft: it was not proposed"):
            script.take(batch, tokens, [])
    token_ids, num_tokens = np.full((1, 4), 5, np.int32), np.ones(1, np.int32)
    for shape in ((1, 2), (2, 3), (3,)):
        with pytest.raises(ValueError, match=r"drafts: must have num_speculative_tokens \(3\) entries per row"):
            script.scheduler.process_outputs(batch, token_ids, num_tokens, drafts=np.zeros(shape, np.int32))
    script.scheduler.check_invariants()
    assert len(script.take(batch, [11, 12, 13], [])) == 3


def test_sequence_without_a_token_has_no_drafts_until_it_has_one() -> None:
    script = Script(3)
    script.step([10], [11, 12, 13])
    assert script.step([], [1, 2, 3]) == 3
    batch = script.launch()
    assert [(slot, tokens.tolist()) for slot, tokens in batch.new_slots] == [(0, [*PROMPT, 10])]
    assert (script.written("positions", 1), batch.num_sampled_rows) == ([5], 1)
    script.take(batch, [11], [12, 13, 14])
    assert script.step([12, 13, 14, 15], []) == 3
