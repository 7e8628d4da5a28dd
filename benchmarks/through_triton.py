"""The same closed loop through a real tritonserver: gRPC streams from one asyncio client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import numpy as np
import tritonclient.grpc.aio as triton
from numpy.typing import NDArray

from benchmarks.workload import MAX_TOKENS, Figures

_PARAMETERS = json.dumps({"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True})


def run(url: str, prompts: list[list[int]], concurrency: int) -> Figures:
    return asyncio.run(_run(url, prompts, concurrency))


async def _run(url: str, prompts: list[list[int]], concurrency: int) -> Figures:
    slots = asyncio.Semaphore(concurrency)
    first_token_s: list[float] = []
    num_tokens = 0

    async def one(client: triton.InferenceServerClient, prompt: list[int]) -> None:
        nonlocal num_tokens
        async with slots:
            sent_at = time.perf_counter()
            is_first = True
            async for result, error in client.stream_infer(_one_request(prompt)):
                if error is not None:
                    raise error
                if is_first:
                    first_token_s.append(time.perf_counter() - sent_at)
                    is_first = False
                num_tokens += len(result.as_numpy("token_ids"))

    async with triton.InferenceServerClient(url) as client:
        started = time.perf_counter()
        await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        elapsed_s = time.perf_counter() - started
    return Figures(num_output_tokens=num_tokens, elapsed_s=elapsed_s, first_token_s=first_token_s)


async def _one_request(prompt: list[int]) -> AsyncIterator[dict[str, object]]:
    yield {
        "model_name": "deepinfer",
        "inputs": [
            _tensor("input_ids", "INT32", np.array(prompt, dtype=np.int32)),
            _tensor("stream", "BOOL", np.array([True])),
            _tensor("sampling_parameters", "BYTES", np.array([_PARAMETERS], dtype=object)),
        ],
    }


def _tensor(name: str, datatype: str, values: NDArray[np.generic]) -> triton.InferInput:
    tensor = triton.InferInput(name, values.shape, datatype)
    tensor.set_data_from_numpy(values)
    return tensor
