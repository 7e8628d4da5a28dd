"""`make bench-load`: how soon a cancelled request's blocks are free, and what a long queue costs, through Triton."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2_grpc

from deepinfer_backend.models.loader import resolve_model
from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_client import build_message
from tests.support.triton_server import read_metrics, running_server

_NUM_CHANNELS = 8
_BLOCK_SIZE = 16
# One of the two requests leaves too few blocks for the other.
_NUM_BLOCKS = 6
_PROMPT_LEN = 60
_POLL_INTERVAL_S = 0.1


def main(
    num_runs: Annotated[int, typer.Option(help="Requests that are cancelled; the median counts.")] = 21,
    queue_size: Annotated[int, typer.Option(help="Requests that wait at once.")] = 4096,
) -> None:
    table = Table("what", "figure")
    model = {"model": str(resolve_model(None)), "enable_prefix_caching": False}
    tight = {**model, "block_size": _BLOCK_SIZE, "num_gpu_blocks_override": _NUM_BLOCKS}
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), {"deepinfer": tight}) as server:
        for what, figure in asyncio.run(_measure_cancels(server, num_runs)).items():
            table.add_row(what, figure)
    deep = {**model, "max_queue_size": queue_size, "max_num_seqs": 1}
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), {"deepinfer": deep}) as server:
        for what, figure in asyncio.run(_measure_queue(server, queue_size)).items():
            table.add_row(what, figure)
    Console().print(table)


async def _measure_cancels(server: TritonServer, num_runs: int) -> dict[str, str]:
    """A waits for B's blocks: from the cancel of B to the first token of A, less what that takes on an idle server."""
    alone_s, behind_s = [], []
    async with grpc.aio.insecure_channel(f"localhost:{server.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(num_runs):
            sent_s = time.perf_counter()
            await _send(stub, max_tokens=1).read()
            alone_s.append(time.perf_counter() - sent_s)
            running = _send(stub, max_tokens=30)
            await running.read()
            waiting = _send(stub, max_tokens=1)
            await asyncio.sleep(2 * alone_s[-1])  # it would have been answered by now
            cancelled_s = time.perf_counter()
            running.cancel()
            await waiting.read()
            behind_s.append(time.perf_counter() - cancelled_s)
    freed_ms = sorted(1e3 * (behind - alone) for behind, alone in zip(behind_s, alone_s, strict=True))
    return {
        "from a cancel to its blocks being used by another, ms: median": f"{statistics.median(freed_ms):.0f}",
        f"the same, longest of {num_runs}": f"{freed_ms[-1]:.0f}",
    }


async def _measure_queue(server: TritonServer, queue_size: int) -> dict[str, str]:
    before_bytes = _resident_bytes(server)
    channels = [grpc.aio.insecure_channel(f"localhost:{server.grpc_port}") for _ in range(_NUM_CHANNELS)]
    stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]
    running = _send(stubs[0], max_tokens=1900)
    await running.read()
    waiting = [_send(stubs[index % _NUM_CHANNELS], max_tokens=1) for index in range(queue_size)]
    while (num_waiting := read_metrics(server)["deepinfer_requests_waiting"]) < queue_size:
        await asyncio.sleep(_POLL_INTERVAL_S)
    grown_bytes = _resident_bytes(server) - before_bytes
    refusals_s = []
    for _ in range(21):
        sent_s = time.perf_counter()
        answer = await _send(stubs[1], max_tokens=1).read()
        assert answer.error_message.startswith("UNAVAILABLE"), answer
        refusals_s.append(time.perf_counter() - sent_s)
    cancelled_s = time.perf_counter()
    for call in (*waiting, running):
        call.cancel()
    while read_metrics(server)["deepinfer_requests_waiting"] > 0:
        await asyncio.sleep(_POLL_INTERVAL_S)
    emptied_s = time.perf_counter() - cancelled_s
    for channel in channels:
        await channel.close()
    return {
        "requests that wait at once": f"{num_waiting:.0f}",
        "memory of all processes for each, KiB": f"{grown_bytes / num_waiting / 1024:.0f}",
        "refusal when the queue is full, ms: median": f"{1e3 * statistics.median(refusals_s):.1f}",
        "until the whole queue is cancelled, s": f"{emptied_s:.1f}",
    }


def _send(stub: Any, max_tokens: int) -> Any:
    inputs = {
        "input_ids": list(range(100, 100 + _PROMPT_LEN)),
        "stream": True,
        "sampling_parameters": {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
    }
    return stub.ModelStreamInfer(_once(build_message("deepinfer", "", {}, [], {}, inputs)))


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message


def _resident_bytes(server: TritonServer) -> int:
    sizes = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in server.process_ids()]
    return sum(map(int, sizes)) * 4096


if __name__ == "__main__":
    typer.run(main)
