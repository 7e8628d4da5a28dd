"""Which drafts are accepted, against the same in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from deepinfer_backend.ops.verify_drafts import NO_TOKEN, verify_drafts, verify_drafts_in_torch

NUM_SLOTS = 9
implementations = pytest.mark.parametrize("verify", [verify_drafts, verify_drafts_in_torch])
Verify = Callable[..., None]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tokens_by_definition(targets: list[int], drafts: list[int]) -> list[int]:
    tokens = targets
    for i, (target, draft) in enumerate(zip(targets, drafts, strict=False)):
        if target == NO_TOKEN or target != draft:
            tokens = targets[: i + 1]
            break
    return tokens[:-1] if len(tokens) > 1 and tokens[-1] == NO_TOKEN else tokens


@implementations
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 7])
def test_leading_drafts_that_equal_their_targets_are_accepted(verify: Verify, num_speculative_tokens: int) -> None:
    rng = random.Random(num_speculative_tokens)
    width = 1 + num_speculative_tokens
    for _ in range(200):
        slots = rng.sample(range(NUM_SLOTS), rng.randrange(1, NUM_SLOTS + 1))
        # Two different tokens, and now and then none: drafts are accepted half the time.
        tokens = [*range(2)] * 5 + [NO_TOKEN]
        targets = [[rng.choice(tokens) for _ in range(rng.randrange(1, width + 1))] for _ in slots]
        next_tokens = [[rng.choice(tokens) for _ in range(width)] for _ in range(NUM_SLOTS)]
        accepted = [-5] * NUM_SLOTS
        starts = [0]
        for row in targets:
            starts.append(starts[-1] + len(row))
        next_tokens_tensor, num_accepted = torch.tensor(next_tokens, dtype=torch.int32), int32(accepted)
        token_ids = torch.empty(len(slots), width, dtype=torch.int32)
        num_tokens = torch.empty(len(slots), dtype=torch.int32)
        verify(
            int64([token for row in targets for token in row]),
            int32(starts),
            int32(slots),
            next_tokens_tensor,
            num_accepted,
            token_ids,
            num_tokens,
        )
        expected = [tokens_by_definition(row, next_tokens[slot][1:]) for row, slot in zip(targets, slots, strict=True)]
        for slot, row in zip(slots, expected, strict=True):
            next_tokens[slot][0], accepted[slot] = row[-1], len(row) - 1
        assert num_tokens.tolist() == [len(row) for row in expected]
        assert token_ids.tolist() == [row + [NO_TOKEN] * (width - len(row)) for row in expected]
        assert next_tokens_tensor.tolist() == next_tokens
        assert num_accepted.tolist() == accepted


@implementations
def test_a_row_without_a_token_ends_there_even_where_nothing_was_drafted(verify: Verify) -> None:
    next_tokens = int32([4, NO_TOKEN, 6]).view(1, 3)
    num_accepted, token_ids, num_tokens = int32([0]), torch.empty(1, 3, dtype=torch.int32), int32([0])
    verify(int64([NO_TOKEN, 6, 7]), int32([0, 3]), int32([0]), next_tokens, num_accepted, token_ids, num_tokens)
    assert token_ids.tolist() == [[NO_TOKEN] * 3]
    assert (num_tokens.item(), num_accepted.item(), next_tokens[0, 0].item()) == (1, 0, NO_TOKEN)


def test_what_does_not_fit_is_refused_by_name() -> None:
    next_tokens, num_accepted = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def verify(targets: list[int], starts: list[int], slots: list[int], width: int = 2) -> None:
        outputs = torch.empty(len(slots), width, dtype=torch.int32), torch.empty(len(slots), dtype=torch.int32)
        verify_drafts(int64(targets), int32(starts), int32(slots), next_tokens, num_accepted, *outputs)

    with pytest.raises(ValueError, match=r"sample_start_loc gives sequence 0 3 rows: must be 1 to 2"):
        verify([1, 2, 3], [0, 3], [0])
    with pytest.raises(ValueError, match=r"sample_start_loc gives sequence 1 0 rows: must be 1 to 2"):
        verify([1, 2], [0, 2, 2], [0, 1])
    with pytest.raises(ValueError, match=r"slots.0. is -1: must be 0 to 1"):
        verify([1], [0, 1], [-1])
    with pytest.raises(ValueError, match=r"token_ids is .*must be contiguous Int .1, 2."):
        verify([1], [0, 1], [0], width=3)
