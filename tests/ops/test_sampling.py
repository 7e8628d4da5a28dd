"""The random choice of a token, against numpy's sums in float64 over rows in order, and against torch's operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.worker.random_draw import RandomRows, draw, draw_in_torch, least_kept_in_torch

SIZES = [1, 7, 128, 129, 10_001]
TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.001, "top_k": 60, "top_p": 0.8},
    {"min_p": 0.2, "top_k": 10_000, "top_p": 0.99},
]


def rows_of(kind: str, size: int) -> torch.Tensor:
    """Logits [6, size] float32, of increasing spread."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(6, size, generator=generator) * torch.tensor([0.01, 0.5, 1.0, 3.0, 10.0, 60.0])[:, None]
    if kind == "bfloat16":
        logits = logits.bfloat16().float()
    elif kind == "few values":
        logits = logits.round().clamp(min=-2.0)
    elif kind == "one beyond all":
        logits[:, size // 2] = 1e4
    elif kind == "many far below":
        logits[:, size // 8 :] -= 1e30 * torch.rand(6, size - size // 8, generator=generator) ** 9
    elif kind == "many not allowed":
        logits[:, size // 8 + 1 :] = -torch.inf
    return logits


KINDS = ["normal", "bfloat16", "few values", "one beyond all", "many far below", "many not allowed"]


def random_rows(
    rows: list[int], num_rows: int, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> RandomRows:
    return RandomRows(
        rows=torch.tensor(rows, dtype=torch.int64),
        temperature=torch.full((num_rows,), temperature),
        min_p=torch.full((num_rows,), min_p),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        any_min_p=min_p > 0,
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        max_top_k=top_k,
    )


def columns(random: RandomRows) -> tuple[torch.Tensor, ...]:
    return random.rows, random.temperature, random.min_p, random.top_k, random.top_p


def kept_by_definition(values: NDArray[np.float32], min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> Any:
    """Which of a row's float32 quotients are sampled: everything in order and in float64."""
    weights = np.exp(values.astype(np.float64) - values.max())
    is_kept = weights >= min_p * (1 - 1e-6)
    if 0 < top_k < len(values):
        is_kept &= values >= np.sort(values)[-top_k]
    if top_p < 1.0:
        order = np.argsort(-values, kind="stable")
        order = order[is_kept[order]]
        reached = np.cumsum(weights[order])
        last = int(np.searchsorted(reached, np.float32(top_p) * reached[-1]))
        is_kept &= values >= values[order[min(last, len(order) - 1)]]
    return is_kept & (values > -np.inf)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_are_the_tokens_that_the_definition_keeps(isa: str, kind: str, truncation: dict[str, Any]) -> None:
    for size in SIZES:
        logits = rows_of(kind, size)
        least = kernels.least_kept(logits, *columns(random_rows([*range(6)], 6, 0.7, **truncation)))
        values = (logits / 0.7).numpy()
        for row in range(6):
            is_kept = (values[row] >= least[row].item()) & (values[row] > -np.inf)
            np.testing.assert_array_equal(is_kept, kept_by_definition(values[row], **truncation), f"{size}, row {row}")


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "few values", "many not allowed"])
def test_token_is_where_the_running_sum_first_exceeds_the_uniform_share(
    isa: str, kind: str, truncation: dict[str, Any]
) -> None:
    for size in SIZES:
        logits = rows_of(kind, size)
        random = random_rows([5, 0, 3], 6, 1.3, **truncation)
        for uniform in [0.0, 0.6, float(np.nextafter(1.0, 0.0))]:
            tokens = draw(logits, random, torch.full((6,), uniform, dtype=torch.float64))
            for row, token in zip([5, 0, 3], tokens.tolist(), strict=True):
                values = (logits[row] / 1.3).numpy()
                weights = np.exp(values.astype(np.float64) - values.max()) * kept_by_definition(values, **truncation)
                reached = np.cumsum(weights) / weights.sum()
                assert weights[token] > 0
                # As near as float32 weights can tell.
                assert reached[token] > uniform - 1e-6
                assert reached[token] - weights[token] / weights.sum() < uniform + 1e-6


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_torch_operations_for_cuda_choose_the_same(truncation: dict[str, Any]) -> None:
    logits = rows_of("normal", 5_000)
    uniforms = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 0.99], dtype=torch.float64)
    random = random_rows([0, 1, 2, 3, 4], 6, 0.8, **truncation)
    assert torch.equal(draw(logits, random, uniforms), draw_in_torch(logits, random, uniforms))
    least = kernels.least_kept(logits, *columns(random))[:, None]
    # Torch's float32 softmax may sum to a little less than 1: then a neighbour in order is the last one.
    torch.testing.assert_close(least, least_kept_in_torch(logits, random), rtol=0.01, atol=0)


def test_row_without_any_token_and_one_of_nan_give_a_token_of_the_vocabulary(isa: str) -> None:
    for value in (-torch.inf, torch.nan, torch.inf):
        logits = torch.full((2, 300), value)
        for truncation in TRUNCATIONS:
            tokens = draw(logits, random_rows([0, 1], 2, **truncation), torch.tensor([0.0, 0.9], dtype=torch.float64))
            assert all(0 <= token < 300 for token in tokens.tolist())


def test_what_does_not_fit_is_refused_by_name() -> None:
    logits, uniforms = torch.zeros(2, 8), torch.zeros(2, dtype=torch.float64)
    good = random_rows([0, 1], 2)
    with pytest.raises(ValueError, match=r"rows.1. is 2: must be 0 to 1"):
        draw(logits, random_rows([0, 2], 2), uniforms)
    with pytest.raises(ValueError, match=r"temperature.0. is 0: must be above 0"):
        draw(logits, random_rows([0, 1], 2, temperature=0.0), uniforms)
    with pytest.raises(ValueError, match=r"uniforms is .*must be contiguous Double .2."):
        draw(logits, good, uniforms.float())
    with pytest.raises(ValueError, match=r"logits is .*must be contiguous float32"):
        draw(logits.double(), good, uniforms)
