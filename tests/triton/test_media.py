"""Images and videos through a real server: Triton's own clients, as the vLLM and TensorRT-LLM backends take them."""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.triton.model_config import write_model_repository
from deepinfer_backend.triton.server import TritonServer
from deepinfer_backend.triton.tensorrtllm.repository import write_tensorrtllm_models
from tests.support import tensorrtllm_clients
from tests.support.media import bad_images, encoded, frames, picture, video_file
from tests.support.processes import command_line
from tests.support.triton_client import GrpcRequest, http_generate, stream_error, stream_text
from tests.support.triton_server import START_TIMEOUT_S, free_ports, running_processes, wait_until
from tests.support.vision_models import VISION_FAMILIES, VisionOracle, make_vision_model
from tests.support.vllm_clients import PROTOCOLS, Outputs, Protocol
from tests.triton.test_client_examples import example

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

MODEL = "qwen2_vl"
IMAGE, VIDEO = VISION_FAMILIES[MODEL].image, str(VISION_FAMILIES[MODEL].video)
NUM_TOKENS = 12
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS}
ENGINE = {"dtype": "float32", "device": "cpu", "max_image_pixels": 4_000_000, "max_num_seqs": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(MODEL, tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> VisionOracle:
    return VisionOracle(model)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("server")
    write_model_repository(folder / "models", {"deepinfer": {**ENGINE, "model": str(model)}})
    write_tensorrtllm_models(folder / "models", "deepinfer")
    http_port, grpc_port, metrics_port = free_ports(3)
    with TritonServer(
        folder / "models",
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_file=folder / "tritonserver.log",
    ) as server:
        server.wait_ready(START_TIMEOUT_S)
        yield server
        process_ids = [*server.process_ids(), *media_processes()]
    wait_until(lambda: not running_processes(process_ids), 15, "the end of every process")


def media_processes() -> list[int]:
    process_ids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in running_processes(process_ids) if b"deepinfer_backend.media.worker" in command_line(pid)]


def ask(server: TritonServer, protocol: Protocol, text: str, **inputs: Any) -> list[int]:
    """The new tokens."""
    parameters = {"sampling_parameters": json.dumps(GREEDY)}
    responses: list[Outputs] = protocol(server, "deepinfer", {"text_input": text, **parameters, **inputs}, {})
    return [token_id for response in responses for token_id in response.get("token_ids", [])]


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_images_as_clients_of_the_vllm_backend_send_them(
    server: TritonServer, oracle: VisionOracle, protocol: Protocol
) -> None:
    """In base64, several, the placeholders in the text."""
    images = [picture(200, 120, 1), picture(90, 90, 2)]
    text = f"{IMAGE} and {IMAGE}: what are they?"
    expected = oracle.answer(text, images, num_tokens=NUM_TOKENS).token_ids
    assert ask(server, protocol, text, image=[in_base64(encoded(image)) for image in images]) == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_video_and_an_image(server: TritonServer, oracle: VisionOracle, protocol: Protocol) -> None:
    image, pixels = picture(200, 120, 1), frames(4, 112, 84)
    text = f"{VIDEO} {IMAGE} What happens?"
    expected = oracle.answer(text, [image], [pixels], num_tokens=NUM_TOKENS).token_ids
    video = in_base64(video_file(pixels, fps=24))
    assert ask(server, protocol, text, image=in_base64(encoded(image)), video=video) == expected


def test_files_as_they_are_over_grpc(server: TritonServer, oracle: VisionOracle) -> None:
    image = picture(200, 120, 1)
    text = f"{IMAGE} What is it?"
    request = GrpcRequest(
        server, text_input=text, image=[encoded(image, "WEBP", lossless=True)], stream=True, sampling_parameters=GREEDY
    )
    responses = request.result()
    stream_text(responses)
    tokens = [token_id for response in responses for token_id in response.token_ids]
    assert tokens == oracle.answer(text, [image], num_tokens=NUM_TOKENS).token_ids


@pytest.mark.parametrize("kind", ["image_url", "image"])
def test_a_conversation_with_a_data_url(server: TritonServer, oracle: VisionOracle, kind: str) -> None:
    image = picture(200, 120, 1)
    _, expected = oracle.chat(
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]}],
        num_tokens=NUM_TOKENS,
    )
    url = "data:image/png;base64," + in_base64(encoded(image))
    given = {"url": url} if kind == "image_url" else url
    parts = [{"type": kind, kind: given}, {"type": "text", "text": "What is it?"}]
    status, answer = http_generate(server, messages=json.dumps([{"role": "user", "content": parts}]), **GREEDY)
    assert (status, answer["token_ids"]) == (200, expected)


@pytest.mark.parametrize("protocol", [tensorrtllm_clients.grpc_stream, tensorrtllm_clients.grpc_asyncio])
def test_pixels_as_clients_of_the_tensorrt_llm_backend_send_them(
    server: TritonServer, oracle: VisionOracle, protocol: tensorrtllm_clients.Protocol
) -> None:
    image = picture(120, 90, 1)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    _, expected = oracle.chat([{"role": "user", "content": content}], num_tokens=NUM_TOKENS)
    responses = protocol(
        server,
        "tensorrt_llm_bls",
        {
            "text_input": "What is it?",
            "image_bytes_input": np.asarray(image)[None, None],
            "max_tokens": NUM_TOKENS,
            "temperature": 0.0,
            "top_k": 1,
            "exclude_input_in_output": True,
            "bad_words": "",
            "stop_words": "",
        },
    )
    text = "".join(response["text_output"][0] for response in responses if response.get("text_output"))
    assert text == oracle.processor.tokenizer.decode(expected, skip_special_tokens=True)


SMALL = in_base64(encoded(picture(60, 60)))
BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"text_input": IMAGE, "image": "http://localhost/a"}, "image.0 is 'http://localhost/a': must be a data URL"),
    ({"text_input": IMAGE, "image": in_base64(b"nothing")}, "image.0 is not an image"),
    ({"text_input": IMAGE, "image": [""]}, "image.0 is empty"),
    ({"text_input": "no placeholder", "image": SMALL}, "image: the model's processor"),
    ({"text_input": IMAGE, "image": [SMALL] * 17}, "at most 16 (limit_mm_per_prompt)"),
    ({"messages": '[{"role": "user", "content": "x"}]', "image": "a"}, "image is set: must be left out without text"),
    (
        {"messages": '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]'},
        "messages.0.content.0.image_url is '/etc/passwd': must be a data URL",
    ),
    (
        {"text_input": IMAGE, "image": SMALL, "truncate_prompt_tokens": 5},
        "truncate_prompt_tokens is 5: must be left out with images and videos",
    ),
]


@pytest.mark.parametrize(("request_body", "reason"), BAD_REQUESTS, ids=[reason[:40] for _, reason in BAD_REQUESTS])
def test_a_bad_request_is_refused_by_name(server: TritonServer, request_body: dict[str, Any], reason: str) -> None:
    status, answer = http_generate(server, **request_body)
    assert status == 400
    assert answer["error"].startswith("INVALID_ARG: ")
    assert reason in answer["error"]


def test_two_hundred_bad_images_while_sixteen_streams_go_on(server: TritonServer, oracle: VisionOracle) -> None:
    """Each is refused by name, none ends a process, and the streams are those that they are alone."""
    texts = [f"A text of its own, number {number}, and nothing else." for number in range(16)]
    long = {"temperature": 0, "max_tokens": 600, "ignore_eos": True}
    options: dict[str, Any] = {"stream": True, "sampling_parameters": long, "timeout_s": 300.0}
    alone = [GrpcRequest(server, text_input=text, **options) for text in texts]
    expected = [[token_id for response in request.result(300) for token_id in response.token_ids] for request in alone]

    beside = [GrpcRequest(server, text_input=text, **options) for text in texts]
    for request in beside:
        request.wait_first()

    def refuse(case: tuple[str, bytes, str]) -> str | None:
        name, data, reason = case
        responses = GrpcRequest(server, text_input=f"{IMAGE} What?", image=[data]).result()
        error = stream_error(responses)
        is_named = "INVALID_ARG: image.0 " in error and (reason in error or not data)
        return None if is_named else f"{name}: {error}"

    cases = list(itertools.islice(itertools.cycle(bad_images()), 200))
    with ThreadPoolExecutor(8) as pool:
        wrong = [message for message in pool.map(refuse, cases) if message is not None]
    assert wrong == []
    for request, tokens in zip(beside, expected, strict=True):
        responses = request.result(300)
        stream_text(responses)
        assert [token_id for response in responses for token_id in response.token_ids] == tokens


def test_a_media_process_that_is_killed_is_replaced(server: TritonServer, oracle: VisionOracle) -> None:
    image = picture(200, 120, 3)
    text = f"{IMAGE} What is it?"
    expected = oracle.answer(text, [image], num_tokens=NUM_TOKENS).token_ids
    for _ in range(3):
        for process_id in media_processes():
            os.kill(process_id, signal.SIGKILL)
        wait_until(lambda: not media_processes(), 10, "the end of the media processes")
        status, answer = http_generate(server, text_input=text, image=in_base64(encoded(image)), **GREEDY)
        assert status == 200, answer
        assert answer["token_ids"] == expected


def test_a_cancelled_request_with_media_ends(server: TritonServer) -> None:
    requests = [
        GrpcRequest(server, text_input=f"{IMAGE} What?", image=[encoded(picture(1000, 900, seed))], stream=True)
        for seed in range(8)
    ]
    time.sleep(0.05)
    for request in requests:
        request.cancel()
    for request in requests:
        request.result()
    status, _ = http_generate(server, text_input="still there?", **GREEDY)
    assert status == 200


def test_the_example_client(server: TritonServer, model: Path) -> None:
    question = "What shapes are in the picture, and of which colors?"
    over_grpc = example("image_question.py", "grpc", f"localhost:{server.grpc_port}", "--placeholder", IMAGE)
    over_http = example("image_question.py", "http", f"http://localhost:{server.http_port}")
    assert over_grpc.startswith(f"{IMAGE}\n{question}") and len(over_grpc) > len(IMAGE + question) + 20
    assert over_http.strip() and example("image_question.py", "offline", str(model)).strip()
