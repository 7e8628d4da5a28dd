"""How a frontend notices that its server shuts down or unloads its model: this process plays the server."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepinfer_backend.triton import shutdown_signal
from deepinfer_backend.triton.listeners import ListenerFinder
from deepinfer_backend.triton.shutdown_signal import Ending, ShutdownSignal


class HttpEndpoint:
    """Answers every connection, until it is told to close them without a word."""

    def __init__(self) -> None:
        self.is_answering = True
        self.status = "200 OK"
        self.request_line = b""
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
                self.request_line = connection.recv(1024).split(b"\r\n")[0]
                if self.is_answering:
                    connection.sendall(f"HTTP/1.1 {self.status}\r\n\r\n".encode())

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


def make_signal(
    *, server_pid: int | None = None, drain_file: Path | None = None, is_available: Callable[[], bool] = lambda: True
) -> ShutdownSignal:
    return ShutdownSignal(
        os.getpid() if server_pid is None else server_pid,
        drain_file,
        model_name="m/odel",
        model_version="3",
        is_available=is_available,
    )


def look(signal: ShutdownSignal, *, is_busy: bool = True) -> list[Ending]:
    return [signal.look(LONG_AGO_S if is_busy else None) for _ in range(3)]


NOTHING, MODEL, SERVER = Ending.NOTHING, Ending.MODEL, Ending.SERVER
LONG_AGO_S = 0.0


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_listeners_of_a_process_are_found_with_an_address_that_reaches_them(host: str) -> None:
    finder = ListenerFinder(os.getpid())
    with socket.create_server((host, 0)) as listening:
        port = listening.getsockname()[1]
        for _ in range(3):
            assert [listener.host for listener in finder.find() if listener.port == port] == ["127.0.0.1"]
    assert port not in {listener.port for listener in finder.find()}


def test_a_socket_that_listens_later_is_found() -> None:
    finder = ListenerFinder(os.getpid())
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
        assert port not in {listener.port for listener in finder.find()}
        opened.listen()
        assert port in {listener.port for listener in finder.find()}


def test_the_launchers_file_is_a_sign(tmp_path: Path) -> None:
    signal = make_signal(drain_file=tmp_path / "drain")
    assert look(signal) == [NOTHING] * 3
    (tmp_path / "drain").touch()
    assert look(signal) == [SERVER] * 3


def test_a_listener_that_closes_is_a_sign(endpoint: HttpEndpoint) -> None:
    signal = make_signal()
    assert look(signal, is_busy=False) == [NOTHING] * 3
    endpoint.close()
    assert look(signal, is_busy=False) == [NOTHING, SERVER, SERVER]


@pytest.mark.parametrize("status", ["200 OK", "403 Forbidden"])
def test_connections_that_are_closed_without_an_answer_are_a_sign(endpoint: HttpEndpoint, status: str) -> None:
    signal = make_signal()
    endpoint.status = status
    assert look(signal) == [NOTHING] * 3
    endpoint.is_answering = False
    assert look(signal) == [NOTHING, SERVER, SERVER]


def test_one_connection_without_an_answer_is_chance(endpoint: HttpEndpoint) -> None:
    signal = make_signal()
    for is_answering in (True, False, True, False, True):
        endpoint.is_answering = is_answering
        assert signal.look(LONG_AGO_S) is NOTHING


def test_a_listener_that_never_spoke_http_is_no_sign(endpoint: HttpEndpoint) -> None:
    endpoint.is_answering = False
    assert look(make_signal()) == [NOTHING] * 3


def test_a_server_that_is_not_ours_to_look_at_is_no_sign(tmp_path: Path) -> None:
    signal = make_signal(server_pid=2**22 + 1, drain_file=tmp_path / "drain")  # above the highest pid
    assert look(signal) == [NOTHING] * 3


def test_a_model_that_is_no_longer_ready_is_being_unloaded(endpoint: HttpEndpoint) -> None:
    signal = make_signal()
    assert look(signal) == [NOTHING] * 3
    assert endpoint.request_line == b"GET /v2/models/m%2Fodel/versions/3/ready HTTP/1.0"
    endpoint.status = "400 Bad Request"
    assert look(signal) == [NOTHING, MODEL, MODEL]
    endpoint.status = "200 OK"
    assert look(signal) == [MODEL] * 3, "what is ready now is the next load of the model"
    endpoint.close()
    assert look(signal) == [MODEL, SERVER, SERVER]


def test_an_idle_model_learns_whom_to_ask_and_then_does_not(endpoint: HttpEndpoint) -> None:
    """Its first request may run when the unload begins; no request of an idle one can be cut off."""
    signal = make_signal()
    endpoint.status = "400 Bad Request"
    assert look(signal, is_busy=False) == [NOTHING] * 3, "not loaded yet"
    endpoint.status = "200 OK"
    look(signal, is_busy=False)
    endpoint.status = "400 Bad Request"
    assert look(signal, is_busy=False) == [NOTHING] * 3
    assert look(signal) == [NOTHING, MODEL, MODEL]


def test_who_knows_the_model_is_asked_alone(endpoint: HttpEndpoint) -> None:
    signal = make_signal()
    other = HttpEndpoint()
    other.status = "404 Not Found"
    look(signal)
    endpoint.request_line = other.request_line = b""
    look(signal)
    assert (bool(endpoint.request_line), other.request_line) == (True, b"")
    other.close()


def test_readiness_that_needs_a_key_is_no_sign(endpoint: HttpEndpoint) -> None:
    endpoint.status = "403 Forbidden"
    assert look(make_signal()) == [NOTHING] * 3


def test_a_model_that_is_not_ready_by_its_own_word_is_not_being_unloaded(endpoint: HttpEndpoint) -> None:
    """Newer Tritons ask the model itself, which says no while its engine restarts."""
    is_available = True
    signal = make_signal(is_available=lambda: is_available)
    look(signal)
    is_available = False
    endpoint.status = "400 Bad Request"
    assert look(signal) == [NOTHING] * 3
    is_available = True
    assert look(signal) == [NOTHING, MODEL, MODEL]


def test_a_request_that_arrives_shows_that_the_model_is_not_being_unloaded(endpoint: HttpEndpoint) -> None:
    signal = make_signal()
    look(signal)
    endpoint.status = "400 Bad Request"
    assert look(signal)[-1] is MODEL
    endpoint.status = "200 OK"
    assert signal.look(time.monotonic()) is NOTHING
    assert look(signal) == [NOTHING] * 3


def test_a_model_that_has_just_loaded_learns_at_once_whom_to_ask(
    endpoint: HttpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal = make_signal()
    endpoint.status = "400 Bad Request"
    monkeypatch.setattr(shutdown_signal, "_LISTENER_INTERVAL_S", 3600.0)
    look(signal, is_busy=False)
    endpoint.status, endpoint.request_line = "200 OK", b""
    look(signal, is_busy=False)
    assert endpoint.request_line, "it asks in each round"
    endpoint.request_line = b""
    look(signal)
    assert not endpoint.request_line, "once it knows, it asks each interval"
