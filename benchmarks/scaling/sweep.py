"""The simulations of `make bench-scaling`: sizes in three layouts, ratios of a split, loads, a frontend's limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.scaling.cluster import Cluster, LockstepCluster, SplitCluster
from benchmarks.scaling.costs import Costs, DeviceCosts, FrontendCosts
from benchmarks.scaling.figures import Record, Run, Window
from benchmarks.scaling.requests import CHAT, LONG, WORKLOADS, Workload

_SIZES = (1, 4, 16, 64, 256, 1024)
_MAX_DEVICES = {CHAT.name: 1024, LONG.name: 256}
_FRONTEND_SIZES = (1, 16, 32, 40, 48, 64, 128)
_LOADS = (5, 10, 15, 20, 25, 30, 35)  # requests/s of each device
_PROMPT_ENGINES = (8, 9, 10, 11, 12, 13)
_PART_SIZE = 16  # devices where the size is not what varies
_WARM_UP_S = 4.0
_MIN_LENGTH_S, _MAX_LENGTH_S = 1.0, 60.0
_DEVICE_SECONDS = 512
_PROMPT_ENGINE_LOAD = 0.7


class Part(StrEnum):
    """What varies."""

    SIZES = "sizes"
    RATIOS = "ratios"
    LOADS = "loads"
    FRONTEND = "frontend"


class Layout(StrEnum):
    UNSPLIT = "unsplit"
    SPLIT = "split"
    LOCKSTEP = "lockstep"


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulation to come; num_prompt_engines: 0 unless split."""

    part: Part
    layout: Layout
    workload: Workload
    num_devices: int
    num_prompt_engines: int = 0

    @property
    def window(self) -> Window:
        """Shorter for more devices, which have as many requests in less time."""
        length_s = min(max(_DEVICE_SECONDS / self.num_devices, _MIN_LENGTH_S), _MAX_LENGTH_S)
        return Window(_WARM_UP_S, _WARM_UP_S + length_s)

    def run(self, costs: Costs) -> Run:
        began_s = time.perf_counter()
        cluster = self._cluster(costs, Record(self.window))
        cluster.run(self.window.to_s)
        return Run(
            part=self.part,
            layout=self.layout,
            workload=self.workload.name,
            requests_per_s=self.workload.requests_per_s,
            num_devices=self.num_devices,
            num_prompt_engines=self.num_prompt_engines,
            window=self.window,
            figures=cluster.figures(),
            seconds=time.perf_counter() - began_s,
        )

    def _cluster(self, costs: Costs, record: Record) -> Cluster:
        arrivals = self.workload.arrivals(self.num_devices, self.window.to_s)
        match self.layout:
            case Layout.UNSPLIT:
                return Cluster(self.num_devices, costs, arrivals, record)
            case Layout.LOCKSTEP:
                return LockstepCluster(self.num_devices, costs, arrivals, record)
            case Layout.SPLIT:
                return SplitCluster(self.num_devices, costs, arrivals, record, self.num_prompt_engines)


def num_prompt_engines(workload: Workload, num_devices: int, device: DeviceCosts) -> int:
    """So many that prefills fill 70% of their time: the rest is for the arrivals' unevenness. At least one decodes."""
    wanted = math.ceil(num_devices * workload.prefill_share(device) / _PROMPT_ENGINE_LOAD)
    return min(max(wanted, 1), num_devices - 1)


def all_plans(device: DeviceCosts) -> Iterator[Plan]:
    for workload in WORKLOADS:
        for size in _SIZES:
            if size <= _MAX_DEVICES[workload.name]:
                yield from _layouts(Part.SIZES, workload, size, device)
    for workload in WORKLOADS:
        for number in _PROMPT_ENGINES:
            yield Plan(Part.RATIOS, Layout.SPLIT, workload, _PART_SIZE, number)
    for load in _LOADS:
        yield from _layouts(Part.LOADS, replace(CHAT, requests_per_s=load), _PART_SIZE, device)
    for size in _FRONTEND_SIZES:
        yield Plan(Part.FRONTEND, Layout.UNSPLIT, CHAT, size)
        if size > 1:
            yield Plan(Part.FRONTEND, Layout.SPLIT, CHAT, size, num_prompt_engines(CHAT, size, device))


def costs_of(plan: Plan, measured: FrontendCosts) -> Costs:
    """A frontend's work counts only where its limit is asked for."""
    return Costs(frontend=measured) if plan.part is Part.FRONTEND else Costs()


def _layouts(part: Part, workload: Workload, size: int, device: DeviceCosts) -> Iterator[Plan]:
    yield Plan(part, Layout.UNSPLIT, workload, size)
    if size > 1:
        yield Plan(part, Layout.SPLIT, workload, size, num_prompt_engines(workload, size, device))
        yield Plan(part, Layout.LOCKSTEP, workload, size)
