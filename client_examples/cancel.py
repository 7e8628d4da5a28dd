"""Cancels a long answer after a few tokens: python cancel.py --url localhost:8001"""

import argparse
import json
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="deepinfer")
    parser.add_argument("--cancel-after", type=int, default=5, help="responses")
    args = parser.parse_args()

    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"Count: 1, 2, 3,"], dtype=np.object_))
    sampling = triton.InferInput("sampling_parameters", [1], "BYTES")
    long_answer = json.dumps({"max_tokens": 1000, "ignore_eos": True}).encode()
    sampling.set_data_from_numpy(np.array([long_answer], dtype=np.object_))
    stream = triton.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))

    responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    with triton.InferenceServerClient(args.url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(args.model, [text, sampling, stream])
        for _ in range(args.cancel_after):
            result, error = responses.get(timeout=60)
            if error is not None:
                raise error
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
        # The engine drops the request within 100 ms, and its KV blocks are free for others.
        client.stop_stream(cancel_requests=True)
    print(f"\n[cancelled after {args.cancel_after} responses]")


if __name__ == "__main__":
    main()
