"""A sequence's state follows its own tokens, forks with it, and edits nobody else's row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import xgrammar
from numpy.typing import NDArray

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.worker.logit_edits import GrammarMask, LogitEdits
from deepinfer_backend.worker.sequence_state import SequenceState, needs_state
from deepinfer_backend.worker.sequence_states import SequenceStates

VOCAB_SIZE = 100
PROMPT = np.array([10, 11, 12, 10], dtype=np.int32)
EVERYTHING = SamplingParams(
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias={3: 2.0, 12: -1.0},
    allowed_token_ids=list(range(80)),
)
BAD_WORDS = [[4], [20, 5], [20, 21, 6]]


class CountingGrammar:
    """Allows the numbers from 0 in order; whole after `length` of them."""

    def __init__(self, length: int, position: int = 0) -> None:
        self._length = length
        self._position = position

    @property
    def is_terminated(self) -> bool:
        return self._position == self._length

    def accept(self, token_id: int) -> bool:
        if token_id != self._position:
            return False
        self._position += 1
        return True

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        row.fill(0)
        row[self._position // 32] = np.uint32(1 << self._position % 32).astype(np.int32)

    def take_back(self, num_tokens: int) -> None:
        self._position -= num_tokens

    def fork(self) -> CountingGrammar:
        return CountingGrammar(self._length, self._position)


class DeadEnd(CountingGrammar):
    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        raise InvalidRequestError("no token may come next")


def everything() -> SequenceState:
    return SequenceState(EVERYTHING, PROMPT, VOCAB_SIZE, bad_words_token_ids=BAD_WORDS, grammar=CountingGrammar(50, 10))


def states_of(make_states: dict[int, Callable[[], SequenceState]]) -> SequenceStates:
    states = SequenceStates(VOCAB_SIZE)
    for seq_id, make_state in make_states.items():
        states.add(seq_id, make_state())
    return states


def edits_of(states: SequenceStates, *seq_ids: int) -> LogitEdits | None:
    return states.edits(np.arange(len(seq_ids), dtype=np.int32), np.array(seq_ids, dtype=np.int64))


def edited(states: SequenceStates, *seq_ids: int) -> torch.Tensor:
    """[num_seqs, VOCAB_SIZE]: what the sequences make of the same logits."""
    logits = torch.linspace(-5, 5, VOCAB_SIZE).repeat(len(seq_ids), 1)
    edits = edits_of(states, *seq_ids)
    if edits is not None:
        edits.apply(logits)
    return logits


def append(states: SequenceStates, *tokens: tuple[int, list[int]]) -> list[int]:
    """(seq_id, its tokens) …"""
    width = max(len(token_ids) for _, token_ids in tokens)
    padded = [[*token_ids, *[99] * (width - len(token_ids))] for _, token_ids in tokens]
    return states.append(
        np.array([seq_id for seq_id, _ in tokens], dtype=np.int64),
        np.array(padded, dtype=np.int32),
        np.array([len(token_ids) for _, token_ids in tokens], dtype=np.int32),
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, n=4, min_tokens=3, stop_token_ids=[1], logprobs=2
        ),
    ],
)
def test_requests_without_edits_need_no_state_and_make_none(params: SamplingParams) -> None:
    assert not needs_state(params)
    assert edits_of(states_of({}), 1, 2) is None
    assert edits_of(states_of({1: everything}), 2, 3) is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(logit_bias={1: 1.0}),
        SamplingParams(allowed_token_ids=[1]),
        SamplingParams(structured_outputs={"regex": "a"}),
    ],
)
def test_requests_with_edits_need_a_state(params: SamplingParams) -> None:
    assert needs_state(params)


def test_request_with_bad_words_needs_a_state() -> None:
    assert needs_state(SamplingParams(), [[1]])


def test_penalties_without_output_and_bad_words_out_of_reach_edit_nothing() -> None:
    states = SequenceStates(VOCAB_SIZE)
    states.add(1, SequenceState(SamplingParams(presence_penalty=1.0), PROMPT, VOCAB_SIZE))
    states.add(2, SequenceState(SamplingParams(), PROMPT, VOCAB_SIZE, bad_words_token_ids=[[1, 2]]))
    assert edits_of(states, 1, 2) is None


def test_appending_token_by_token_or_several_at_once_is_the_same() -> None:
    rng = np.random.default_rng(1)
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    token_ids = rng.integers(0, VOCAB_SIZE, 200).tolist()
    states = states_of({seq_id: lambda: SequenceState(params, PROMPT, VOCAB_SIZE) for seq_id in (1, 2)})
    for token_id in token_ids:
        append(states, (1, [token_id]), (3, [1]))
    append(states, (2, token_ids[:150]), (3, [1]))
    append(states, (3, [1]), (2, token_ids[150:]))
    logits = edited(states, 1, 2)
    assert torch.equal(logits[0], logits[1])
    seen = set(token_ids) | set(PROMPT.tolist())
    changed = (logits[0] != torch.linspace(-5, 5, VOCAB_SIZE)).nonzero().squeeze(1).tolist()
    assert changed == sorted(seen)


def test_row_is_edited_by_its_own_sequence_alone() -> None:
    states = states_of({1: everything, 2: everything})
    append(states, (1, [10, 20, 21]), (2, [10]))
    together = edited(states, 7, 2, 1, 8)
    assert torch.equal(together[0], torch.linspace(-5, 5, VOCAB_SIZE))
    assert torch.equal(together[3], together[0])
    assert torch.equal(together[1], edited(states, 2)[0])
    assert torch.equal(together[2], edited(states, 1)[0])


def test_fork_has_its_parents_past_and_its_own_future() -> None:
    def without_grammar() -> SequenceState:
        return SequenceState(EVERYTHING, PROMPT, VOCAB_SIZE, bad_words_token_ids=BAD_WORDS)

    states = states_of({1: without_grammar, 3: without_grammar})
    append(states, (1, [20, 20]), (3, [20, 20]))
    states.fork(1, 2)
    states.fork(8, 9)
    assert torch.equal(edited(states, 2), edited(states, 1))
    before = edited(states, 1)
    append(states, (2, [21, 12, 20]))
    assert torch.equal(edited(states, 1), before)
    append(states, (3, [21, 12, 20]))
    assert torch.equal(edited(states, 2), edited(states, 3))
    append(states, (1, [21]))
    assert not torch.equal(edited(states, 1), edited(states, 2))


def test_fork_goes_its_own_way_through_the_grammar() -> None:
    states = states_of({1: lambda: SequenceState(SamplingParams(), PROMPT, VOCAB_SIZE, grammar=CountingGrammar(9))})
    append(states, (1, [0, 1]))
    states.fork(1, 2)
    append(states, (2, [2]))
    assert (edited(states, 1, 2) > -torch.inf).nonzero().tolist() == [[0, 2], [1, 3]]


def test_removed_sequence_edits_nothing() -> None:
    states = states_of({1: everything, 2: everything})
    states.remove([1, 5])
    assert edits_of(states, 1) is None
    assert edits_of(states, 2) is not None


def test_sequence_whose_grammar_refuses_a_token_is_named_and_no_longer_masked() -> None:
    states = states_of({seq_id: everything for seq_id in (1, 2, 3)})
    assert append(states, (1, [10]), (2, [11, 12]), (3, [10, 12])) == [2, 3]
    assert [states.get(seq_id).grammar_failed for seq_id in (1, 2, 3)] == [False, True, True]  # type: ignore[union-attr]
    edits = edits_of(states, 1, 2, 3)
    assert edits is not None
    assert edits.grammar is not None
    assert edits.grammar.rows.tolist() == [0]


def test_sequence_whose_grammar_has_no_way_on_is_named_and_not_masked() -> None:
    def without_way_on() -> SequenceState:
        return SequenceState(SamplingParams(), PROMPT, VOCAB_SIZE, grammar=DeadEnd(9))

    states = states_of({1: everything, 2: without_way_on})
    edits = edits_of(states, 2, 1)
    assert edits is not None
    assert edits.grammar is not None
    assert edits.grammar.rows.tolist() == [1]
    assert append(states, (1, [10]), (2, [0])) == [2]


def test_sequence_whose_grammar_is_at_its_end_is_not_masked_and_does_not_fail() -> None:
    states = states_of({1: lambda: SequenceState(SamplingParams(), PROMPT, VOCAB_SIZE, grammar=CountingGrammar(1))})
    assert edits_of(states, 1) is not None
    assert append(states, (1, [0, 50])) == []
    assert edits_of(states, 1) is None


def with_drafts(states: SequenceStates, *drafts: tuple[int, list[int]]) -> torch.Tensor:
    """[num_rows, VOCAB_SIZE]: what (seq_id, its drafts) … make of the same logits; a row more than drafts for each."""
    lengths = [1 + len(token_ids) for _, token_ids in drafts]
    logits = torch.linspace(-5, 5, VOCAB_SIZE).repeat(sum(lengths), 1)
    edits = states.edits(
        np.cumsum([0, *lengths[:-1]]),
        np.array([seq_id for seq_id, _ in drafts]),
        [token_ids for _, token_ids in drafts],
    )
    if edits is not None:
        edits.apply(logits)
    return logits


def test_rows_of_drafts_are_edited_as_if_these_had_been_appended_and_leave_no_trace() -> None:
    states, ahead = (states_of({1: everything, 2: everything}) for _ in range(2))
    for each in (states, ahead):
        append(each, (1, [10, 11]), (2, [10]))
    before = edited(states, 1, 2)
    drafts = [12, 13, 14, 15]
    rows = with_drafts(states, (1, drafts), (2, []))
    assert torch.equal(rows[[0, 5]], before)
    for position, token_id in enumerate(drafts, 1):
        append(ahead, (1, [token_id]))
        assert torch.equal(rows[position], edited(ahead, 1)[0])
    assert torch.equal(edited(states, 1, 2), before)
    append(states, (1, drafts))
    assert torch.equal(edited(states, 1), edited(ahead, 1))


def test_random_drafts_leave_no_trace() -> None:
    rng = np.random.default_rng(3)
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)

    def make() -> SequenceState:
        return SequenceState(params, PROMPT, VOCAB_SIZE, bad_words_token_ids=BAD_WORDS)

    states, undisturbed = (states_of({1: make}) for _ in range(2))
    for _ in range(100):
        token_ids, drafts = (rng.choice([10, 20, 21, 5, 6, 77], rng.integers(0, 5)).tolist() for _ in range(2))
        for each in (states, undisturbed):
            append(each, (1, token_ids))
        with_drafts(states, (1, drafts))
        assert torch.equal(edited(states, 1), edited(undisturbed, 1))


def test_rows_after_a_draft_that_the_grammar_refuses_are_not_masked_and_nothing_fails() -> None:
    states = states_of({1: lambda: SequenceState(SamplingParams(), PROMPT, VOCAB_SIZE, grammar=CountingGrammar(9))})
    rows = with_drafts(states, (1, [0, 5, 6]))
    assert (rows[:2] > -torch.inf).nonzero().tolist() == [[0, 0], [1, 1]]
    assert torch.isfinite(rows[2:]).all()
    assert append(states, (1, [0, 1])) == []


def test_row_of_a_draft_after_which_the_grammar_has_no_way_on_allows_nothing_and_nothing_fails() -> None:
    class DeadEndAfterOne(CountingGrammar):
        def fill_bitmask(self, row: NDArray[np.int32]) -> None:
            if self._position:
                raise InvalidRequestError("no token may come next")
            super().fill_bitmask(row)

    states = states_of({1: lambda: SequenceState(SamplingParams(), PROMPT, VOCAB_SIZE, grammar=DeadEndAfterOne(9))})
    rows = with_drafts(states, (1, [0]))
    assert (rows > -torch.inf).nonzero().tolist() == [[0, 0]]
    state = states.get(1)
    assert state is not None
    assert not state.grammar_failed
    assert append(states, (1, [0])) == []
    assert edits_of(states, 1) is None
    assert state.failure_reason == "no token may come next"


@pytest.mark.parametrize("vocab_size", [64, 100, 129])
def test_grammar_mask_equals_xgrammars_own(vocab_size: int) -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((4, vocab_size)).astype(np.float32))
    rows, num_words = np.array([3, 1]), -(-vocab_size // 32)
    bitmask = rng.integers(-(2**31), 2**31, (2, num_words)).astype(np.int32)
    expected, whole = logits.clone(), torch.full((4, num_words), -1, dtype=torch.int32)
    whole[rows] = torch.from_numpy(bitmask)
    xgrammar.apply_token_bitmask_inplace(expected, whole)
    GrammarMask(rows, bitmask).apply(logits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("params", "bad_words", "message"),
    [
        (SamplingParams(allowed_token_ids=[1, 100]), [], "allowed_token_ids has token id 100: must be less than .*100"),
        (SamplingParams(logit_bias={101: 1.0}), [], "logit_bias has token id 101: must be less than .*100"),
        (SamplingParams(), [[1, 102]], "bad_words has token id 102: must be less than .*100"),
    ],
)
def test_token_ids_outside_of_the_vocabulary_are_refused(
    params: SamplingParams, bad_words: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceState(params, PROMPT, VOCAB_SIZE, bad_words_token_ids=bad_words)
