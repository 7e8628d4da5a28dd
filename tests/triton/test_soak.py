"""Everything at once, at twice what the machine can carry: each request ends once and rightly, and nothing grows.

`make soak` runs it for half an hour.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from deepinfer_backend.triton.server import TritonServer
from tests.support.oracle import TransformersOracle
from tests.support.soak import Crowd, Known, Verdicts
from tests.support.tiny_text_model import byte_tokenizer, make_tiny_text_model
from tests.support.triton_client import http_generate
from tests.support.triton_server import read_metrics, running_server, wait_until

SOAK_S = float(os.environ.get("DEEPINFER_SOAK_S", "180"))
CALIBRATION_S = 10.0
SATURATING_CLIENTS = 48
OVERLOAD = 2.0
MAX_OPEN = 400  # clients that wait at once: the test's own limit, well over what the server takes
SAMPLE_INTERVAL_S = 2.0
DRAIN_LIMIT_S = 60.0
MAX_GROWTH_BYTES = 48 * 2**20
ENGINE_ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 200,  # too few for all 32: sequences are preempted
    "max_queue_size": 64,
    "priority_aging_s": 1.0,
}


@dataclass(frozen=True)
class Footprint:
    """What a server holds at one time. Sizes in bytes."""

    resident: dict[int, int]  # by process
    shared_memory: int
    num_threads: dict[int, int]


def footprint(server: TritonServer) -> Footprint:
    status = {pid: Path(f"/proc/{pid}/status").read_text() for pid in server.process_ids()}
    return Footprint(
        resident={pid: 1024 * _number(text, "VmRSS:") for pid, text in status.items()},
        shared_memory=sum(region.stat().st_size for region in server.shared_memory_regions()),
        num_threads={pid: _number(text, "Threads:") for pid, text in status.items()},
    )


@pytest.mark.timeout(SOAK_S + 600)
def test_at_twice_the_load_that_the_machine_carries_each_request_ends_rightly_and_nothing_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_text_model(tmp_path)
    with running_server(tmp_path, {"deepinfer": {"model": str(model), **ENGINE_ARGUMENTS}}) as server:
        known = known_answers(server, model)
        verdicts = Verdicts()
        footprints: list[Footprint] = []
        rate = asyncio.run(soak(server, known, verdicts, footprints))
        wait_until(lambda: is_idle(server), DRAIN_LIMIT_S, "the server has nothing left to do")
        with capsys.disabled():
            print(f"\n{SOAK_S:g} s at {rate:.0f} requests/s: {summary(verdicts)}\n{growth_summary(footprints)}")
        assert verdicts.complaints[:5] == []
        assert verdicts.num_right_texts > 100
        assert verdicts.num("queue full") > 0, "the load was no load"
        check_footprints(footprints)
        assert http_generate(server, text_input=known[0].prompt, max_tokens=1)[0] == 200
        log = (tmp_path / "tritonserver.log").read_text()
        assert "Traceback" not in log


def known_answers(server: TritonServer, model: Path) -> list[Known]:
    """transformers' tokens; the text is that of the server while it has nothing else to do."""
    oracle, tokenizer = TransformersOracle(model), byte_tokenizer()
    answers = []
    for index in range(16):
        prompt, max_tokens = "The sea is wide. "[: 4 + index] * (1 + index % 3), 4 + 3 * index
        token_ids = oracle.greedy(tokenizer(prompt)["input_ids"], max_tokens, ignore_eos=True)
        status, answer = http_generate(
            server,
            text_input=prompt,
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            exclude_input_in_output=True,
        )
        assert (status, answer["token_ids"]) == (200, token_ids)
        answers.append(Known(prompt, max_tokens, token_ids, answer["text_output"]))
    return answers


async def soak(server: TritonServer, known: list[Known], verdicts: Verdicts, footprints: list[Footprint]) -> float:
    """Returns the rate at which requests came, in requests/s."""
    crowd = Crowd(server, known, verdicts)
    carried = Verdicts()
    rate = OVERLOAD * await measure_capacity(Crowd(server, known, carried), carried)
    end_s = time.monotonic() + SOAK_S
    watching = asyncio.ensure_future(watch(server, footprints, lambda: time.monotonic() < end_s))
    random, requests = Random(1), set[asyncio.Task[None]]()
    next_s = time.monotonic()
    while time.monotonic() < end_s:
        if len(requests) < MAX_OPEN:
            request = asyncio.ensure_future(crowd.send_one(Random(random.random())))
            requests.add(request)
            request.add_done_callback(requests.discard)
        next_s += random.expovariate(rate)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    await asyncio.gather(*requests, watching)
    await crowd.close()
    return rate


async def measure_capacity(crowd: Crowd, verdicts: Verdicts) -> float:
    """Requests/s that are answered while a few clients send one after the other."""
    end_s = time.monotonic() + CALIBRATION_S

    async def client(random: Random) -> None:
        while time.monotonic() < end_s:
            await crowd.send_one(random)

    await asyncio.gather(*(client(Random(index)) for index in range(SATURATING_CLIENTS)))
    await crowd.close()
    assert verdicts.complaints[:5] == []
    return (verdicts.counts.total() - verdicts.num("queue full")) / CALIBRATION_S


async def watch(server: TritonServer, footprints: list[Footprint], is_on: Callable[[], bool]) -> None:
    while is_on():
        footprints.append(footprint(server))
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def check_footprints(footprints: list[Footprint]) -> None:
    """The last third against the one before: what a server first takes, it takes in the first."""
    third = len(footprints) // 3
    before, after = footprints[third : 2 * third], footprints[2 * third :]
    assert {frozenset(each.resident) for each in footprints[third:]} == {frozenset(before[0].resident)}, "restarts"
    for pid in before[0].resident:
        growth = median_of(after, lambda each, pid=pid: each.resident[pid]) - median_of(  # type: ignore[misc]
            before,
            lambda each, pid=pid: each.resident[pid],  # type: ignore[misc]
        )
        assert growth < MAX_GROWTH_BYTES, f"process {pid} grew by {growth / 2**20:.0f} MiB"
    assert after[-1].shared_memory <= max(each.shared_memory for each in footprints[:third])
    for pid, num_threads in after[-1].num_threads.items():
        assert num_threads <= max(each.num_threads[pid] for each in before) + 2, f"threads of process {pid}"


def median_of(footprints: list[Footprint], value: Callable[[Footprint], int]) -> float:
    return statistics.median(map(value, footprints))


def summary(verdicts: Verdicts) -> str:
    ends = sorted({end for _, end in verdicts.counts})
    return ", ".join(f"{verdicts.num(end)} {end}" for end in ends) + f"; {verdicts.num_right_texts} texts compared"


def growth_summary(footprints: list[Footprint]) -> str:
    first, last = footprints[len(footprints) // 3], footprints[-1]
    sizes = [f"{first.resident[pid] >> 20} → {last.resident.get(pid, 0) >> 20}" for pid in first.resident]
    return f"MiB resident: {', '.join(sizes)}; shared memory {first.shared_memory >> 20} → {last.shared_memory >> 20}"


def is_idle(server: TritonServer) -> bool:
    metrics = read_metrics(server)
    names = ("deepinfer_requests_running", "deepinfer_requests_waiting", "deepinfer_kv_cache_usage_ratio")
    return all(metrics[name] == 0 for name in names)


def _number(text: str, key: str) -> int:
    return int(text.partition(key)[2].split()[0])
