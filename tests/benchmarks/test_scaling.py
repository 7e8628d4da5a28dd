"""The simulation of many engines takes the time that its costs say, and loses neither requests nor blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pytest

from benchmarks.scaling.cluster import Cluster, LockstepCluster, SplitCluster
from benchmarks.scaling.costs import Chunk, Costs, FrontendCosts
from benchmarks.scaling.figures import Record, Window
from benchmarks.scaling.requests import CHAT, LONG, WORKLOADS, SimulatedRequest, Workload
from benchmarks.scaling.sweep import num_prompt_engines

COSTS = Costs()
ALWAYS = Window(0.0, math.inf)
MakeCluster = Callable[[Iterable[SimulatedRequest], Record], Cluster]


def unsplit(
    requests: Iterable[SimulatedRequest], record: Record, num_devices: int = 3, costs: Costs = COSTS
) -> Cluster:
    return Cluster(num_devices, costs, iter(requests), record)


def split(requests: Iterable[SimulatedRequest], record: Record, num_devices: int = 3) -> Cluster:
    return SplitCluster(num_devices, COSTS, iter(requests), record, num_prompt_engines=num_devices // 2)


def lockstep(requests: Iterable[SimulatedRequest], record: Record, num_devices: int = 3) -> Cluster:
    return LockstepCluster(num_devices, COSTS, iter(requests), record)


def request(prompt_len: int, num_outputs: int, arrival_s: float = 0.0, request_id: str = "0") -> SimulatedRequest:
    return SimulatedRequest(request_id, arrival_s, np.full(prompt_len, int(request_id), np.int32), num_outputs)


def decode_times(prompt_len: int, num_outputs: int) -> list[float]:
    return [COSTS.device.decode_s(1, prompt_len + index) for index in range(1, num_outputs)]


def prefill_s(prompt_len: int) -> float:
    return COSTS.device.prefill_s([Chunk(prompt_len, prompt_len, samples=True)])


def run(make: MakeCluster, *requests: SimulatedRequest) -> tuple[Cluster, Record]:
    record = Record(ALWAYS)
    cluster = make(requests, record)
    cluster.run()
    return cluster, record


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    cluster, record = run(partial(unsplit, num_devices=1), request(500, 40, arrival_s=1.0))
    assert record.first_tokens_s == pytest.approx([prefill_s(500)])
    assert record.gaps_s == pytest.approx(decode_times(500, 40))
    assert cluster.now_s == pytest.approx(1.0 + prefill_s(500) + sum(decode_times(500, 40)))


def test_a_prompt_above_the_budget_is_prefilled_in_chunks() -> None:
    _, record = run(unsplit, request(3000, 2))
    chunks = [Chunk(2048, 2048, samples=False), Chunk(952, 3000, samples=True)]
    assert record.first_tokens_s == pytest.approx([sum(COSTS.device.prefill_s([chunk]) for chunk in chunks)])


def test_sequences_decode_together_and_wait_for_prefills() -> None:
    _, record = run(partial(unsplit, num_devices=1), request(500, 3), request(700, 2, 1e-6, "1"))
    first_s, both_s = prefill_s(500), COSTS.device.decode_s(2, 501 + 701)
    assert record.first_tokens_s == pytest.approx([first_s, first_s + prefill_s(700) - 1e-6])
    assert record.gaps_s == pytest.approx([prefill_s(700) + both_s, both_s, COSTS.device.decode_s(1, 502)])


def test_a_hand_over_takes_latency_and_bytes_over_bandwidth() -> None:
    _, record = run(split, request(500, 3))
    num_bytes = 512 * COSTS.device.kv_bytes_per_token  # whole blocks
    transfer_s = COSTS.link.latency_s + num_bytes / COSTS.link.bandwidth
    assert record.hand_overs_bytes == [num_bytes]
    assert record.first_tokens_s == pytest.approx([prefill_s(500)])
    second_s, third_s = decode_times(500, 3)
    assert record.gaps_s == pytest.approx([transfer_s + second_s, third_s])


def test_a_link_carries_one_prompt_at_a_time() -> None:
    prefilled_together = (request(500, 2, 1e-6, request_id) for request_id in "12")
    _, record = run(split, request(100, 2), *prefilled_together)
    transfer_s = COSTS.link.transfer_s(512 * COSTS.device.kv_bytes_per_token)
    decode_s = COSTS.device.decode_s(1, 501)
    assert record.second_gaps_s[1:] == pytest.approx([transfer_s + decode_s, 2 * transfer_s + decode_s])


def test_in_lockstep_the_longest_step_is_everybodys() -> None:
    _, record = run(partial(lockstep, num_devices=2), request(500, 3), request(2000, 2, 1e-6, "1"))
    vote_s = COSTS.link.vote_hop_s
    assert record.first_tokens_s[0] == pytest.approx(prefill_s(500) + vote_s)
    assert record.gaps_s[0] == pytest.approx(prefill_s(2000) + vote_s), "a decode step beside a long prefill"


def test_what_a_frontend_does_at_once_waits_in_line() -> None:
    frontend = FrontendCosts(route_s=0.25, message_s=0.5, token_s=0.125)
    make = partial(unsplit, num_devices=2, costs=Costs(frontend=frontend))
    _, record = run(make, request(500, 2), request(500, 2, request_id="1"))
    # Both are routed, then each step's message has its turn: the first one's prefill and decode, the second one's.
    routed_s, message_s = 0.5, 0.625
    assert record.first_tokens_s == pytest.approx([routed_s + message_s, routed_s + 3 * message_s])
    assert record.second_gaps_s == pytest.approx([message_s, message_s])
    assert record.frontend_s == pytest.approx(2 * 0.25 + 4 * 0.625)


@pytest.mark.parametrize("make", [unsplit, split, lockstep])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_request_and_no_block_is_lost(make: MakeCluster, workload: Workload) -> None:
    requests = list(workload.arrivals(num_devices=3, end_s=2.0))
    cluster, record = run(make, *requests)
    assert len(requests) > 10
    assert len(record.first_tokens_s) == len(requests)
    assert record.num_tokens == sum(each.num_outputs for each in requests) == record.num_offered
    for engine in cluster.engines:
        engine.scheduler.check_invariants()
        assert engine.scheduler.num_unfinished_requests == 0
        assert engine.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("make", [unsplit, split, lockstep])
def test_two_runs_are_equal(make: MakeCluster) -> None:
    first, second = (run(make, *CHAT.arrivals(num_devices=3, end_s=1.0))[1] for _ in range(2))
    assert first == second


def test_what_is_outside_of_the_window_does_not_count() -> None:
    record = Record(Window(1.0, 2.0))
    for at_s in (0.5, 1.0, 1.5, 2.0):
        record.add_first_token(at_s, at_s)
        record.add_gap(at_s, at_s, num_tokens=10)
    assert record.first_tokens_s == record.gaps_s == [1.0, 1.5]
    figures = record.figures(num_prompt_engines=0, num_engines=1)
    assert (figures.tokens_per_s, figures.gap_s) == (22, [1.0, 1.5])


def test_a_split_leaves_engines_for_both() -> None:
    numbers = [num_prompt_engines(workload, size, COSTS.device) for workload in (CHAT, LONG) for size in (2, 4, 16)]
    assert numbers == [1, 3, 11, 1, 3, 12]
