"""How a frontend notices that its server shuts down: this process plays the server."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_backend.triton import shutdown_signal
from deepinfer_backend.triton.listeners import find_listeners
from deepinfer_backend.triton.shutdown_signal import ShutdownSignal


class HttpEndpoint:
    """Answers every connection, until it is told to close them without a word."""

    def __init__(self) -> None:
        self.is_answering = True
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(1024)
                if self.is_answering:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()


@pytest.fixture
def endpoint() -> Iterator[HttpEndpoint]:
    opened = HttpEndpoint()
    yield opened
    if opened._thread.is_alive():
        opened.close()


@pytest.fixture(autouse=True)
def check_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown_signal, "_LISTENER_INTERVAL_S", 0.0)


def look(signal: ShutdownSignal, *, is_busy: bool = True) -> list[bool]:
    return [signal.is_set(is_busy=is_busy) for _ in range(3)]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_listeners_of_a_process_are_found_with_an_address_that_reaches_them(host: str) -> None:
    with socket.create_server((host, 0)) as listening:
        port = listening.getsockname()[1]
        assert [listener.host for listener in find_listeners(os.getpid()) if listener.port == port] == ["127.0.0.1"]
    assert port not in {listener.port for listener in find_listeners(os.getpid())}


def test_the_launchers_file_is_a_sign(tmp_path: Path) -> None:
    signal = ShutdownSignal(os.getpid(), tmp_path / "drain")
    assert not any(look(signal))
    (tmp_path / "drain").touch()
    assert all(look(signal))


def test_a_listener_that_closes_is_a_sign(endpoint: HttpEndpoint) -> None:
    signal = ShutdownSignal(os.getpid(), None)
    assert not any(look(signal, is_busy=False))
    endpoint.close()
    assert look(signal, is_busy=False) == [False, True, True]


def test_connections_that_are_closed_without_an_answer_are_a_sign(endpoint: HttpEndpoint) -> None:
    signal = ShutdownSignal(os.getpid(), None)
    assert not any(look(signal))
    endpoint.is_answering = False
    assert look(signal) == [False, True, True]


def test_one_connection_without_an_answer_is_chance(endpoint: HttpEndpoint) -> None:
    signal = ShutdownSignal(os.getpid(), None)
    for is_answering in (True, False, True, False, True):
        endpoint.is_answering = is_answering
        assert not signal.is_set(is_busy=True)


def test_a_listener_that_never_spoke_http_is_no_sign(endpoint: HttpEndpoint) -> None:
    endpoint.is_answering = False
    assert not any(look(ShutdownSignal(os.getpid(), None)))


def test_a_server_that_is_not_ours_to_look_at_is_no_sign(tmp_path: Path) -> None:
    signal = ShutdownSignal(2**22 + 1, tmp_path / "drain")  # above the highest pid
    assert not any(look(signal))
