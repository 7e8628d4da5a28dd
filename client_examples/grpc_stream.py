"""Streams one answer over gRPC: python grpc_stream.py --url localhost:8001 [PROMPT]"""

import argparse
import json
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def text_input(name: str, value: str) -> Any:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def bool_input(name: str, value: bool) -> Any:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="deepinfer")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    with triton.InferenceServerClient(args.url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        sampling = {"temperature": 0, "max_tokens": args.max_tokens}
        inputs = [
            text_input("text_input", args.prompt),
            text_input("sampling_parameters", json.dumps(sampling)),
            bool_input("stream", True),
            bool_input("return_finish_reason", True),
        ]
        client.async_stream_infer(args.model, inputs, request_id="example")
        print(args.prompt, end="", flush=True)
        finish_reason = "None"
        while finish_reason == "None":  # the last response says why it ended
            result, error = responses.get(timeout=60)
            if error is not None:
                raise error
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
            finish_reason = result.as_numpy("finish_reason")[0].decode()
        client.stop_stream()  # without it this process would not end
    print(f"\n[{finish_reason}]")


if __name__ == "__main__":
    main()
