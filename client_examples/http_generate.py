"""One answer at once and one as a stream (SSE) over HTTP: python http_generate.py --url http://localhost:8000"""

import argparse
import json
from typing import Any

import requests


def generate(url: str, body: dict[str, Any]) -> str:
    response = requests.post(f"{url}/generate", json=body, timeout=60)
    if response.status_code != 200:
        raise RuntimeError(response.json()["error"])
    return str(response.json()["text_output"])


def generate_stream(url: str, body: dict[str, Any]) -> None:
    with requests.post(f"{url}/generate_stream", json={**body, "stream": True}, stream=True, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:  # also once the stream has begun, when the status is 200 already
                raise RuntimeError(event["error"])
            print(event["text_output"], end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt", nargs="?", default="The three primary colours are")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="deepinfer")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    url = f"{args.url}/v2/models/{args.model}"
    # Numbers, booleans and strings may stand beside the prompt; lists go into sampling_parameters, as JSON.
    body = {
        "text_input": args.prompt,
        "max_tokens": args.max_tokens,
        "sampling_parameters": json.dumps({"temperature": 0, "stop": ["\n\n"]}),
    }
    print("generate:", generate(url, {**body, "exclude_input_in_output": True}))
    print("generate_stream:", end=" ")
    generate_stream(url, body)


if __name__ == "__main__":
    main()
