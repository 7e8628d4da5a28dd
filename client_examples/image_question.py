"""Asks about a picture that it draws: python image_question.py grpc|http|offline URL_OR_MODEL"""

import argparse
import base64
import io
import json

import numpy as np
import requests
import tritonclient.grpc as triton
from PIL import Image, ImageDraw

from deepinfer_backend import LLM, SamplingParams

QUESTION = "What shapes are in the picture, and of which colors?"


def draw() -> bytes:
    picture, file = Image.new("RGB", (320, 240), "white"), io.BytesIO()
    ImageDraw.Draw(picture).ellipse((30, 60, 150, 180), fill="red")
    ImageDraw.Draw(picture).rectangle((180, 70, 290, 170), fill="blue")
    picture.save(file, "PNG")
    return file.getvalue()


def ask_grpc(url: str, text: str, file: bytes) -> None:
    values = {"text_input": text.encode(), "image": file, "sampling_parameters": b'{"max_tokens": 64}'}
    inputs = [triton.InferInput(name, [1], "BYTES") for name in values]
    for tensor, value in zip(inputs, values.values(), strict=True):
        tensor.set_data_from_numpy(np.array([value], dtype=np.object_))
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: print(error or result.as_numpy("text_output")[0].decode()))
        client.async_stream_infer("deepinfer", inputs)
        client.stop_stream()  # waits for the answer


def messages(image: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["grpc", "http", "offline"])
    parser.add_argument("where", help="localhost:8001, http://localhost:8000, or a model's folder")
    parser.add_argument("--placeholder", default="<image>", help="for gRPC: what stands for an image in a text")
    args, file = parser.parse_args(), draw()
    if args.way == "grpc":
        ask_grpc(args.where, f"{args.placeholder}\n{QUESTION}", file)
    elif args.way == "http":
        url = {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}
        body = {"messages": json.dumps(messages({"type": "image_url", "image_url": url})), "max_tokens": 64}
        print(requests.post(f"{args.where}/v2/models/deepinfer/generate", json=body, timeout=60).json()["text_output"])
    else:
        with LLM(args.where) as llm:
            print(llm.chat(messages({"type": "image", "image": file}), SamplingParams(max_tokens=64))[0])


if __name__ == "__main__":
    main()
