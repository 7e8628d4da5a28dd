"""Data-parallel ranks in lockstep: a vote before each step, so that all of them make the same number of steps."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from deepinfer_backend._core import SchedulerOutputs
from deepinfer_backend.errors import EngineDeadError


class StepKind(IntEnum):
    """What a rank would do next; the greatest vote counts."""

    IDLE = 0
    DECODE = 1
    PREFILL = 2


def step_kind(batch: SchedulerOutputs) -> StepKind:
    if batch.is_empty():
        return StepKind.IDLE
    return StepKind.PREFILL if batch.is_prefill else StepKind.DECODE


class RankGroup:
    """One engine's end of the group. Owned by the engine's thread."""

    def __init__(self, engines: ProcessGroup) -> None:
        """engines: one rank of each."""
        self._engines = engines
        self._ballot = torch.zeros(1, dtype=torch.int64)
        self.agreed = StepKind.IDLE

    def vote(self, kind: StepKind) -> StepKind:
        """What the group does next; kept as `agreed`.

        Raises:
            EngineDeadError: an engine has ended or did not vote in time. The group is of no use any more.
        """
        self._ballot[0] = kind
        try:
            all_reduce(self._ballot, ReduceOp.MAX, group=self._engines)
        except RuntimeError as error:
            raise EngineDeadError("an engine in lockstep with this one has ended or is late") from error
        self.agreed = StepKind(int(self._ballot[0]))
        return self.agreed
