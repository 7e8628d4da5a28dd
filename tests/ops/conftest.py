"""What the tests of all kernel families share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer_backend.ops.kernels import ISAS, kernels


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set, on the kernels compiled for it."""
    name: str = request.param
    chosen = kernels.isa()
    if not kernels.set_isa(name):
        pytest.skip(f"this machine does not run {name}")
    yield name
    kernels.set_isa(chosen)
