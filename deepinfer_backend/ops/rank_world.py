"""The processes that work as one: engines in lockstep, and the ranks that compute one engine's model together.

One world of torch.distributed (gloo on the CPU, NCCL between CUDA devices), and in it a group for each purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from deepinfer_backend.errors import EngineDeadError
from deepinfer_backend.rank_place import RankPlace

_START_TIMEOUT = timedelta(hours=1)  # ranks load as long as their files take
_FOREVER = timedelta(days=3650)  # an engine may be idle as long as it likes


class RankWorld:
    """One process's membership, which lasts as long as the process.

    engines: the group of the engines in lockstep, None if there is one or this is not an engine's first rank.
    tensor: the ranks of this process's engine, None if there is one.

    Raises (constructor):
        EngineDeadError: the others did not come.
    """

    def __init__(self, place: RankPlace, step_timeout_s: float, store: Store) -> None:
        """step_timeout_s: that the others may take for their part of a step; store: where they find each other."""
        size, step_timeout = place.tensor_size, timedelta(seconds=step_timeout_s)
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=store,
                rank=place.world_rank,
                world_size=place.world_size,
                timeout=_START_TIMEOUT,
            )
            # All of the world make every group, in the same order.
            engines = dist.new_group(range(0, place.world_size, size), timeout=step_timeout)
            shares = [
                [dist.new_group(range(first, first + size), timeout=timeout) for timeout in (step_timeout, _FOREVER)]
                for first in range(0, place.world_size, size)
            ]
        except RuntimeError as error:
            raise EngineDeadError(f"the ranks did not find each other: {error}") from error
        self.engines = engines if place.data_size > 1 and place.tensor_rank == 0 else None
        self.tensor = TensorGroup(place.tensor_rank, size, *shares[place.data_rank]) if size > 1 else None

    def wait_for_all(self) -> None:
        """Until every rank has come here; for as long as loading may take."""
        try:
            dist.barrier()
        except RuntimeError as error:
            raise EngineDeadError("a rank ended while the model was loaded") from error


@dataclass(frozen=True, slots=True)
class RankShare:
    """Of what `size` ranks have together, the part of `rank`: as much as every other's."""

    rank: int = 0
    size: int = 1

    def of(self, count: int) -> slice:
        """Which of so many; a multiple of `size`."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE = RankShare()


class TensorGroup:
    """The ranks that compute one model together (Shoeybi et al. 2019, "Megatron-LM"); the first one is the leader.

    All of them call the same methods in the same order, on their devices' streams. After an EngineDeadError, which
    every method raises when a rank has ended or is late, the group is of no use any more.
    """

    def __init__(self, rank: int, size: int, steps: dist.ProcessGroup, waits: dist.ProcessGroup) -> None:
        """steps: for what the ranks do in a step, in which they are bound to come; waits: for what they wait for."""
        self.share = RankShare(rank, size)
        self.name = steps.group_name
        """What torch's functional collectives call it."""
        self._steps = steps
        self._waits = waits

    def sum(self, tensor: torch.Tensor) -> None:
        """Over all ranks, in place."""
        with _lost_ranks():
            dist.all_reduce(tensor, group=self._steps)

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leader gets the ranks' tensors [num_rows, num_columns] side by side, the others their own."""
        with _lost_ranks():
            if self.share.rank:
                dist.gather(tensor.contiguous(), group=self._steps, group_dst=0)
                return tensor
            parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.share.size)]
            dist.gather(tensor.contiguous(), parts, group=self._steps, group_dst=0)
        return torch.cat(parts, dim=1)

    def send(self, sizes: list[int], payload: torch.Tensor | None = None) -> None:
        """The leader's: [num_elements] int64 to everybody, with so many sizes as `receive` asks for."""
        num_elements = 0 if payload is None else payload.numel()
        with _lost_ranks():
            dist.broadcast(torch.tensor([num_elements, *sizes]), group=self._waits, group_src=0)
            if payload is not None:
                dist.broadcast(payload, group=self._steps, group_src=0)

    def receive(self, num_sizes: int, device: torch.device) -> tuple[list[int], torch.Tensor]:
        """What the leader sends, however long that takes."""
        header = torch.empty(1 + num_sizes, dtype=torch.int64)
        with _lost_ranks():
            dist.broadcast(header, group=self._waits, group_src=0)
            num_elements, *sizes = header.tolist()
            payload = torch.empty(num_elements, dtype=torch.int64, device=device)
            if num_elements:
                dist.broadcast(payload, group=self._steps, group_src=0)
        return sizes, payload


@contextmanager
def _lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise EngineDeadError("a tensor-parallel rank has ended or is late") from error
