"""Gives a step's outputs back one round later, so that the caller has had time to copy them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import RequestOutputPool


class DeferredRelease:
    """Holds the handles of the last round between `collect` (end of a round) and `release` (middle of the next)."""

    def __init__(self, pool: RequestOutputPool) -> None:
        self._pool = pool
        self._collected: list[NDArray[np.uint64]] = []

    def collect(self, handles: NDArray[np.uint64]) -> None:
        if len(handles):
            self._collected.append(handles)

    def release(self) -> None:
        for handles in self._collected:
            self._pool.release(handles)
        self._collected.clear()
