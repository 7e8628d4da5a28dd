"""Test clients that see every message: one gRPC stream per request, read by a thread of its own; and HTTP."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from deepinfer_backend.triton.model_config import INPUTS
from deepinfer_backend.triton.server import TritonServer

_DATATYPES = {spec.name: spec.data_type.removeprefix("TYPE_").replace("STRING", "BYTES") for spec in INPUTS}


@dataclass(frozen=True)
class Response:
    """One message of a stream; `outputs`: the values of every tensor in it, by name."""

    outputs: dict[str, list[Any]]
    is_final: bool
    error: str | None

    @property
    def text(self) -> str:
        """Of the only sequence."""
        return str(self.outputs.get("text_output", [""])[0])

    @property
    def token_ids(self) -> list[int]:
        return self.outputs.get("token_ids", [])

    @property
    def finish_reason(self) -> str | None:
        """Of the only sequence."""
        reasons: list[str | None] = self.outputs.get("finish_reason", [None])
        return reasons[0]


class GrpcRequest:
    """One request; `responses` grows as messages arrive. The stream is read to its very end, past the FINAL."""

    def __init__(
        self,
        server: TritonServer,
        *,
        model: str = "deepinfer",
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        outputs: list[str] | None = None,
        timeout_s: float = 100.0,
        shapes: dict[str, list[int]] | None = None,
        **inputs: Any,
    ) -> None:
        """`inputs`: tensors by name; JSON may be a dict or a list of them. The finish reason is asked for."""
        self.responses: list[Response] = []
        self.end_s: float | None = None
        self.rpc_error: grpc.RpcError | None = None
        self._first = threading.Event()
        inputs = {"return_finish_reason": True, **inputs}
        message = build_message(model, request_id, parameters or {}, outputs or [], shapes or {}, inputs)
        self._channel = grpc.insecure_channel(f"localhost:{server.grpc_port}")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(iter([message]), timeout=timeout_s)
        self._thread = threading.Thread(target=self._read, name=f"grpc-request-{request_id}", daemon=True)
        self._thread.start()

    def wait_first(self, timeout_s: float = 60.0) -> None:
        """Until the first message has come."""
        assert self._first.wait(timeout_s), "no response"

    def cancel(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        """As a client that dies: the connection goes, without a word."""
        self._channel.close()

    def result(self, timeout_s: float = 100.0) -> list[Response]:
        """All messages, once the server has ended the stream."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream has no end; so far: {self.responses[-3:]}"
        return self.responses

    def _read(self) -> None:
        try:
            for message in self._call:
                self.responses.append(read_message(message))
                self._first.set()
        except grpc.RpcError as error:
            self.rpc_error = error
        finally:
            self.end_s = time.monotonic()
            self._first.set()
            self._channel.close()


def stream_text(responses: list[Response]) -> str:
    """The joined text of a stream that ended well: exactly one FINAL, on the last response, which has the reason."""
    assert [response.error for response in responses if response.error] == []
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert [response.finish_reason for response in responses[:-1]] == ["None"] * (len(responses) - 1)
    assert responses[-1].finish_reason in ("stop", "length")
    return "".join(response.text for response in responses)


def stream_error(responses: list[Response]) -> str:
    """The error of a stream that failed: the last message, and nothing after it."""
    assert responses, "the stream ended without any message"
    assert [response.error for response in responses[:-1]] == [None] * (len(responses) - 1)
    assert not any(response.is_final for response in responses[:-1])
    assert responses[-1].error is not None
    return responses[-1].error


def http_generate(server: TritonServer, *, model: str = "deepinfer", timeout_s: float = 60.0, **body: Any) -> Any:
    """(status, decoded answer) of /generate."""
    return http_post(server, f"/v2/models/{model}/generate", json.dumps(body).encode(), timeout_s)


def http_post(server: TritonServer, path: str, data: bytes, timeout_s: float = 60.0) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://localhost:{server.http_port}{path}", data, timeout=timeout_s) as response:
            answer = response.read()
            return response.status, json.loads(answer) if answer else None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def http_stream(server: TritonServer, *, timeout_s: float = 60.0, **body: Any) -> list[dict[str, Any]]:
    """All events of /generate_stream."""
    url = f"http://localhost:{server.http_port}/v2/models/deepinfer/generate_stream"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=timeout_s) as response:
        lines = response.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def build_message(
    model: str,
    request_id: str,
    parameters: dict[str, Any],
    outputs: list[str],
    shapes: dict[str, list[int]],
    inputs: dict[str, Any],
) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    message.outputs.extend(service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs)
    for name, value in inputs.items():
        datatype = _DATATYPES[name]
        values = [value] if not isinstance(value, list) or isinstance(next(iter(value), None), dict) else value
        tensor = message.inputs.add(name=name, datatype=datatype, shape=shapes.get(name, [len(values)]))
        match datatype:
            case "BYTES":
                tensor.contents.bytes_contents.extend(_to_bytes(each) for each in values)
            case "INT32":
                tensor.contents.int_contents.extend(values)
            case "BOOL":
                tensor.contents.bool_contents.extend(values)
    return message


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, dict | list):
        return json.dumps(value).encode()
    return value if isinstance(value, bytes) else str(value).encode()


def read_message(message: Any) -> Response:
    response = message.infer_response
    return Response(
        outputs={
            output.name: _values(output.datatype, raw)
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        },
        is_final=response.parameters["triton_final_response"].bool_param,
        error=message.error_message or None,
    )


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return [text.decode() for text in deserialize_bytes_tensor(raw)]
    values: list[Any] = np.frombuffer(raw, dtype=triton_to_np_dtype(datatype)).tolist()
    return values
