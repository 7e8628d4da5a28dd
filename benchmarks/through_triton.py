"""The same closed loop through a real tritonserver: gRPC streams from one asyncio client.

The client shares the machine with the server, so it does as little as it can: answers are read as bytes, and counted
when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.workload import MAX_TOKENS, Figures
from tests.support.triton_client import build_message, read_message

_PARAMETERS = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def run(url: str, prompts: list[list[int]], concurrency: int) -> Figures:
    return asyncio.run(_run(url, prompts, concurrency))


async def _run(url: str, prompts: list[list[int]], concurrency: int) -> Figures:
    slots = asyncio.Semaphore(concurrency)
    first_token_s: list[float] = []
    answers: list[bytes] = []

    async with grpc.aio.insecure_channel(url) as channel:
        infer = channel.stream_stream(_METHOD, request_serializer=service_pb2.ModelInferRequest.SerializeToString)

        async def one(prompt: list[int]) -> None:
            async with slots:
                sent_at = time.perf_counter()
                is_first = True
                async for answer in infer(_one_request(prompt)):
                    if is_first:
                        first_token_s.append(time.perf_counter() - sent_at)
                        is_first = False
                    answers.append(answer)

        started = time.perf_counter()
        await asyncio.gather(*(one(prompt) for prompt in prompts))
        elapsed_s = time.perf_counter() - started
    num_tokens = sum(_num_tokens(answer) for answer in answers)
    return Figures(num_output_tokens=num_tokens, elapsed_s=elapsed_s, first_token_s=first_token_s)


async def _one_request(prompt: list[int]) -> AsyncIterator[Any]:
    yield build_message(
        "deepinfer", "", {}, [], {}, {"input_ids": prompt, "stream": True, "sampling_parameters": _PARAMETERS}
    )


def _num_tokens(answer: bytes) -> int:
    response = read_message(service_pb2.ModelStreamInferResponse.FromString(answer))
    if response.error is not None:
        raise RuntimeError(response.error)
    return len(response.token_ids)
