"""Whether ranks on other machines are still there: a cable that was pulled says nothing, and waits for ever."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable

import zmq
from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_PORT_KEY = "heartbeat_port"


def answer_heartbeats(store: Store, host: str, ranks: Iterable[int]) -> None:
    """The first rank's part: from here on this process ends if one of these is silent for 5 s, once it was heard.

    host: the address, of this machine, at which they reach it.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port(f"tcp://{host}")
    store.set(_PORT_KEY, str(port))
    threading.Thread(target=_answer, args=(socket, set(ranks)), name="deepinfer-heartbeats", daemon=True).start()


def send_heartbeats(store: Store, host: str, rank: int) -> None:
    """Any other rank's part: from here on this process ends if the first rank is silent for 5 s."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, str(rank).encode())
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 1000)
    socket.connect(f"tcp://{host}:{int(store.get(_PORT_KEY))}")
    threading.Thread(target=_send, args=(socket,), name="deepinfer-heartbeats", daemon=True).start()


def _answer(socket: zmq.Socket[bytes], ranks: set[int]) -> None:
    heard_s: dict[int, float] = {}
    while True:
        if socket.poll(round(_INTERVAL_S * 1e3)):
            identity, *_ = socket.recv_multipart()
            if identity.isdigit() and int(identity) in ranks:
                heard_s[int(identity)] = time.monotonic()
                socket.send_multipart([identity, b""], zmq.NOBLOCK)
        for rank, last_s in heard_s.items():
            if time.monotonic() - last_s > _TIMEOUT_S:
                _end(f"rank {rank}, on another machine,")


def _send(socket: zmq.Socket[bytes]) -> None:
    heard_s = time.monotonic()
    while True:
        if socket.poll(0, zmq.POLLOUT):
            socket.send(b"", zmq.NOBLOCK)
        if socket.poll(round(_INTERVAL_S * 1e3)):
            socket.recv()
            heard_s = time.monotonic()
            time.sleep(_INTERVAL_S)
        if time.monotonic() - heard_s > _TIMEOUT_S:
            _end("the first rank's machine")


def _end(who: str) -> None:
    logger.error("%s has been silent for %g s: this process cannot go on", who, _TIMEOUT_S)
    sys.stderr.flush()
    os._exit(1)
