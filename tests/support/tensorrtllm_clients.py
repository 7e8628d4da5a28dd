"""The ways in which clients of Triton's TensorRT-LLM backend ask, each with a client that others wrote."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from deepinfer_backend.triton.model_config import TensorSpec
from deepinfer_backend.triton.server import TritonServer
from deepinfer_backend.triton.tensorrtllm.tensors import (
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    TENSORRT_LLM_BLS,
)
from tests.support.vllm_clients import TIMEOUT_S, Outputs, RequestFailed
from tests.support.vllm_clients import http_generate as post_generate
from tests.support.vllm_clients import http_stream as post_generate_stream

_SPECS: dict[str, TensorSpec] = {
    spec.name: spec
    for model in (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE, TENSORRT_LLM_BLS)
    for spec in model.inputs
}
# What Triton adds to an ensemble's answer over HTTP.
_TRITONS_OWN = ("sequence_id", "sequence_start", "sequence_end")

Protocol = Callable[[TritonServer, str, dict[str, Any]], list[Outputs]]
"""Asks the model with these input tensors for all responses in order; each output is a flat list of its values."""


class GrpcStream:
    """One request of tritonclient's gRPC stream; `next` gives its responses one by one, as arrays, FINAL and all."""

    def __init__(
        self,
        server: TritonServer,
        model: str,
        inputs: dict[str, Any],
        *,
        request_id: str = "",
        outputs: list[str] | None = None,
        parameters: dict[str, Any] | None = None,
        priority: int = 0,
        timeout_us: int | None = None,
    ) -> None:
        self._messages: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = triton.InferenceServerClient(f"localhost:{server.grpc_port}")
        self._client.start_stream(lambda result, error: self._messages.put((result, error)), stream_timeout=TIMEOUT_S)
        self._client.async_stream_infer(
            model,
            make_tensors(triton, inputs),
            outputs=None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs],
            request_id=request_id,
            parameters=parameters or {},
            priority=priority,
            timeout=timeout_us,
            enable_empty_final_response=True,
        )

    def next(self) -> tuple[dict[str, NDArray[Any]], bool]:
        """(arrays by name, whether it is the last); raises RequestFailed."""
        result, error = self._messages.get(timeout=TIMEOUT_S)
        if error is not None:
            raise RequestFailed(str(error), [])
        response = result.get_response()
        arrays = {output.name: result.as_numpy(output.name) for output in response.outputs}
        return arrays, response.parameters["triton_final_response"].bool_param

    def rest(self) -> list[dict[str, NDArray[Any]]]:
        """All that follow; without the last if it is empty."""
        responses = []
        is_final = False
        while not is_final:
            arrays, is_final = self.next()
            if arrays:
                responses.append(arrays)
        return responses

    def close(self, *, cancel: bool = False) -> None:
        """`cancel`: cancels the request, as a client that has had enough."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def grpc_stream(server: TritonServer, model: str, inputs: dict[str, Any]) -> list[Outputs]:
    """tritonclient's gRPC stream with a callback."""
    stream = GrpcStream(server, model, inputs)
    try:
        return [flat(arrays) for arrays in stream.rest()]
    finally:
        stream.close()


def grpc_asyncio(server: TritonServer, model: str, inputs: dict[str, Any]) -> list[Outputs]:
    """tritonclient's gRPC stream with asyncio."""
    responses: list[Outputs] = []

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": make_tensors(triton_aio, inputs)}

    async def ask() -> None:
        async with triton_aio.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
            async for result, error in client.stream_infer(requests(), stream_timeout=TIMEOUT_S):
                if error is not None:
                    raise error
                arrays = {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
                if arrays:
                    responses.append(flat(arrays))

    try:
        asyncio.run(ask())
    except InferenceServerException as error:
        raise RequestFailed(str(error), responses) from None
    return responses


def http_generate(server: TritonServer, model: str, inputs: dict[str, Any]) -> list[Outputs]:
    """POST …/generate: one answer in JSON."""
    return [_without_tritons_own(response) for response in post_generate(server, model, inputs, {})]


def http_stream(server: TritonServer, model: str, inputs: dict[str, Any]) -> list[Outputs]:
    """POST …/generate_stream: server-sent events."""
    return [_without_tritons_own(response) for response in post_generate_stream(server, model, inputs, {})]


PROTOCOLS: tuple[Protocol, ...] = (grpc_stream, grpc_asyncio, http_generate, http_stream)
STREAMING_PROTOCOLS: tuple[Protocol, ...] = (grpc_stream, grpc_asyncio, http_stream)


def infer(server: TritonServer, model: str, inputs: dict[str, Any], *, is_grpc: bool) -> dict[str, NDArray[Any]]:
    """A unary request; arrays by name. Raises RequestFailed."""
    library, port = (triton, server.grpc_port) if is_grpc else (triton_http, server.http_port)
    try:
        with library.InferenceServerClient(f"localhost:{port}") as client:
            result = client.infer(model, make_tensors(library, inputs))
    except InferenceServerException as error:
        raise RequestFailed(str(error), []) from None
    response = result.get_response()
    names = [each.name for each in response.outputs] if is_grpc else [each["name"] for each in response["outputs"]]
    return {name: result.as_numpy(name) for name in names}


def make_tensors(library: Any, inputs: dict[str, Any]) -> list[Any]:
    """Of the types that the models declare, with a batch dimension; a value that is no array or list is one element."""
    tensors = []
    for name, value in inputs.items():
        datatype = _SPECS[name].data_type.removeprefix("TYPE_").replace("STRING", "BYTES")
        if datatype == "BYTES":
            array = np.array(_bytes(value), dtype=np.object_)
        else:
            array = np.array(value, dtype=triton_to_np_dtype(datatype))
        num_dims = len(_SPECS[name].dims) + 1
        array = array.reshape((1,) * (num_dims - array.ndim) + array.shape)
        tensor = library.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def flat(arrays: dict[str, NDArray[Any]]) -> Outputs:
    return {
        name: [value.decode() if isinstance(value, bytes) else value for value in array.ravel().tolist()]
        for name, array in arrays.items()
    }


def _bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_bytes(each) for each in value]
    return value.encode() if isinstance(value, str) else value


def _without_tritons_own(response: Outputs) -> Outputs:
    return {name: values for name, values in response.items() if name not in _TRITONS_OWN}
