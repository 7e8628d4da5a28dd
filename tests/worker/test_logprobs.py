"""Log-probabilities and ranks are the model's own; the likeliest tokens come in one order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_backend.worker.logprobs import logprobs_of
from deepinfer_backend.worker.top_tokens import top_token, top_tokens

LOGITS = torch.from_numpy(np.random.default_rng(1).standard_normal((6, 5_003)).astype(np.float32)) * 4
TIED_LOGITS = LOGITS.round()
"""Of about 30 different values."""


def test_logprobs_are_those_of_log_softmax() -> None:
    token_ids = torch.tensor([0, 5_002, 17, 17, 64, 4_000], dtype=torch.int32)
    result = logprobs_of(LOGITS, token_ids, 5)
    expected = LOGITS.log_softmax(-1)
    torch.testing.assert_close(result.logprobs, expected.gather(1, token_ids.long()[:, None]).squeeze(1))
    assert result.top_token_ids.tolist() == expected.topk(5).indices.tolist()
    torch.testing.assert_close(result.top_logprobs, expected.topk(5).values)
    assert result.rows.tolist() == list(range(6))


@pytest.mark.parametrize("logits", [LOGITS, TIED_LOGITS], ids=["distinct", "tied"])
def test_rank_is_the_first_place_among_equals_when_sorted(logits: torch.Tensor) -> None:
    token_ids = torch.tensor([3, 5_002, 17, 900, 64, 4_000])
    ranks = logprobs_of(logits, token_ids, 0).ranks
    for row, token_id, rank in zip(logits.tolist(), token_ids.tolist(), ranks.tolist(), strict=True):
        assert sorted(row, reverse=True).index(row[token_id]) + 1 == rank


def test_bfloat16_logits_give_float32_logprobs() -> None:
    logits, token_ids = LOGITS.bfloat16(), torch.zeros(6, dtype=torch.int32)
    result = logprobs_of(logits, token_ids, 2)
    torch.testing.assert_close(result.logprobs, logits.float().log_softmax(-1)[:, 0])
    torch.testing.assert_close(result.top_logprobs, logits.float().log_softmax(-1).topk(2).values)


def test_no_more_likeliest_tokens_than_the_vocabulary_has() -> None:
    assert logprobs_of(LOGITS[:, :3], torch.zeros(6, dtype=torch.int32), 5).top_token_ids.shape == (6, 3)


@pytest.mark.parametrize(
    "logits", [LOGITS, TIED_LOGITS, torch.zeros(2, 640) - torch.inf], ids=["distinct", "tied", "-inf"]
)
@pytest.mark.parametrize("k", [0, 1, 3, 39, 40, 300])
def test_top_tokens_are_in_order_of_value_then_of_id(logits: torch.Tensor, k: int) -> None:
    top = top_tokens(logits, k)
    for row, values, ids in zip(logits.tolist(), top.values.tolist(), top.token_ids.tolist(), strict=True):
        expected = sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:k]
        assert ids == expected
        assert values == [row[token_id] for token_id in expected]


def test_of_the_two_zeros_the_lower_id_comes_first() -> None:
    logits = torch.full((1, 400), -1.0)
    logits[0, 100], logits[0, 300] = -0.0, 0.0
    assert top_tokens(logits, 2).token_ids.tolist() == [[100, 300]]


@pytest.mark.parametrize("logits", [LOGITS, TIED_LOGITS, TIED_LOGITS[:, :64]], ids=["distinct", "tied", "one block"])
def test_top_token_is_the_first_of_the_largest(logits: torch.Tensor) -> None:
    assert top_token(logits).tolist() == np.argmax(logits.numpy(), axis=1).tolist()
