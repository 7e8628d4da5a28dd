"""Random HTTP requests for a model's generate endpoints, and a client that sends bytes as they are."""

from __future__ import annotations

import http.client
import json
import socket
import zlib
from dataclasses import dataclass
from random import Random
from typing import Any

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
    strange_value,
    to_bytes,
)
from tests.support.fuzz_answer import Answer

_MODEL = "/v2/models/deepinfer"
_PATHS = (*[f"{_MODEL}/generate"] * 10, *[f"{_MODEL}/generate_stream"] * 8, f"{_MODEL}/infer")
_STRANGE_PATHS = (
    f"{_MODEL}/versions/1/generate",
    f"{_MODEL}/versions/9/generate",
    f"{_MODEL}/versions/99999999999999999999/generate",
    f"{_MODEL}/versions/x/generate",
    f"{_MODEL}/generate/",
    f"{_MODEL}/generate?max_tokens=2",
    f"{_MODEL}/%00",
    f"{_MODEL}/../deepinfer/generate",
    "/v2/models/nobody/generate",
    "/v2/models//generate",
    "/v2/models/" + "x" * 3_000 + "/generate",
)
_STRANGE_HEADERS = (
    "Content-Encoding: gzip",
    "Content-Encoding: nonsense",
    "Accept-Encoding: gzip, deflate",
    "Content-Type: text/plain; charset=utf-16",
    "Inference-Header-Content-Length: 5",
    "Inference-Header-Content-Length: -1",
    "triton-request-id: \x01\x02",
    "Expect: 100-continue",
    "X: " + "y" * 5_000,
)
_WRONG_LENGTHS = ("-5", "abc", "", "9" * 30, "0x10", "1, 2")


@dataclass(frozen=True)
class HttpRequest:
    """What is sent, byte for byte. One whose frame is broken has a connection of its own, which the client then
    closes on its side, so that a server that waits for more sees that nothing comes."""

    data: bytes
    is_frame_broken: bool = False


def generate_request(fields: dict[str, Any]) -> HttpRequest:
    return _post(f"{_MODEL}/generate", json.dumps(fields).encode())


def random_http_request(random: Random) -> HttpRequest:
    body = _random_body(random)
    path = random.choice(_PATHS if random.random() < 0.97 else _STRANGE_PATHS)
    headers = [random.choice(_STRANGE_HEADERS)] if random.random() < 0.03 else []
    match random.randrange(100):
        case 0:
            return _post(path, body, headers, random.choice(_WRONG_LENGTHS), is_frame_broken=True)
        case 1:
            length = max(0, len(body) + random.choice([-10, -1, 1, 50, 10_000_000]))
            return _post(path, body, headers, str(length), is_frame_broken=True)
        case 2:
            data = mutated_bytes(random, _post(path, body, headers).data[:600])
            return HttpRequest(data, is_frame_broken=True)
        case 3:
            return _chunked(random, path, body)
        case 4:
            return _post(path, zlib.compress(body), ["Content-Encoding: deflate"])
    return _post(path, body, headers)


class HttpConnection:
    """One client's connection, opened again when the server has closed it. Used by one thread."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self._port = port
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None

    def ask(self, request: HttpRequest) -> Answer:
        """Raises TimeoutError if no answer comes."""
        if request.is_frame_broken:
            self.close()
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=self._timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket.sendall(request.data)
            if request.is_frame_broken:
                self._socket.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(self._socket)
            with response:
                response.begin()
                body = response.read()
        except TimeoutError:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Answer(error=f"{type(error).__name__}", is_refused_by_protocol=request.is_frame_broken)
        if request.is_frame_broken or response.will_close:
            self.close()
        return Answer(status=response.status, error=_error_of(body), outputs=body)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _post(
    path: str,
    body: bytes,
    headers: list[str] | None = None,
    content_length: str | None = None,
    *,
    is_frame_broken: bool = False,
) -> HttpRequest:
    length = str(len(body)) if content_length is None else content_length
    lines = [f"POST {path} HTTP/1.1", "Host: fuzz", *(headers or []), f"Content-Length: {length}", "", ""]
    return HttpRequest("\r\n".join(lines).encode("latin-1") + body, is_frame_broken)


def _chunked(random: Random, path: str, body: bytes) -> HttpRequest:
    cut = random.randrange(len(body) + 1)
    chunks = [chunk for chunk in (body[:cut], body[cut:]) if chunk]
    sizes = [format(len(chunk), "x") for chunk in chunks]
    is_broken = random.random() < 0.5
    if is_broken and sizes:
        sizes[-1] = random.choice(["zz", "-1", "ffffffffffffffff", "", "1"])
    data = "".join([f"POST {path} HTTP/1.1\r\nHost: fuzz\r\nTransfer-Encoding: chunked\r\n\r\n"]).encode()
    for size, chunk in zip(sizes, chunks, strict=True):
        data += size.encode() + b"\r\n" + chunk + b"\r\n"
    return HttpRequest(data + b"0\r\n\r\n", is_broken)


def _random_body(random: Random) -> bytes:
    match random.randrange(60):
        case 0:
            return random.randbytes(random.choice([0, 1, 20, 300]))
        case 1:
            return json_text(random, strange_value(random), random.randrange(3)).encode("utf-8", errors="replace")
        case 2:
            return to_bytes(nested_text(random))
        case 3 if random.random() < 0.3:
            return to_bytes(json_text(random, {"text_input": large_text(random)}))
        case 4:
            return _infer_body(random)
    fields = _random_fields(random)
    for _ in range(random.choice([0, 0, 0, 0, 0, 1, 1, 2])):
        fields = mutated(random, fields)
    body = to_bytes(json_text(random, fields, random.choice([0] * 14 + [1, 2])))
    return body if random.random() < 0.95 else mutated_bytes(random, body)


def _random_fields(random: Random) -> dict[str, Any]:
    """A body as a client might write it."""
    fields: dict[str, Any] = {}
    match random.randrange(8):
        case 0:
            fields["input_ids"] = [random.randrange(512) for _ in range(random.choice([1, 1, 5, 30]))]
        case 1:
            fields["messages"] = _inner_json(random, messages(random))
            if random.random() < 0.2:
                fields["tools"] = _inner_json(random, [{"type": "function", "function": {"name": "f"}}])
            if random.random() < 0.3:
                fields["chat_template_kwargs"] = _inner_json(random, {"add_generation_prompt": True, "a": 1})
        case 2:
            fields["embedding_request"] = _inner_json(random, embedding_request(random))
        case _:
            fields["text_input"] = random.choice(["a", "The sea is", "日本", "</s>x"])
    params = sampling_fields(random)
    if random.random() < 0.5:
        fields["sampling_parameters"] = _inner_json(random, params)
    else:
        fields.update((name, value) for name, value in params.items() if not isinstance(value, list | dict))
    for name in random.sample(FLAGS, random.choice([0, 0, 1, 4])):
        fields[name] = random.random() < 0.8
    if random.random() < 0.3:
        fields["stream"] = random.random() < 0.8
    return fields


def _inner_json(random: Random, value: Any) -> str:
    """As the text that a tensor holds; every other one is wrong in some way."""
    for _ in range(random.choice([0, 0, 1, 2])):
        value = mutated(random, value)
    return json_text(random, value, random.choice([0, 0, 0, 1])) if random.random() < 0.98 else nested_text(random)


def _infer_body(random: Random) -> bytes:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}
    text = json_text(random, mutated(random, {"inputs": [tensor]}))
    return to_bytes(text) + b"\x01\x00\x00\x00a"


def _error_of(body: bytes) -> str | None:
    """The error in an answer's JSON, or in a stream's last event; one that is neither is an error by itself."""
    text = body.decode("utf-8", errors="replace")
    try:
        content = json.loads(text.rstrip().rpartition("\ndata: ")[2].removeprefix("data: "), strict=False)
    except ValueError:
        return f"not JSON: {text[:200]}"
    error = content.get("error") if isinstance(content, dict) else None
    return None if error is None else str(error)
