"""Clients that ask for a stream and do not read it: over gRPC, and over HTTP as server-sent events."""

from __future__ import annotations

import json
import socket
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_client import Response, build_message, read_message

_MAX_UNREAD_BYTES = 4096


class SilentGrpcClient:
    """One gRPC stream of which nothing is read until `read_all`: the server may send as much as its window takes."""

    def __init__(self, server: TritonServer, *, timeout_s: float = 200.0, **inputs: Any) -> None:
        options = [
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _MAX_UNREAD_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(f"localhost:{server.grpc_port}", options=options)
        message = build_message("deepinfer", "", {}, [], {}, {"stream": True, **inputs})
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(iter([message]), timeout=timeout_s)

    def read_all(self) -> list[Response]:
        with self._channel:
            return [read_message(message) for message in self._call]

    def leave(self) -> None:
        self._channel.close()


class SilentHttpClient:
    """One /generate_stream of which nothing is read until `read_all`."""

    def __init__(self, server: TritonServer, *, timeout_s: float = 200.0, **body: Any) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MAX_UNREAD_BYTES)
        self._socket.settimeout(timeout_s)
        self._socket.connect(("127.0.0.1", server.http_port))
        data = json.dumps({"stream": True, **body}).encode()
        head = (
            "POST /v2/models/deepinfer/generate_stream HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + data)

    def read_all(self) -> list[dict[str, Any]]:
        """The events."""
        with self._socket, self._socket.makefile("rb") as stream:
            lines = [line for line in stream if line.startswith(b"data: ")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    def leave(self) -> None:
        self._socket.close()
