"""The engine process's clients, or other engines: a socket to each, and when one has ended."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass

import zmq

from deepinfer_backend.engine.messages import BlockContents, FetchBlocks, FromEngine, encode

OWNER_INDEX = 0  # the first to be added: the parent, without which the process ends


@dataclass(frozen=True, slots=True)
class _Client:
    index: int
    socket: zmq.Socket[bytes]
    process: int  # a pidfd


class ClientSockets:
    """Owns the sockets to the clients. Used by the engine's one thread.

    A client's index is never given to another one. Sending to one that is gone does nothing.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._clients: dict[str, _Client] = {}
        self._by_index: dict[int, _Client] = {}
        self._num_added = 0
        self._poll = select.poll()  # of the clients' processes

    def add(self, client_id: str, outputs_address: str, process_id: int) -> int:
        """Returns the client's index; raises ProcessLookupError when it has ended already."""
        process = os.pidfd_open(process_id)
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(outputs_address)
        client = _Client(self._num_added, socket, process)
        self._num_added += 1
        self._poll.register(process, select.POLLIN)
        self._clients[client_id] = self._by_index[client.index] = client
        return client.index

    def remove(self, client_id: str) -> list[int]:
        """Returns what was the client's index; none if it is unknown."""
        client = self._clients.pop(client_id, None)
        if client is None:
            return []
        del self._by_index[client.index]
        self._poll.unregister(client.process)
        client.socket.close(linger=0)
        os.close(client.process)
        return [client.index]

    def remove_dead(self) -> list[int]:
        """Removes clients whose processes have ended; returns their indices. Cheap enough for every step."""
        dead = {process for process, _ in self._poll.poll(0)}
        if not dead:
            return []
        client_ids = [client_id for client_id, client in self._clients.items() if client.process in dead]
        return [index for client_id in client_ids for index in self.remove(client_id)]

    def index_of(self, client_id: str) -> int | None:
        client = self._clients.get(client_id)
        return None if client is None else client.index

    def __contains__(self, client_index: int) -> bool:
        return client_index in self._by_index

    def send(self, client_index: int, message: FromEngine | FetchBlocks) -> None:
        client = self._by_index.get(client_index)
        if client is not None:
            client.socket.send(encode(message))

    def send_contents(self, client_index: int, message: BlockContents, content: memoryview) -> None:
        """content: must not change any more."""
        client = self._by_index.get(client_index)
        if client is not None:
            client.socket.send(encode(message), zmq.SNDMORE)
            client.socket.send(content, copy=False)

    def send_all(self, message: FromEngine) -> None:
        for client_index in list(self._by_index):
            self.send(client_index, message)
