"""The choice of a token, against numpy's sums in float64 over rows in order, and against torch's operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deepinfer_backend.worker.random_draw import (
    SamplingRows,
    least_kept,
    least_kept_in_torch,
    sample_tokens,
    sample_tokens_in_torch,
)

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


def sampling_rows(
    num_rows: int,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    uniforms: torch.Tensor | None = None,
) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((num_rows,), temperature),
        min_p=torch.full((num_rows,), min_p),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        uniforms=torch.zeros(num_rows, dtype=torch.float64) if uniforms is None else uniforms,
        all_greedy=temperature == 0.0,
        any_min_p=min_p > 0,
        any_top_p=top_p < 1,
        max_top_k=top_k,
    )


def sampled(logits: torch.Tensor, rows: SamplingRows, sample: Any = sample_tokens) -> torch.Tensor:
    token_ids = torch.full((len(logits),), -77)
    sample(logits, rows, token_ids)
    return token_ids


def likeliest(logits: torch.Tensor) -> list[int]:
    return sampled(logits, sampling_rows(len(logits), temperature=0.0)).tolist()


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
        least = least_kept(logits, sampling_rows(6, 0.7, **truncation))
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
        for uniform in [0.0, 0.6, float(np.nextafter(1.0, 0.0))]:
            uniforms = torch.full((6,), uniform, dtype=torch.float64)
            tokens = sampled(logits, sampling_rows(6, 1.3, **truncation, uniforms=uniforms))
            for row in (5, 0, 3):
                token = int(tokens[row])
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
    rows = sampling_rows(6, 0.8, **truncation, uniforms=uniforms)
    rows.temperature[4] = 0.0
    tokens = sampled(logits, rows)
    assert torch.equal(tokens, sampled(logits, rows, sample_tokens_in_torch))
    assert int(tokens[4]) == int(logits[4].argmax())
    # Torch's float32 softmax may sum to a little less than 1: then a neighbour in order is the last one.
    is_random = rows.temperature > 0
    least, in_torch = least_kept(logits, rows)[is_random], least_kept_in_torch(logits, rows)[is_random]
    torch.testing.assert_close(least, in_torch, rtol=0.01, atol=0)


def test_row_without_any_token_and_one_of_nan_give_a_token_of_the_vocabulary(isa: str) -> None:
    for value in (-torch.inf, torch.nan, torch.inf):
        logits = torch.full((2, 300), value)
        for truncation in TRUNCATIONS:
            uniforms = torch.tensor([0.0, 0.9], dtype=torch.float64)
            tokens = sampled(logits, sampling_rows(2, **truncation, uniforms=uniforms))
            assert all(0 <= token < 300 for token in tokens.tolist())


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 1), (1, 64), (3, 577), (70, 64), (2, 4_097), (1, 200_003), (2, 100_003), (0, 5)]
)
@pytest.mark.usefixtures("num_threads")
def test_greedy_token_is_the_lowest_index_of_the_largest(isa: str, num_rows: int, size: int) -> None:
    # Few different values, so that the largest stands in many places.
    logits = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(8)).round(decimals=1).clamp(max=2.0)
    assert likeliest(logits) == np.argmax(logits.numpy(), axis=1).tolist()


@pytest.mark.usefixtures("num_threads")
def test_greedy_token_is_found_wherever_it_is(isa: str) -> None:
    logits = torch.randn(1, 200_001, generator=torch.Generator().manual_seed(9))
    for place in [0, 1, 15, 16, 2_047, 2_048, 66_666, 66_667, 100_000, 100_001, 199_999, 200_000]:
        row = logits.clone()
        row[0, place] = 100.0
        assert likeliest(row) == [place]


@pytest.mark.parametrize("size", [3, 40, 40_000])
def test_greedy_passes_over_nan_and_takes_infinities(isa: str, size: int) -> None:
    logits = torch.full((4, size), torch.nan)
    logits[0, size - 1] = -5.0
    logits[1, size - 2] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = torch.randn(size - 1, generator=torch.Generator().manual_seed(10))
    assert likeliest(logits) == [size - 1, size - 2, 0, int(logits[3, 1:].argmax()) + 1]


def test_what_does_not_fit_is_refused_by_name() -> None:
    logits, rows = torch.zeros(2, 8), sampling_rows(2)
    with pytest.raises(ValueError, match=r"temperature is .*must be contiguous Float .2."):
        sampled(logits, sampling_rows(3))
    with pytest.raises(ValueError, match=r"uniforms is .*must be contiguous Double .2."):
        sampled(logits, sampling_rows(2, uniforms=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"token_ids is .*must be contiguous Long .2."):
        sample_tokens(logits, rows, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"logits is .*must be contiguous float32"):
        sampled(logits.double(), rows)
    with pytest.raises(ValueError, match=r"logits is .2, 0.: rows must not be empty"):
        sampled(torch.zeros(2, 0), rows)
