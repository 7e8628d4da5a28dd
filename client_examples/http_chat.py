"""A question to the model's chat template, answered in JSON: python http_chat.py --url http://localhost:8000"""

import argparse
import json
from typing import Any

import requests

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}, "is_certain": {"type": "boolean"}},
    "required": ["answer", "is_certain"],
}


def chat(url: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    # Triton's HTTP endpoint takes no objects and lists of them: what is one goes as a string.
    body = {"messages": json.dumps(messages), **fields}
    response = requests.post(f"{url}/generate", json=body, timeout=60)
    answer: dict[str, Any] = response.json()
    if response.status_code != 200:
        raise RuntimeError(answer["error"])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="deepinfer")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    answer = chat(
        f"{args.url}/v2/models/{args.model}",
        [{"role": "system", "content": "Answer in JSON."}, {"role": "user", "content": args.question}],
        structured_outputs=json.dumps({"json": SCHEMA}),
        max_tokens=args.max_tokens,
        temperature=0,
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    print(answer["text_output"], f"[{answer['finish_reason']}, {answer['num_output_tokens']} tokens]")


if __name__ == "__main__":
    main()
