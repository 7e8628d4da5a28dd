"""Asks a vision-language model about a picture that it draws itself, in three ways:

python image_question.py --grpc localhost:8001     # the file as it is, beside a text with the model's placeholder
python image_question.py --http http://localhost:8000     # a conversation with a data URL
python image_question.py --offline /path/to/model     # no server
"""

import argparse
import base64
import io
import json
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

QUESTION = "What shapes are in the picture, and of which colors?"


def draw() -> Image.Image:
    picture = Image.new("RGB", (320, 240), "white")
    pen = ImageDraw.Draw(picture)
    pen.ellipse((30, 60, 150, 180), fill="red")
    pen.rectangle((180, 70, 290, 170), fill="blue")
    return picture


def messages(image: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]


def ask_grpc(url: str, model: str, placeholder: str, file: bytes, max_tokens: int) -> str:
    import tritonclient.grpc as triton

    inputs = []
    for name, value in (
        ("text_input", f"{placeholder}\n{QUESTION}".encode()),
        ("image", file),
        ("sampling_parameters", json.dumps({"max_tokens": max_tokens, "temperature": 0}).encode()),
    ):
        inputs.append(triton.InferInput(name, [1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([value], dtype=np.object_))
    inputs.append(triton.InferInput("exclude_input_in_output", [1], "BOOL"))
    inputs[-1].set_data_from_numpy(np.array([True]))
    answers: list[Any] = []
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.append(error or result.as_numpy("text_output")[0].decode()))
        client.async_stream_infer(model, inputs)
        client.stop_stream()  # waits for the answer
    return str(answers[0])


def ask_http(url: str, model: str, file: bytes, max_tokens: int) -> str:
    import requests

    data_url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    conversation = json.dumps(messages({"type": "image_url", "image_url": {"url": data_url}}))
    body = {"messages": conversation, "max_tokens": max_tokens, "temperature": 0}
    answer = requests.post(f"{url}/v2/models/{model}/generate", json=body, timeout=60).json()
    return str(answer.get("text_output") or answer["error"])


def ask_offline(path: str, picture: Image.Image, max_tokens: int) -> str:
    from deepinfer_backend import LLM, SamplingParams

    with LLM(path) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return str(llm.chat(messages({"type": "image", "image": picture}), params, use_tqdm=False)[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--grpc", metavar="URL")
    way.add_argument("--http", metavar="URL")
    way.add_argument("--offline", metavar="MODEL")
    parser.add_argument("--model", default="deepinfer")
    parser.add_argument("--placeholder", default="<image>", help="what stands for an image in the model's texts")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    file = io.BytesIO()
    draw().save(file, "PNG")
    if args.grpc:
        print(ask_grpc(args.grpc, args.model, args.placeholder, file.getvalue(), args.max_tokens))
    elif args.http:
        print(ask_http(args.http, args.model, file.getvalue(), args.max_tokens))
    else:
        print(ask_offline(args.offline, draw(), args.max_tokens))


if __name__ == "__main__":
    main()
