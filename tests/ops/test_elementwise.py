"""The operators between the matrix products, against torch in float64 and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from deepinfer_backend.ops.kernels import kernels

SHAPES = [(1, 1), (1, 576), (3, 17), (2, 64), (65, 577), (1, 50_001)]
"""[num_rows, size]: sizes below, at and beside whole vectors; rows for one thread and for several."""


def random_rows(num_rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed))


def ulps_between(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of float32 values from float64 ones, in units in the last place of what is expected."""
    exact = expected.double().numpy()
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(actual.double().numpy() - exact) / unit))


@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
def test_rms_norm_equals_transformers(isa: str, num_rows: int, size: int) -> None:
    x, norm = random_rows(num_rows, size) * 3, LlamaRMSNorm(size, eps=1e-5)
    norm.weight.data = random_rows(1, size, seed=1)[0]
    expected = norm.double()(x.double()).float()
    torch.testing.assert_close(kernels.rms_norm(x, norm.weight.data.float(), 1e-5), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
def test_residual_keeps_the_sum_and_the_sum_is_normalized(isa: str, num_rows: int, size: int) -> None:
    x, residual, weight = (random_rows(num_rows, size, seed) for seed in (2, 3, 4))
    total = x + residual
    normalized = kernels.rms_norm(x, weight[0], 1e-6, residual)
    assert torch.equal(residual, total)
    expected = F.rms_norm(total.double(), (size,), weight[0].double(), 1e-6).float()
    torch.testing.assert_close(normalized, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
def test_silu_mul_equals_torch_in_float64(isa: str, num_rows: int, size: int) -> None:
    gate_up = random_rows(num_rows, 2 * size, seed=5) * 8
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(kernels.silu_mul(gate_up), (F.silu(gate) * up).float(), rtol=6e-7, atol=0)


def test_silu_is_exact_to_two_units_over_its_whole_range(isa: str) -> None:
    # silu(-x) = -x / (1 + e^x): where e^x is large, the error is the exponential's and the division's.
    gate = torch.cat([torch.linspace(-120.0, 120.0, 400_001), torch.logspace(-44, 38, 10_001)])
    expected = F.silu(gate.double())
    actual = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    # Beyond, e^x is infinite in float32, for torch as well.
    is_finite = gate > -88.7
    assert ulps_between(actual[is_finite], expected[is_finite]) <= 2.5
    torch.testing.assert_close(actual[~is_finite], expected[~is_finite].float(), rtol=0, atol=3e-37)


def test_silu_of_infinities_and_nan_is_torchs(isa: str) -> None:
    gate = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, -3.4e38])
    actual = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    assert torch.equal(actual.nan_to_num(nan=7.0), F.silu(gate).nan_to_num(nan=7.0))


def test_rotary_angles_are_exact_up_to_a_million_positions(isa: str) -> None:
    positions = torch.tensor([0, 1, 2, 1_000, 131_071, 524_287, 999_999, 1_000_000])
    inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, 62, 2) / 62)
    cos, sin = kernels.rotary_angles(positions, inv_freq, 1.0)
    # The angle is a float32 product, as in the models that were trained with it.
    angles = (positions[:, None].float() * inv_freq).double()
    assert ulps_between(cos, angles.cos()) <= 1.0
    assert ulps_between(sin, angles.sin()) <= 1.0
    scaled = kernels.rotary_angles(positions, inv_freq, 0.5)
    assert torch.equal(scaled[0], cos / 2)
    assert torch.equal(scaled[1], sin / 2)


ROWS = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (kernels.rms_norm, (ROWS.double(), ROWS[0], 1e-5), "x is .*must be contiguous float32 rows"),
        (kernels.rms_norm, (ROWS.t(), torch.zeros(2), 1e-5), "x is .*must be contiguous float32 rows"),
        (kernels.rms_norm, (ROWS, torch.zeros(7), 1e-5), "weight is .*must be contiguous Float .8."),
        (kernels.rms_norm, (ROWS, ROWS[0], 1e-5, torch.zeros(1, 8)), "residual is .1, 8.: must be .2, 8."),
        (kernels.silu_mul, (torch.zeros(2, 7),), "gate_up has rows of 7: must be even"),
        (kernels.rotary_angles, (torch.tensor([1.0]), ROWS[0]), "positions is .*must be contiguous Long"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(op: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op(*arguments)
