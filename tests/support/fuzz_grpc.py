"""Random ModelStreamInfer messages, and a client that sends them as bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from random import Random
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from tests.support.fuzz import (
    FLAGS,
    embedding_request,
    json_text,
    large_text,
    messages,
    mutated,
    mutated_bytes,
    nested_text,
    sampling_fields,
    to_bytes,
    unexpected_name,
)
from tests.support.fuzz_answer import Answer

MODEL = "deepinfer"
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
# A stream has one deadline for all its messages; a new one from time to time keeps it far away.
_MESSAGES_PER_STREAM = 100

_DATATYPES = ("BYTES", "INT32", "BOOL", "FP32", "INT64", "UINT8", "FP16", "BF16", "", "int32", "TYPE_STRING", "X" * 500)
_DIMENSIONS = (-(2**63), -1, 0, 1, 2, 3, 64, 513, 2**31, 2**32, 2**61, 2**63 - 1)
_IDS = ("", "a", "a\nINTERNAL: b", "🌊" * 40, "x" * 20_000, "%s%n", "\x00", "../../etc", "1#2")
_OUTPUTS = ("text_output", "token_ids", "finish_reason", "logprobs", "nobody", "", "text_output", "OUTPUT0")


def generate_message(fields: dict[str, Any]) -> bytes:
    return bytes(_build(fields, "good").SerializeToString())


def random_grpc_message(random: Random) -> bytes:
    match random.randrange(50):
        case 0:
            return random.randbytes(random.choice([0, 1, 20, 300]))
        case 1 if random.random() < 0.3:
            return bytes(_build({"text_input": large_text(random)}, "large").SerializeToString())
    request = _build(_random_inputs(random), random.choice(_IDS))
    _add_parameters(random, request)
    for _ in range(random.choice([0, 0, 0, 0, 0, 1, 1, 2])):
        _mutate(random, request)
    data = bytes(request.SerializeToString())
    return data if random.random() < 0.95 else mutated_bytes(random, data)


class GrpcConnection:
    """One client's channel with one stream after another in it, a request at a time. Used by one thread."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_CHANNEL_OPTIONS)
        self._open_stream = self._channel.stream_stream(
            _METHOD, request_serializer=None, response_deserializer=service_pb2.ModelStreamInferResponse.FromString
        )
        self._timeout_s = timeout_s
        self._call: Any = None
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._num_messages = 0

    def ask(self, message: bytes) -> Answer:
        """Raises TimeoutError if no answer comes."""
        request = _parse(message)
        # In one stream with others, a message for a model that is not there may end tritonserver 2.51: see `test_fuzz`.
        is_alone = request is not None and (request.model_name != MODEL or request.model_version not in ("", "1"))
        if is_alone or self._num_messages >= _MESSAGES_PER_STREAM:
            self._end_stream()
        if self._call is None:
            self._messages = SimpleQueue()
            self._call = self._open_stream(_iterate(self._messages), timeout=self._timeout_s)
        self._num_messages = _MESSAGES_PER_STREAM if is_alone else self._num_messages + 1
        self._messages.put(message)
        outputs = b""
        try:
            for response in self._call:
                result = response.infer_response
                if response.error_message:
                    return Answer(error=response.error_message)
                outputs += result.id.encode() + b"".join(result.raw_output_contents)
                if result.parameters["triton_final_response"].bool_param:
                    return Answer(error=None, outputs=outputs)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(details) from None
        else:
            code, details = grpc.StatusCode.OK, "the stream ended"
        self._end_stream()
        return Answer(error=f"{code.name}: {details}", is_refused_by_protocol=request is None)

    def close(self) -> None:
        self._end_stream()
        self._channel.close()

    def _end_stream(self) -> None:
        """As a client that has nothing more to say: cancelling may end tritonserver 2.51 itself, see `test_fuzz`."""
        self._messages.put(None)
        if self._call is not None:
            with suppress(grpc.RpcError):
                extra = next(self._call, None)
                assert extra is None, f"a message that nobody asked for: {extra}"
        self._call = None
        self._num_messages = 0


def _iterate(queue: SimpleQueue[bytes | None]) -> Iterator[bytes]:
    while (message := queue.get()) is not None:
        yield message


def _parse(message: bytes) -> Any | None:
    """The ModelInferRequest, None if the bytes are none."""
    try:
        return service_pb2.ModelInferRequest.FromString(message)
    except DecodeError:
        return None


def _build(inputs: dict[str, Any], request_id: str) -> Any:
    """Texts and booleans as one element, lists as many."""
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
    for name, value in inputs.items():
        if isinstance(value, list):
            request.inputs.add(name=name, datatype="INT32", shape=[len(value)])
            request.raw_input_contents.append(struct.pack(f"<{len(value)}i", *value))
        elif isinstance(value, bool):
            request.inputs.add(name=name, datatype="BOOL", shape=[1])
            request.raw_input_contents.append(bytes([value]))
        else:
            data = value if isinstance(value, bytes) else value.encode()
            request.inputs.add(name=name, datatype="BYTES", shape=[1])
            request.raw_input_contents.append(struct.pack("<I", len(data)) + data)
    return request


def _random_inputs(random: Random) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    match random.randrange(8):
        case 0:
            inputs["input_ids"] = [
                random.choice([5, 511, 512, -1, 2**31 - 1]) for _ in range(random.choice([0, 1, 30]))
            ]
        case 1:
            inputs["messages"] = _inner_json(random, messages(random))
            if random.random() < 0.3:
                inputs["chat_template_kwargs"] = _inner_json(random, {"add_generation_prompt": True, "a": 1})
        case 2:
            inputs["embedding_request"] = _inner_json(random, embedding_request(random))
        case 3:
            inputs["text_input"] = random.randbytes(random.randrange(40))
        case _:
            inputs["text_input"] = random.choice(["a", "The sea is", "日本", "</s>x"])
    inputs["sampling_parameters"] = _inner_json(random, sampling_fields(random))
    for name in random.sample(FLAGS, random.choice([0, 0, 1, 4])):
        inputs[name] = random.random() < 0.8
    if random.random() < 0.3:
        inputs["stream"] = random.random() < 0.8
    return inputs


def _inner_json(random: Random, value: Any) -> bytes:
    for _ in range(random.choice([0, 0, 1, 2])):
        value = mutated(random, value)
    text = json_text(random, value, random.choice([0, 0, 0, 1])) if random.random() < 0.98 else nested_text(random)
    data = to_bytes(text)
    return data if random.random() < 0.9 else mutated_bytes(random, data)


def _add_parameters(random: Random, request: Any) -> None:
    if random.random() < 0.5:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    for _ in range(random.choice([0, 0, 0, 0, 1, 2])):
        _set_parameter(random, request.parameters[_name(random)])


def _name(random: Random) -> str:
    return unexpected_name(random).encode(errors="replace").decode()  # protobuf takes no halves of characters


def _set_parameter(random: Random, parameter: Any) -> None:
    match random.randrange(9):
        case 0:
            parameter.bool_param = random.random() < 0.5
        case 1 | 5:
            parameter.int64_param = random.choice([0, 1, -1, 10**6, 2**63 - 1, -(2**63)])
        case 2:
            parameter.uint64_param = random.choice([0, 1, 2**64 - 1])
        case 3:
            parameter.double_param = random.choice([0.5, -0.0, 1e308, float("nan"), float("inf")])
        case _:
            parameter.string_param = random.choice(["", "1", "NaN", "\x00", json.dumps({"a": 1}), "x" * 5_000])


def _mutate(random: Random, request: Any) -> None:
    """One change that leaves it a ModelInferRequest."""
    place = random.randrange(len(request.inputs)) if request.inputs else None
    tensor = None if place is None else request.inputs[place]
    raw = request.raw_input_contents
    match random.randrange(15):
        case 0 if tensor is not None:
            tensor.datatype = random.choice(_DATATYPES)
        case 1 | 2 if tensor is not None:
            del tensor.shape[:]
            tensor.shape.extend(random.choice(_DIMENSIONS) for _ in range(random.choice([0, 1, 1, 2, 3, 40])))
        case 3 if tensor is not None:
            tensor.name = random.choice([_name(random), "", "text_input", "input_ids", "stream", "\x00", "é"])
        case 4 | 5 if raw:
            index = random.randrange(len(raw))
            raw[index] = random.choice(
                [mutated_bytes(random, raw[index]), b"", raw[index] * 2, b"\xff\xff\xff\xff" + raw[index]]
            )
        case 6 if raw:
            del raw[random.randrange(len(raw))]
        case 7:
            raw.append(random.randbytes(random.choice([0, 1, 5])))
        case 8 if place is not None:
            del request.inputs[place]
            if len(raw) > place and random.random() < 0.5:
                del raw[place]
        case 9 if tensor is not None:
            request.inputs.add().CopyFrom(tensor)
            raw.append(raw[0] if raw else b"")
        case 10 if tensor is not None:
            if random.random() < 0.5:
                del raw[:]
            _fill_contents(random, tensor.contents)
        case 11:
            _add_output(random, request)
        case 12:
            request.model_name = random.choice(["", "nobody", "deepinfer\x00", "DEEPINFER", "x" * 3_000])
        case 13:
            request.model_version = random.choice(["1", "2", "-1", "x", "9" * 30])
        case 14 if tensor is not None:
            _set_parameter(
                random, tensor.parameters[random.choice(["shared_memory_region", "shared_memory_byte_size", "a"])]
            )


def _fill_contents(random: Random, contents: Any) -> None:
    match random.randrange(5):
        case 0:
            contents.bytes_contents.extend([b"a", b"\xff"][: random.randrange(3)])
        case 1:
            contents.int_contents.extend([1, -1, 2**31 - 1])
        case 2:
            contents.bool_contents.extend([True])
        case 3:
            contents.fp32_contents.extend([float("nan"), 1e30])
        case 4:
            contents.int64_contents.extend([5] * random.choice([1, 1000]))


def _add_output(random: Random, request: Any) -> None:
    output = request.outputs.add(name=random.choice(_OUTPUTS))
    if random.random() < 0.3:
        name = random.choice(["classification", "shared_memory_region", "binary_data", "a"])
        _set_parameter(random, output.parameters[name])
