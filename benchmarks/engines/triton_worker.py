"""Our engine behind a real tritonserver: gRPC streams from one asyncio client.

The client shares the machine with the server, so it does as little as it can: answers are read as bytes, and counted
when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, TokenClock, Work
from tests.support.triton_client import build_message, read_message
from tests.support.triton_server import running_server

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_MODEL = "deepinfer"


class TritonRunner:
    """Owns the server."""

    version = importlib.metadata.version("deepinfer-backend")

    def __init__(self, num_threads: int, **engine_args: Any) -> None:
        # num_threads: the engine's process takes it from OMP_NUM_THREADS.
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(running_server(folder, {_MODEL: engine_args}))
            self._url = f"localhost:{server.grpc_port}"
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def run(self, work: Work) -> Figures:
        return asyncio.run(_run(self._url, work))


async def _run(url: str, work: Work) -> Figures:
    slots = asyncio.Semaphore(work.concurrency)
    sent: list[tuple[int, float]] = []
    answers: list[tuple[int, float, bytes]] = []

    async with grpc.aio.insecure_channel(url) as channel:
        infer = channel.stream_stream(_METHOD, request_serializer=service_pb2.ModelInferRequest.SerializeToString)

        async def one(index: int, prompt: list[int]) -> None:
            async with slots:
                sent.append((index, time.perf_counter()))
                async for answer in infer(_one_request(prompt, work.max_tokens)):
                    answers.append((index, time.perf_counter(), answer))

        started = time.perf_counter()
        await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(work.prompts)))
        elapsed_s = time.perf_counter() - started
    clock = TokenClock()
    for index, now in sent:
        clock.add_sent(index, now)
    for index, now, answer in answers:
        if num_tokens := _num_tokens(answer):
            clock.add_tokens(index, num_tokens, now)
    return clock.figures(elapsed_s)


async def _one_request(prompt: list[int], max_tokens: int) -> AsyncIterator[Any]:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    yield build_message(_MODEL, "", {}, [], {}, {"input_ids": prompt, "stream": True, "sampling_parameters": sampling})


def _num_tokens(answer: bytes) -> int:
    response = read_message(service_pb2.ModelStreamInferResponse.FromString(answer))
    if response.error is not None:
        raise RuntimeError(response.error)
    return len(response.token_ids)


if __name__ == "__main__":
    serve(TritonRunner)
