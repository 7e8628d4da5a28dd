"""Many streams at once over one gRPC connection: python grpc_asyncio_many.py --url localhost:8001 --streams 32"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton


def build_request(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    sampling = triton.InferInput("sampling_parameters", [1], "BYTES")
    sampling.set_data_from_numpy(np.array([json.dumps({"max_tokens": max_tokens}).encode()], dtype=np.object_))
    stream = triton.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    return {"model_name": model, "inputs": [text, sampling, stream]}


async def run_stream(client: Any, model: str, prompt: str, max_tokens: int) -> tuple[str, int]:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield build_request(model, prompt, max_tokens)

    text, num_tokens = "", 0
    async for result, error in client.stream_infer(requests(), stream_timeout=120):
        if error is not None:
            raise error
        text += result.as_numpy("text_output")[0].decode()
        num_tokens += len(result.as_numpy("token_ids"))
    return text, num_tokens


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="deepinfer")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    started = time.perf_counter()
    async with triton.InferenceServerClient(args.url) as client:
        prompts = [f"Fact number {number} about the sea:" for number in range(args.streams)]
        answers = await asyncio.gather(*(run_stream(client, args.model, p, args.max_tokens) for p in prompts))
    elapsed_s = time.perf_counter() - started
    num_tokens = sum(count for _, count in answers)
    print(f"first answer: {answers[0][0]!r}")
    print(f"{len(answers)} streams, {num_tokens} tokens, {num_tokens / elapsed_s:.0f} tokens/s")


if __name__ == "__main__":
    asyncio.run(main())
