"""The four ways in which clients of Triton's vLLM backend ask, each with a client that others wrote."""

from __future__ import annotations

import asyncio
import json
import queue
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from deepinfer_backend.triton.server import TritonServer

TIMEOUT_S = 100.0

Outputs = dict[str, list[Any]]
"""The values of every tensor in one response, by name."""


class RequestFailed(Exception):
    """The server's message; `before` it came these responses."""

    def __init__(self, message: str, before: list[Outputs]) -> None:
        super().__init__(message)
        self.before = before


def grpc_stream(server: TritonServer, model: str, inputs: dict[str, Any], parameters: dict[str, Any]) -> list[Outputs]:
    """tritonclient's gRPC stream with a callback."""
    messages: queue.Queue[tuple[Any, Any]] = queue.Queue()
    responses: list[Outputs] = []
    with triton.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: messages.put((result, error)), stream_timeout=TIMEOUT_S)
        client.async_stream_infer(model, _tensors(triton, inputs), parameters=parameters)
        while True:
            result, error = messages.get(timeout=TIMEOUT_S)
            if error is not None:
                client.stop_stream(cancel_requests=True)
                raise RequestFailed(str(error), responses)
            responses.append(_read(result))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return responses


def grpc_asyncio(server: TritonServer, model: str, inputs: dict[str, Any], parameters: dict[str, Any]) -> list[Outputs]:
    """tritonclient's gRPC stream with asyncio."""
    responses: list[Outputs] = []

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": _tensors(triton_aio, inputs), "parameters": parameters}

    async def ask() -> None:
        async with triton_aio.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
            async for result, error in client.stream_infer(requests(), stream_timeout=TIMEOUT_S):
                if error is not None:
                    raise error
                responses.append(_read(result))

    try:
        asyncio.run(ask())
    except InferenceServerException as error:
        raise RequestFailed(str(error), responses) from None
    return responses


def http_generate(
    server: TritonServer, model: str, inputs: dict[str, Any], parameters: dict[str, Any]
) -> list[Outputs]:
    """POST …/generate: one answer in JSON."""
    return [_from_json(_post(server, f"/v2/models/{model}/generate", {**inputs, **parameters}))]


def http_stream(server: TritonServer, model: str, inputs: dict[str, Any], parameters: dict[str, Any]) -> list[Outputs]:
    """POST …/generate_stream: server-sent events."""
    text = _post(server, f"/v2/models/{model}/generate_stream", {**inputs, **parameters})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    responses: list[Outputs] = []
    for event in events:
        if "error" in json.loads(event):
            raise RequestFailed(json.loads(event)["error"], responses)
        responses.append(_from_json(event))
    return responses


Protocol = Callable[[TritonServer, str, dict[str, Any], dict[str, Any]], list[Outputs]]
"""Asks the model with these input tensors and request parameters, for all responses in order."""

PROTOCOLS: tuple[Protocol, ...] = (grpc_stream, grpc_asyncio, http_generate, http_stream)
STREAMING_PROTOCOLS: tuple[Protocol, ...] = (grpc_stream, grpc_asyncio, http_stream)


def _tensors(client: Any, inputs: dict[str, Any]) -> list[Any]:
    """Truth values are BOOL, everything else is text; a list is a tensor of several elements."""
    tensors = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        is_bool = isinstance(values[0], bool)
        tensor = client.InferInput(name, [len(values)], "BOOL" if is_bool else "BYTES")
        data = values if is_bool else [text.encode() for text in values]
        tensor.set_data_from_numpy(np.array(data, dtype=bool if is_bool else np.object_))
        tensors.append(tensor)
    return tensors


def _read(result: Any) -> Outputs:
    outputs: Outputs = {}
    for output in result.get_response().outputs:
        values = result.as_numpy(output.name).tolist()
        outputs[output.name] = [value.decode() if isinstance(value, bytes) else value for value in values]
    return outputs


def _post(server: TritonServer, path: str, body: dict[str, Any]) -> str:
    url = f"http://localhost:{server.http_port}{path}"
    try:
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=TIMEOUT_S) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            raise RequestFailed(_error_message(error.read().decode()), []) from None


def _error_message(body: str) -> str:
    """Of /generate it is the body, of /generate_stream an event."""
    return str(json.loads(body.strip().removeprefix("data: "))["error"])


def _from_json(text: str) -> Outputs:
    """Triton writes a tensor of one element as that element."""
    answer = json.loads(text)
    return {
        name: value if isinstance(value, list) else [value]
        for name, value in answer.items()
        if name not in ("model_name", "model_version", "id")
    }
