"""The CPU kernels (csrc/kernels), registered with torch as `torch.ops.deepinfer`."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

ISAS = ("portable", "avx2", "avx512")
"""Instruction sets that the kernels are compiled for; the best one that the machine has is chosen when they load."""


def _load() -> Any:
    spec = importlib.util.find_spec("deepinfer_backend._kernels")
    if spec is None or spec.origin is None:
        raise ImportError("deepinfer_backend._kernels is not built: install the package")
    torch.ops.load_library(spec.origin)  # type: ignore[no-untyped-call]
    return torch.ops.deepinfer


kernels = _load()

PackedLinear: Any = torch.classes.deepinfer.PackedLinear
"""y = x Wᵀ + bias with weights packed for the kernels.

PackedLinear(weights, biases) merges weights [num_outputs_i, num_inputs], all float32 or all bfloat16, over their
outputs; a bias may be None. PackedLinear.from_groups(bits, codes, scales, offsets, biases) does the same with the parts
of GroupedMatrix (models/weights.py) of the same bits and group_size; scales and offsets become float16, inputs are
rounded to 8 bits for each group of 32. forward(x [.., num_inputs] float32) returns [.., num_outputs]; apply_to(x, y)
writes into the rows of y; unpack_rows(outputs [num_rows] int64) returns the packed weights of these outputs themselves,
float32 [num_rows, num_inputs]. Attributes: num_outputs, num_inputs, num_bytes (of the packed weights).
"""

Decoder: Any = torch.classes.deepinfer.Decoder
"""A model of the Llama family, a step in one call: Decoder(hidden_size, …, output_layer), `add_layer` for each layer,
then `forward` for each step. csrc/torch_ops/decoder_ops.cpp has arguments and shapes.
"""
