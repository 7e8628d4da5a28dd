"""The random numbers of a step's rows of logits: one entry, CPU and CUDA behind it; nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.ops.ragged import advance_of, sequence_of_rows

_MANTISSA_BITS = 53


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The sequences that a step samples for, and their rows of logits.

    seeds: [num_seqs] int64, the bits of unsigned numbers; output_indices: [num_seqs] int64, of each sequence's first
    row at the least advance; advance_slots: [num_seqs] int32, the slot whose accepted drafts are to be added to it,
    below 0 where it is right; sample_start_loc: [num_seqs + 1] int32, where each sequence's rows begin.
    """

    seeds: torch.Tensor
    output_indices: torch.Tensor
    advance_slots: torch.Tensor
    sample_start_loc: torch.Tensor


def uniforms_of(
    rows: SampledRows, num_accepted: torch.Tensor, uniforms: torch.Tensor, row_output_indices: torch.Tensor
) -> None:
    """Fills in each row's output index [num_rows] int64 and its uniform number in [0, 1), [num_rows] float64.

    num_accepted: [num_slots] int32. A number depends on the seed and the output index alone (csrc/uniform.hpp).

    Raises:
        ValueError: a tensor or an index in it does not fit (on CPU).
    """
    if uniforms.device.type != "cpu":
        uniforms_of_in_torch(rows, num_accepted, uniforms, row_output_indices)
        return
    kernels.uniforms_of(
        rows.seeds,
        rows.output_indices,
        rows.advance_slots,
        rows.sample_start_loc,
        num_accepted,
        uniforms,
        row_output_indices,
    )


def uniforms_of_in_torch(
    rows: SampledRows, num_accepted: torch.Tensor, uniforms: torch.Tensor, row_output_indices: torch.Tensor
) -> None:
    """`uniforms_of` on any device; CUDA's way."""
    num_rows = len(uniforms)
    seqs = sequence_of_rows(rows.sample_start_loc, num_rows)
    offsets = torch.arange(num_rows, device=uniforms.device) - rows.sample_start_loc[seqs]
    first = rows.output_indices + advance_of(rows.advance_slots, num_accepted)
    torch.add(first[seqs], offsets, out=row_output_indices)
    # As csrc/uniform.hpp: int64 wraps around as unsigned numbers do.
    golden = _signed(0x9E3779B97F4A7C15)
    state = _scramble(rows.seeds[seqs] + golden) + (row_output_indices + 1) * golden
    bits = _shift_right(_scramble(state), 64 - _MANTISSA_BITS)
    torch.mul(bits.double(), 2.0**-_MANTISSA_BITS, out=uniforms)


def _scramble(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    """As if x were unsigned."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
