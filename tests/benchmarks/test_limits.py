"""The memory reader reads every byte that it says it reads."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.limits import Limits, compile_reader

_LINE_WORDS = 8


@pytest.mark.parametrize("num_streams", [1, 2, 4, 8])
@pytest.mark.parametrize("ahead_bytes", [0, 256])
def test_every_line_is_read(num_streams: int, ahead_bytes: int) -> None:
    read_lines = compile_reader()
    num_lines = 64
    words = np.random.default_rng(0).integers(0, 2**63, size=(num_lines + 1) * _LINE_WORDS, dtype=np.uint64)
    misaligned = words.ctypes.data % 64 // 8
    lines = words[(_LINE_WORDS - misaligned) % _LINE_WORDS :][: num_lines * _LINE_WORDS]
    assert read_lines(lines.ctypes.data, num_lines, num_streams, ahead_bytes) == np.bitwise_xor.reduce(lines)


def test_narrow_weights_may_be_widened_to_what_the_machine_is_fast_with() -> None:
    old = Limits(2, 10e9, 20e9, float32=100e9, bfloat16=5e9, int8=1e9)
    assert [old.operations(weights) for weights in ("f32", "bf16", "8-bit", "4-bit")] == [100e9] * 4
    new = Limits(2, 10e9, 20e9, float32=100e9, bfloat16=400e9, int8=800e9)
    assert [new.operations(weights) for weights in ("f32", "bf16", "8-bit", "4-bit")] == [100e9, 400e9, 800e9, 800e9]
