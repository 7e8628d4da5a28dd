"""Products with 4-, 6- and 8-bit weights, against float64 products of the same weights and the same rounded inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_backend.models.weights import GroupedMatrix
from deepinfer_backend.ops.kernels import PackedLinear, kernels

INPUT_GROUP = 32
FLOAT32_UNIT = 2.0**-24


def random_matrix(bits: int, group_size: int, num_outputs: int, num_inputs: int, offsets: bool) -> GroupedMatrix:
    """Scales and offsets are float16 numbers, so that packing does not round them."""
    random = torch.Generator().manual_seed(bits + group_size + num_outputs + num_inputs)
    num_groups = num_inputs // group_size
    return GroupedMatrix(
        bits=bits,
        group_size=group_size,
        codes=torch.randint(0, 2**bits, (num_outputs, num_inputs), generator=random, dtype=torch.uint8),
        scales=(torch.randn(num_outputs, num_groups, generator=random) * 0.02).half().float(),
        offsets=torch.randn(num_outputs, num_groups, generator=random).half().float() if offsets else None,
    )


def packed(*matrices: GroupedMatrix, biases: list[torch.Tensor | None] | None = None) -> Any:
    return PackedLinear.from_groups(
        matrices[0].bits,
        [matrix.codes for matrix in matrices],
        [matrix.scales for matrix in matrices],
        [matrix.offsets for matrix in matrices],
        biases or [None] * len(matrices),
    )


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x as the kernels read it: in each group of 32 inputs, multiples of its largest magnitude / 127, in float64."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % INPUT_GROUP)).reshape(len(x), -1, INPUT_GROUP)
    largest = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(largest == 0, 0, 127 / largest)
    multiples: torch.Tensor = torch.round(groups * inverse).double() * (largest / 127).double()
    return multiples.flatten(1)[:, : x.shape[1]]


def assert_product(
    y: torch.Tensor, x: torch.Tensor, matrix: GroupedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y is x Wᵀ + bias but for float32's rounding, of which a block of 16 or 32 inputs meets less than 8."""
    weight, inputs = matrix.dequantized().double(), rounded(x)
    added = torch.zeros(weight.shape[0]).double() if bias is None else bias.double()
    exact = inputs @ weight.T + added
    # In the worst case the parts of a weight, scale * code and offset, cancel.
    scales, offsets = matrix.scales.abs(), 0 if matrix.offsets is None else matrix.offsets.abs()
    parts = (scales * 2**matrix.bits + offsets).double().repeat_interleave(matrix.group_size, 1)
    num_blocks = x.shape[1] // min(matrix.group_size, INPUT_GROUP)
    bound = (inputs.abs() @ parts.T + added.abs()) * FLOAT32_UNIT * (2 * num_blocks + 6)
    assert ((y.double() - exact).abs() <= bound).all()
    return exact


@pytest.mark.parametrize("offsets", [False, True], ids=["implied", "offsets"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_products_are_exact_for_rounded_inputs(isa: str, bits: int, group_size: int, offsets: bool) -> None:
    matrix = random_matrix(bits, group_size, 37, 3 * group_size, offsets)
    linear = packed(matrix)
    for num_rows in (1, 2, 3, 4, 5, 9, 70):
        x = torch.randn(num_rows, matrix.codes.shape[1], generator=torch.Generator().manual_seed(num_rows))
        assert_product(linear.forward(x), x, matrix)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_row_does_not_depend_on_the_rows_beside_it(isa: str, bits: int) -> None:
    linear = packed(random_matrix(bits, 32, 50, 256, offsets=True))
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([linear.forward(row[None]) for row in x])
    for num_rows in range(1, 71):
        assert torch.equal(linear.forward(x[:num_rows]), alone[:num_rows])


@pytest.mark.parametrize("num_outputs", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_any_number_of_outputs_and_a_single_group(isa: str, bits: int, group_size: int, num_outputs: int) -> None:
    matrix = random_matrix(bits, group_size, num_outputs, group_size, offsets=True)
    x = torch.randn(3, group_size, generator=torch.Generator().manual_seed(1))
    assert_product(packed(matrix).forward(x), x, matrix)


def test_more_rows_and_inputs_than_the_cache_holds(isa: str) -> None:
    matrix = random_matrix(4, 32, 48, 4096, offsets=True)
    x = torch.randn(150, 4096, generator=torch.Generator().manual_seed(2))
    assert_product(packed(matrix).forward(x), x, matrix)


def test_matrices_of_one_list_stand_side_by_side_with_their_biases(isa: str) -> None:
    # The first has offsets, the second implies them; the second has no bias.
    matrices = [random_matrix(4, 32, 20, 64, offsets=True), random_matrix(4, 32, 13, 64, offsets=False)]
    bias = torch.randn(20, generator=torch.Generator().manual_seed(3))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    linear = packed(*matrices, biases=[bias, None])
    assert (linear.num_outputs, linear.num_inputs) == (33, 64)
    y = linear.forward(x)
    assert_product(y[:, :20], x, matrices[0], bias)
    assert_product(y[:, 20:], x, matrices[1])


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("code", ["least", "most"])
def test_the_largest_sums_do_not_overflow(isa: str, bits: int, code: str) -> None:
    matrix = random_matrix(bits, 32, 16, 64, offsets=False)
    matrix.codes.fill_(0 if code == "least" else 2**bits - 1)
    x = torch.cat([torch.ones(1, 64), -torch.ones(1, 64), torch.tensor([1.0, -1.0]).repeat(32)[None]])
    assert_product(packed(matrix).forward(x), x, matrix)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_extreme_inputs_stay_in_their_row(isa: str, bits: int) -> None:
    matrix = random_matrix(bits, 32, 18, 96, offsets=True)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(5))
    x[1] = 0
    x[2, 40] = 1e30
    x[3, 50] = torch.nan
    x[4, 70] = torch.inf
    x[5] *= 1e-20
    y = packed(matrix).forward(x)
    finite = [0, 1, 2, 5, 6]
    assert_product(y[finite], x[finite], matrix)
    assert (y[1] == 0).all()
    assert y[3].isnan().all()
    assert not y[4].isfinite().any()


def test_numbers_near_float32s_smallest_count_as_zero(isa: str) -> None:
    y = packed(random_matrix(8, 32, 16, 32, offsets=True)).forward(torch.full((1, 32), 1e-40))
    assert (y == 0).all()


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (6, 16), (8, 32)])
def test_rounding_the_inputs_costs_half_a_step_each(isa: str, bits: int, group_size: int) -> None:
    matrix = random_matrix(bits, group_size, 64, 512, offsets=False)
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(6))
    weight = matrix.dequantized().double()
    step = x.double().reshape(8, -1, INPUT_GROUP).abs().amax(2, keepdim=True) / 127
    bound = (step / 2).expand(-1, -1, INPUT_GROUP).flatten(1) @ weight.abs().T
    error = (packed(matrix).forward(x).double() - x.double() @ weight.T).abs()
    assert (error <= bound * 1.001).all()


def test_instruction_sets_give_the_same(isa: str) -> None:
    # What float32 sums differ by, where one set has fused multiplication and another does not.
    for bits in (4, 6, 8):
        linear = packed(random_matrix(bits, 32, 32, 256, offsets=True))
        x = torch.randn(6, 256, generator=torch.Generator().manual_seed(8))
        y = linear.forward(x)
        assert kernels.set_isa("portable")
        torch.testing.assert_close(y, linear.forward(x), rtol=1e-5, atol=1e-4)
        assert kernels.set_isa(isa)


def test_scales_that_float16_rounds_are_rounded_to_nearest(isa: str) -> None:
    magnitudes = torch.tensor([1.0, 1e-3, 6.2e-5, 6.09e-5, 4e-8, 2e-8, 0, 65504, 1 + 2**-11, 1 + 3 * 2**-11, -0.3])
    codes = torch.full((11, 32), 129, dtype=torch.uint8)
    linear = PackedLinear.from_groups(8, [codes], [magnitudes[:, None]], [None], [None])
    x = torch.zeros(1, 32)
    x[0, 0] = 127
    assert torch.equal(linear.forward(x)[0], magnitudes.half().float() * 127)


@pytest.mark.parametrize("offsets", [False, True], ids=["implied", "offsets"])
@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_unpacked_rows_are_those_of_the_dequantized_matrix(isa: str, bits: int, group_size: int, offsets: bool) -> None:
    matrix = random_matrix(bits, group_size, 37, 3 * group_size, offsets)
    linear = packed(matrix)
    for num_rows in (0, 1, 300):
        outputs = torch.randint(0, 37, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
        assert torch.equal(linear.unpack_rows(outputs), torch.nn.functional.embedding(outputs, matrix.dequantized()))


def test_memory_is_bits_and_scales(isa: str) -> None:
    for bits in (4, 6, 8):
        num_scales = 64 * 512 // 32
        linear = packed(random_matrix(bits, 32, 64, 512, offsets=False))
        assert linear.num_bytes == 64 * 512 * bits // 8 + 2 * num_scales


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits is 5: must be 4, 6 or 8"),
        ({"codes": torch.full((4, 64), 16, dtype=torch.uint8)}, "codes.0. has a code of 16: must be below 16"),
        ({"codes": torch.zeros(4, 64)}, "codes.0. is Float"),
        ({"scales": torch.ones(4, 3)}, "a group must be 16 or a multiple of 32 inputs"),
        ({"scales": torch.ones(4, 8)}, "a group must be 16 or a multiple of 32 inputs"),
        ({"scales": torch.ones(3, 2)}, "scales.0. is Float .3, 2.*must be float32 .4, 2."),
        ({"scales": torch.full((4, 2), 7e4)}, "scales.0. has a value that is not finite or above 65504"),
        ({"offsets": torch.full((4, 2), torch.nan)}, "offsets.0. has a value that is not finite"),
        ({"bias": torch.ones(5)}, "biases.0. has shape .5.: must be .4."),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    fitting = {"bits": 4, "codes": torch.zeros(4, 64, dtype=torch.uint8), "scales": torch.ones(4, 2)}
    args = fitting | {"offsets": None, "bias": None} | change
    with pytest.raises(ValueError, match=message):
        PackedLinear.from_groups(args["bits"], [args["codes"]], [args["scales"]], [args["offsets"]], [args["bias"]])
