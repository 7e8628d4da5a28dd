"""Where a process is among those that serve one model together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `tensor_rank` of the `tensor_size` that compute the model of engine `data_rank`, of `data_size` in lockstep.

    rendezvous: where they find each other: `file:///path` of a file that is not there yet, or `tcp://host:port` on the
    first rank's machine.
    """

    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    rendezvous: str

    @property
    def world_rank(self) -> int:
        return self.data_rank * self.tensor_size + self.tensor_rank

    @property
    def world_size(self) -> int:
        return self.data_size * self.tensor_size
