"""Prompt lookup, against the same in plain Python and against transformers' candidates."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from deepinfer_backend.ops.kernels import ISAS, kernels
from deepinfer_backend.ops.ngram_drafts import (
    append_history,
    append_history_in_torch,
    begin_history,
    propose_ngram,
    propose_ngram_in_torch,
)
from deepinfer_backend.ops.verify_drafts import NO_TOKEN

Propose = Callable[..., None]


@pytest.fixture(params=[*ISAS, "torch"])
def propose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Propose:
    if request.param == "torch":
        return propose_ngram_in_torch
    chosen = kernels.isa()
    if not kernels.set_isa(request.param):
        pytest.skip(f"this machine does not run {request.param}")
    request.addfinalizer(lambda: kernels.set_isa(chosen))
    return propose_ngram


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def histories(rows: list[list[int]], max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    # What was there before must not matter: tokens that match.
    history, lens = torch.zeros(len(rows), max_len, dtype=torch.int32), torch.zeros(len(rows), dtype=torch.int32)
    for slot, row in enumerate(rows):
        begin_history(history, lens, slot, int32(row))
    return history, lens


def drafts_by_definition(tokens: list[int], num_drafts: int, min_ngram: int, max_ngram: int) -> list[int]:
    for ngram in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, ngram - 1, -1):
            if tokens[end - ngram : end] == tokens[len(tokens) - ngram :]:
                ahead = list(tokens)
                for i in range(num_drafts):
                    ahead.append(ahead[end + i])
                return ahead[len(tokens) :]
    return [NO_TOKEN] * num_drafts


def proposed(
    propose: Propose, rows: list[list[int]], num_drafts: int, min_ngram: int, max_ngram: int
) -> list[list[int]]:
    """The drafts of every slot; asks for all of them in an order of its own."""
    history, lens = histories(rows, max(map(len, rows)) + 3)
    next_tokens = torch.full((len(rows), 1 + num_drafts), 77, dtype=torch.int32)
    slots = random.Random(len(rows)).sample(range(len(rows)), len(rows))
    propose(history, lens, int32(slots), next_tokens, min_ngram, max_ngram)
    assert (next_tokens[:, 0] == 77).all()
    drafts: list[list[int]] = next_tokens[:, 1:].tolist()
    return drafts


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 1), (1, 3), (2, 5), (3, 3), (4, 20)])
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 30])
def test_what_followed_the_longest_and_latest_occurrence_is_drafted(
    propose: Propose, vocab_size: int, min_ngram: int, max_ngram: int
) -> None:
    rng = random.Random(vocab_size)
    for num_drafts in (0, 1, 5, 9):
        lens = [0, 1, 2, 3, *(rng.randrange(4, 700) for _ in range(20))]
        rows = [[rng.randrange(vocab_size) for _ in range(length)] for length in lens]
        expected = [drafts_by_definition(row, num_drafts, min_ngram, max_ngram) for row in rows]
        assert proposed(propose, rows, num_drafts, min_ngram, max_ngram) == expected


def test_an_occurrence_is_found_wherever_it_is(propose: Propose) -> None:
    # Two tokens in a row of others, before and behind every border of a vector and a block.
    for length in (3, 130, 259):
        rows = []
        for place in range(length - 1):
            row = list(range(10, 10 + length))
            row[place : place + 2] = [1, 2]
            rows.append([*row, 1, 2])
        expected = [drafts_by_definition(row, 3, 2, 4) for row in rows]
        assert all(NO_TOKEN not in drafts for drafts in expected)
        assert proposed(propose, rows, 3, 2, 4) == expected


def test_many_long_histories_give_the_same_on_several_threads(propose: Propose) -> None:
    rng = random.Random(1)
    rows = [[rng.randrange(1000) for _ in range(3000)] for _ in range(60)]
    expected = [drafts_by_definition(row, 4, 1, 3) for row in rows]
    assert any(NO_TOKEN not in drafts for drafts in expected)
    assert proposed(propose, rows, 4, 1, 3) == expected


def test_a_period_is_continued(propose: Propose) -> None:
    assert proposed(propose, [[9, 1, 2, 3, 1, 2, 3]], 7, 1, 3) == [[1, 2, 3, 1, 2, 3, 1]]
    assert proposed(propose, [[5, 5]], 4, 1, 3) == [[5, 5, 5, 5]]


def test_drafts_are_those_of_transformers_where_only_one_occurrence_is_as_long(propose: Propose) -> None:
    rng = random.Random(2)
    for _ in range(50):
        tokens = rng.sample(range(1000), 200)
        begin, length = rng.randrange(0, 150), rng.randrange(1, 6)
        tokens += tokens[begin : begin + length]
        lookup = PromptLookupCandidateGenerator(
            num_output_tokens=8, max_matching_ngram_size=4, max_length=10_000, vocab_size=1000
        )
        candidates, _ = lookup.get_candidates(torch.tensor([tokens]))
        assert proposed(propose, [tokens], 8, 1, 4) == [candidates[0, len(tokens) :].tolist()]


@pytest.mark.parametrize("append", [append_history, append_history_in_torch])
def test_histories_grow_by_accepted_tokens_as_far_as_there_is_room(append: Callable[..., None]) -> None:
    rng = random.Random(3)
    max_len, width, num_slots = 20, 4, 6
    rows = [[rng.randrange(100) for _ in range(rng.randrange(1, max_len))] for _ in range(num_slots)]
    history, lens = histories(rows, max_len)
    for _ in range(20):
        slots = rng.sample(range(num_slots), rng.randrange(1, num_slots))
        token_ids = torch.full((len(slots), width), NO_TOKEN, dtype=torch.int32)
        num_tokens = []
        for i, slot in enumerate(slots):
            tokens = [rng.randrange(100) for _ in range(rng.randrange(1, width + 1))]
            tokens[-1] = rng.choice([tokens[-1], NO_TOKEN])
            token_ids[i, : len(tokens)] = int32(tokens)
            num_tokens.append(len(tokens))
            rows[slot] = (rows[slot] + [token for token in tokens if token != NO_TOKEN])[:max_len]
        append(token_ids, int32(num_tokens), int32(slots), history, lens)
        assert [history[slot, : lens[slot]].tolist() for slot in range(num_slots)] == rows


def test_what_does_not_fit_is_refused_by_name() -> None:
    history, lens = histories([[1, 2], [3]], 4)
    next_tokens = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"min_ngram is 0: must be 1 to max_ngram, which is 3"):
        propose_ngram(history, lens, int32([0]), next_tokens, 0, 3)
    with pytest.raises(ValueError, match=r"min_ngram is 4: must be 1 to max_ngram, which is 3"):
        propose_ngram(history, lens, int32([0]), next_tokens, 4, 3)
    with pytest.raises(ValueError, match=r"slots.1. is 2: must be 0 to 1"):
        propose_ngram(history, lens, int32([0, 2]), next_tokens, 1, 3)
    with pytest.raises(ValueError, match=r"next_tokens has 1 slots: must be 2 as history has"):
        propose_ngram(history, lens, int32([0]), next_tokens[:1], 1, 3)
    with pytest.raises(ValueError, match=r"history_lens.1. is 5: must be 0 to 4"):
        propose_ngram(history, int32([2, 5]), int32([0]), next_tokens, 1, 3)
    with pytest.raises(ValueError, match=r"num_tokens.0. is 3: must be 0 to 2"):
        append_history(int32([1, 2]).view(1, 2), int32([3]), int32([0]), history, lens)
