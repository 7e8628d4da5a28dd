"""Tokens that only the device knows come to their places among a step's inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_backend.ops.inflight_tokens import take_inflight_tokens, take_inflight_tokens_in_torch


@pytest.mark.parametrize("take", [take_inflight_tokens, take_inflight_tokens_in_torch])
def test_known_tokens_stay_and_the_others_come_from_their_rows(take: Any) -> None:
    token_ids = torch.tensor([7, 0, 0, 8, 0, 0])
    take(token_ids, torch.tensor([-1, 2, 0, -1, 1, 2], dtype=torch.int32), torch.tensor([50, -1, 70_000]))
    assert token_ids.tolist() == [7, 70_000, 50, 8, 0, 70_000]


def test_what_does_not_fit_is_refused_by_name() -> None:
    tokens, rows, sampled = (
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([-1, 1], dtype=torch.int32),
        torch.tensor([5]),
    )
    with pytest.raises(ValueError, match=r"inflight_rows.1. is 1: must be less than 1"):
        take_inflight_tokens(tokens, rows, sampled)
    with pytest.raises(ValueError, match=r"inflight_rows is .*must be contiguous Int .2."):
        take_inflight_tokens(tokens, rows[:1], sampled)
    with pytest.raises(ValueError, match=r"sampled is .*must be contiguous Long .1."):
        take_inflight_tokens(tokens, rows, sampled.int())
