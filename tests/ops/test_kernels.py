"""Which instruction set the kernels run on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_backend.ops.kernels import ISAS, kernels


def test_the_best_instruction_set_that_the_machine_has_is_chosen() -> None:
    chosen = subprocess.run(
        [sys.executable, "-c", "from deepinfer_backend.ops.kernels import kernels; print(kernels.isa())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    flags = set(Path("/proc/cpuinfo").read_text().split())
    expected = "portable"
    if flags >= {"avx2", "fma", "f16c"}:
        expected = "avx2"
        if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}:
            expected = "avx512"
    assert chosen == expected


def test_kernels_run_on_the_set_that_was_asked_for(isa: str) -> None:
    assert kernels.isa() == isa


def test_a_set_that_the_machine_lacks_changes_nothing() -> None:
    before = kernels.isa()
    lacking = ISAS[ISAS.index(before) + 1 :]
    assert [kernels.set_isa(name) for name in lacking] == [False] * len(lacking)
    assert kernels.isa() == before


def test_an_unknown_set_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="isa is 'sse9': must be portable, avx2 or avx512"):
        kernels.set_isa("sse9")
