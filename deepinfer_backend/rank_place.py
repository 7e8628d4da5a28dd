"""Where a process is among those that serve one model together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `tensor_rank` of the `tensor_size` that compute the model of engine `data_rank`, of `data_size` in lockstep.

    rendezvous: where they find each other, a file that is not there yet.
    """

    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    rendezvous: str
