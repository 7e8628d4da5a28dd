"""A closed loop of gRPC streams against a tritonserver, from one asyncio client.

The client shares the machine with the server, so it does as little as it can: answers are read as bytes, and counted
when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.workload import Figures, TokenClock, Work
from tests.support.triton_client import Response, build_message, read_message

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def run_streams(
    url: str,
    model: str,
    work: Work,
    prompt_inputs: Sequence[Mapping[str, Any]],
    num_tokens_of: Callable[[Response], int],
) -> Figures:
    """prompt_inputs: the tensors that say each prompt. Raises RuntimeError for an answer that is an error."""
    return asyncio.run(_run(url, model, work, prompt_inputs, num_tokens_of))


async def _run(
    url: str,
    model: str,
    work: Work,
    prompt_inputs: Sequence[Mapping[str, Any]],
    num_tokens_of: Callable[[Response], int],
) -> Figures:
    slots = asyncio.Semaphore(work.concurrency)
    sent: list[tuple[int, float]] = []
    answers: list[tuple[int, float, bytes]] = []
    sampling = {"temperature": 0, "max_tokens": work.max_tokens, "ignore_eos": True}
    messages = [
        build_message(model, "", {}, [], {}, {**inputs, "stream": True, "sampling_parameters": sampling})
        for inputs in prompt_inputs
    ]

    async with grpc.aio.insecure_channel(url) as channel:
        infer = channel.stream_stream(_METHOD, request_serializer=service_pb2.ModelInferRequest.SerializeToString)

        async def one(index: int, message: Any) -> None:
            async with slots:
                sent.append((index, time.perf_counter()))
                async for answer in infer(_once(message)):
                    answers.append((index, time.perf_counter(), answer))

        started = time.perf_counter()
        await asyncio.gather(*(one(index, message) for index, message in enumerate(messages)))
        elapsed_s = time.perf_counter() - started
    clock = TokenClock()
    for index, now in sent:
        clock.add_sent(index, now)
    for index, now, answer in answers:
        response = read_message(service_pb2.ModelStreamInferResponse.FromString(answer))
        if response.error is not None:
            raise RuntimeError(response.error)
        if num_tokens := num_tokens_of(response):
            clock.add_tokens(index, num_tokens, now)
    return clock.figures(elapsed_s)


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message
