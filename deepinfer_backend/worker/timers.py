"""Where a step's time goes on the host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimers:
    """Seconds that the host spent in each phase since the start.

    They are multi_modal_fetch (taking in what waited for its media, grammar or adapter; asleep, if nothing else was to
    do), schedule, vote (of ranks in lockstep), forward
    (launching it), sample, post_process (waiting for the device included), and in all of a step.

    Owned by the thread that steps the engine.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def record(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started
