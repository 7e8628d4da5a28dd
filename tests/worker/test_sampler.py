"""The sampler draws from exactly the distribution that the parameters describe, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deepinfer_backend.worker.sampler import SamplingBatch, sample

VOCAB_SIZE = 200


def batch_of(
    rows: list[tuple[float, int, float]],
    uniforms: NDArray[np.float64] | list[float],
    banned: Sequence[tuple[int, int]] = (),
) -> SamplingBatch:
    """rows: (temperature, top_k, top_p)."""
    temperature, top_k, top_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    random_rows = temperature.nonzero().squeeze(1)
    banned_rows, banned_ids = zip(*banned, strict=True) if banned else ((), ())
    return SamplingBatch(
        random_rows=random_rows if len(random_rows) else None,
        temperature=temperature.float(),
        top_k=top_k.int(),
        top_p=top_p.float(),
        uniforms=torch.as_tensor(uniforms, dtype=torch.float64),
        banned_rows=torch.tensor(banned_rows, dtype=torch.int64),
        banned_token_ids=torch.tensor(banned_ids, dtype=torch.int64),
        any_top_k=bool((top_k > 0).any()),
        any_top_p=bool((top_p < 1).any()),
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.7, 0, 1.0),
        (1.0, 7, 1.0),
        (1.3, 0, 0.6),
        (0.9, 20, 0.8),
        (1.0, 1, 1.0),
        (2.0, 0, 0.01),
    ],
)
def test_share_of_uniforms_that_give_a_token_is_its_probability_in_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    num_draws = 20_000
    uniforms = (np.arange(num_draws) + 0.5) / num_draws
    drawn = sample(logits.expand(num_draws, -1).clone(), batch_of([(temperature, top_k, top_p)] * num_draws, uniforms))
    share = torch.bincount(drawn, minlength=VOCAB_SIZE) / num_draws
    torch.testing.assert_close(share, expected.softmax(-1)[0], atol=1.5 / num_draws, rtol=0)


def test_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, VOCAB_SIZE, generator=generator)
    rows = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.8, 5, 1.0), (1.0, 0, 0.5), (0.0, 0, 1.0), (1.5, 9, 0.9)]
    uniforms = np.array([0.1, 0.2, 0.7, 0.9, 0.3, 0.999999])
    together = sample(logits.clone(), batch_of(rows, uniforms))
    alone = [
        int(sample(logits[row : row + 1].clone(), batch_of(rows[row : row + 1], uniforms[row : row + 1])))
        for row in range(len(rows))
    ]
    assert together.tolist() == alone


def test_banned_tokens_are_never_sampled() -> None:
    logits = torch.zeros(2, 3)
    logits[:, 1] = 50.0
    tokens = sample(logits, batch_of([(0.0, 0, 1.0), (1.0, 0, 1.0)], [0.5, 0.5], banned=[(0, 1), (1, 1)]))
    assert 1 not in tokens.tolist()


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_ends_of_the_unit_interval_give_tokens_with_a_probability(uniform: float) -> None:
    logits = torch.full((1, VOCAB_SIZE), -1e4)
    logits[0, 50], logits[0, 60] = 1.0, 1.0
    assert int(sample(logits, batch_of([(1.0, 0, 1.0)], [uniform]))) in (50, 60)
