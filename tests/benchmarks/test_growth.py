"""Curves have a measured and a least possible value at each point; an engine that fails leaves the others' alone."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from benchmarks.growth import PREFILL_SHARE, PREFIX_RATIO, Growth, Sizes
from benchmarks.limits import MemoryReader
from benchmarks.measure import Field
from benchmarks.step_cost import decode_cost, prefill_cost
from tests.benchmarks.test_engine_process import fake_engine
from tests.benchmarks.test_measure import SHAPE
from tests.benchmarks.test_results import make_results

SIZES = Sizes([64, 128], [1, 2], [16, 32], prefill_len=48, prefix_len=40, num_runs=2)


class FakeReader:
    def measure(self) -> float:
        return 5e9


def test_growth_is_measured_beside_its_limits(tmp_path: Path) -> None:
    results = make_results()
    with Field(SHAPE, 2, tmp_path, results, lambda _: None) as field:
        growth = Growth(SHAPE, cast(MemoryReader, FakeReader()), field, results)
        steady, mortal = field.start(fake_engine("steady")), field.start(fake_engine("mortal", fault="death"))
        assert steady is not None and mortal is not None
        growth.add_curves([steady, mortal], SIZES)
        growth.add_prefill_share(steady, SIZES)
        growth.add_prefix_ratio(steady.engine, SIZES)
    context, streams, prompt = (curve for curve in results.curves if curve.engine == "steady bf16")
    operations = results.limits.operations("bf16")
    weight_bytes = SHAPE.weight_bytes(2)
    assert (context.points, streams.points, prompt.points) == ([64, 128], [1, 2], [16, 32])
    assert context.measured == [500.0, 500.0]  # the fake's step, in ms
    assert context.limits[1] == pytest.approx(
        1e3 * decode_cost(SHAPE, weight_bytes, 2, 1, 128 - 16).least_s(5e9, operations)
    )
    assert streams.measured == [2.0, 4.0]
    assert streams.limits[1] == pytest.approx(2 / decode_cost(SHAPE, weight_bytes, 2, 2, 48).least_s(5e9, operations))
    assert prompt.limits[0] == pytest.approx(1e3 * prefill_cost(SHAPE, weight_bytes, 2, 1, 16).least_s(5e9, operations))
    assert [curve.points for curve in results.curves if curve.engine == "mortal bf16"] == [[64, 128], [1], []]
    assert results.shares[PREFILL_SHARE.format(48)] > 0
    assert results.shares[PREFIX_RATIO.format(40)] > 0
