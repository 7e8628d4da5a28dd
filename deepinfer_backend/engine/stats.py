"""What a scheduler counts, and the periodic line of statistics."""

from __future__ import annotations

import logging
import time

from deepinfer_backend._core import Scheduler
from deepinfer_backend.engine.messages import EngineStats
from deepinfer_backend.worker.timers import StepTimers

logger = logging.getLogger(__name__)


def scheduler_stats(scheduler: Scheduler) -> EngineStats:
    """Its part of an engine's."""
    return EngineStats(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running + scheduler.num_prompted,
        num_blocks=scheduler.num_blocks,
        num_used_blocks=scheduler.num_used_blocks,
        num_preemptions=scheduler.num_preemptions,
        num_cached_tokens=scheduler.num_cached_tokens,
        num_drafts=scheduler.num_drafts,
        num_draft_tokens=scheduler.num_draft_tokens,
        num_accepted_draft_tokens=scheduler.num_accepted_draft_tokens,
        num_accepted_by_position=scheduler.num_accepted_by_position.tolist(),
    )


class StatsLine:
    """Writes one line of statistics to the log every `interval_s` seconds in which there were steps; 0 is never."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_time = time.monotonic()
        self._last = EngineStats()
        self._last_seconds: dict[str, float] = {}

    def update(self, stats: EngineStats, timers: StepTimers) -> None:
        elapsed_s = time.monotonic() - self._last_time
        if not self._interval_s or elapsed_s < self._interval_s or stats.num_steps == self._last.num_steps:
            return
        num_steps = stats.num_steps - self._last.num_steps
        phases = "  ".join(
            f"{phase} {(seconds - self._last_seconds.get(phase, 0.0)) / num_steps * 1e3:.2f}"
            for phase, seconds in timers.seconds.items()
        )
        logger.info(
            "%.0f prompt and %.0f output tokens/s; %d running, %d waiting; KV blocks %d of %d used; "
            "%d preemptions; ms per step: %s",
            (stats.num_prompt_tokens - self._last.num_prompt_tokens) / elapsed_s,
            (stats.num_generation_tokens - self._last.num_generation_tokens) / elapsed_s,
            stats.num_running,
            stats.num_waiting,
            stats.num_used_blocks,
            stats.num_blocks,
            stats.num_preemptions - self._last.num_preemptions,
            phases,
        )
        self._last_time, self._last, self._last_seconds = time.monotonic(), stats, dict(timers.seconds)
