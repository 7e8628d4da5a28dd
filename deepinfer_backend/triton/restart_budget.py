"""How often something that dies may be started again: so many times in a window, then no more."""

from __future__ import annotations

import time
from collections import deque

RESTART_WINDOW_S = 600.0


class RestartBudget:
    """Used by one thread."""

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts` within any RESTART_WINDOW_S; 0 allows none."""
        self.max_restarts = max_restarts
        self._times_s: deque[float] = deque()

    @property
    def num_taken(self) -> int:
        """Restarts within the window that ended with the last `take`."""
        return len(self._times_s)

    def take(self) -> bool:
        """Whether one more restart may be made now; then it counts."""
        now_s = time.monotonic()
        while self._times_s and now_s - self._times_s[0] > RESTART_WINDOW_S:
            self._times_s.popleft()
        if len(self._times_s) >= self.max_restarts:
            return False
        self._times_s.append(now_s)
        return True
