"""Products with packed weights equal those in float64, for every instruction set, size and number of rows."""

from __future__ import annotations

import pytest
import torch

from deepinfer_backend.ops.kernels import PackedLinear

DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((1, 1), (5, 3), (16, 16), (33, 7), (150, 257), (100, 1031))
"""(num_outputs, num_inputs): less than a column, whole ones, odd ones; more inputs than a block of them."""


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, isa: str) -> torch.Tensor:
    """In float64, of the inputs as the kernel multiplies them."""
    if isa == "avx512" and weight.dtype == torch.bfloat16:
        x = x.bfloat16()
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def assert_close(y: torch.Tensor, expected: torch.Tensor, num_inputs: int) -> None:
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=5e-6 * num_inputs**0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_equals_the_product_in_float64(isa: str, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs)
    plain, with_bias = PackedLinear([weight], [None]), PackedLinear([weight], [bias])
    x = torch.randn(200, num_inputs)
    expected = exact(x, weight, None, isa)
    expected_with_bias = exact(x, weight, bias, isa)
    for num_rows in (*range(1, 71), 200):
        assert_close(plain.forward(x[:num_rows]), expected[:num_rows], num_inputs)
        assert_close(with_bias.forward(x[:num_rows]), expected_with_bias[:num_rows], num_inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_other_rows(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = PackedLinear([torch.randn(200, 700).to(dtype)], [torch.randn(200)])
    x = torch.randn(230, 700)
    alone = torch.cat([linear.forward(x[row : row + 1]) for row in range(len(x))])
    for num_rows in (*range(2, 20), 31, 32, 48, 97, 230):
        assert torch.equal(linear.forward(x[:num_rows]), alone[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_does_not_depend_on_the_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = PackedLinear([torch.randn(700, 300).to(dtype)], [None])
    num_threads = torch.get_num_threads()
    for num_rows in (1, 9, 130):
        x = torch.randn(num_rows, 300)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear.forward(x))
        torch.set_num_threads(num_threads)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 130])
def test_reads_and_writes_rows_that_lie_apart_and_nothing_else(isa: str, dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(43, 301).to(dtype)
    linear = PackedLinear([weight], [None])
    wide_x = torch.full((num_rows, 310), torch.nan)
    x = wide_x[:, 4:305]
    x.copy_(torch.randn(num_rows, 301))
    wide_y = torch.full((num_rows, 50), 7.0)
    linear.apply_to(x, wide_y[:, 3:46])
    assert_close(wide_y[:, 3:46], exact(x, weight, None, isa), 301)
    assert (wide_y[:, :3] == 7).all()
    assert (wide_y[:, 46:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merges_weights_over_outputs(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(size, 40).to(dtype) for size in (24, 9, 31)]
    biases = [torch.randn(24), None, torch.randn(31).to(dtype)]
    linear = PackedLinear(weights, biases)
    x = torch.randn(3, 40)
    bias = torch.cat([torch.zeros(9) if each is None else each.float() for each in biases])
    assert_close(linear.forward(x), exact(x, torch.cat(weights), bias, isa), 40)
    assert (linear.num_outputs, linear.num_inputs) == (64, 40)
    assert linear.num_bytes == 64 * 40 * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [*SIZES, (300, 577)])
def test_unpacks_the_rows_that_were_packed(isa: str, dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    linear = PackedLinear([weight], [torch.randn(num_outputs)])
    for num_rows in (0, 1, 300):
        outputs = torch.randint(0, num_outputs, (num_rows,))
        rows = linear.unpack_rows(outputs)
        assert rows.dtype == torch.float32
        assert torch.equal(rows, torch.nn.functional.embedding(outputs, weight).float())


def test_takes_any_number_of_batch_dimensions() -> None:
    weight = torch.randn(20, 12)
    linear = PackedLinear([weight], [None])
    for shape in ((12,), (0, 12), (2, 3, 12)):
        x = torch.randn(shape)
        torch.testing.assert_close(linear.forward(x), torch.nn.functional.linear(x, weight))


def test_packs_weights_that_are_not_contiguous() -> None:
    weight = torch.randn(12, 20).T
    x = torch.randn(2, 12)
    torch.testing.assert_close(PackedLinear([weight], [None]).forward(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    ("weights", "biases", "message"),
    [
        ([], [], "weights is empty"),
        ([torch.ones(4, 4)], [], "biases has 0 entries: must be the 1 of weights"),
        ([torch.ones(4, 4).double()], [None], "weights[0] is Double: must be float32 or bfloat16"),
        ([torch.ones(4, 4), torch.ones(4, 4).bfloat16()], [None, None], "weights[1] is BFloat16 on cpu: must be Float"),
        ([torch.ones(4, 4), torch.ones(4, 5)], [None, None], "weights[1] has shape [4, 5]"),
        ([torch.ones(4, 4)], [torch.ones(5)], "biases[0] has shape [5]: must be [4]"),
    ],
)
def test_refuses_weights_that_do_not_fit(
    weights: list[torch.Tensor], biases: list[torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        PackedLinear(weights, biases)
    assert message in str(error.value)


def test_refuses_rows_that_do_not_fit() -> None:
    linear = PackedLinear([torch.ones(4, 6)], [None])
    with pytest.raises(ValueError, match="last size must be 6"):
        linear.forward(torch.ones(2, 5))
    with pytest.raises(ValueError, match="must be float32"):
        linear.forward(torch.ones(2, 6).double())
    with pytest.raises(ValueError, match="y has 3 rows: must be the 2 of x"):
        linear.apply_to(torch.ones(2, 6), torch.ones(3, 4))


def test_refuses_outputs_that_are_not_there() -> None:
    linear = PackedLinear([torch.ones(4, 6)], [None])
    for outputs in (torch.tensor([1, 4]), torch.tensor([-1])):
        with pytest.raises(ValueError, match=f"outputs has {outputs[-1]}: must be 0 to 3"):
            linear.unpack_rows(outputs)
    with pytest.raises(ValueError, match=r"outputs is .*must be contiguous Long \[2\]"):
        linear.unpack_rows(torch.tensor([1.0, 2.0]))
