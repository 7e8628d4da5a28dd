"""The TCP sockets on which a process listens, read from /proc."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"


class Listener(NamedTuple):
    """An address that reaches the socket from here, and the socket's inode."""

    host: str
    port: int
    inode: int


class ListenerFinder:
    """Finds the listeners of one process again and again.

    The kernel's tables take 2 ms each to read, however few connections there are, so they are read only while the
    process has sockets that it had not at the last two calls: one that is new may begin to listen a moment later.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last_inodes: set[int] = set()
        self._known_inodes: set[int] = set()  # of the last two calls
        self._listeners: set[Listener] = set()

    def find(self) -> set[Listener]:
        """Raises OSError for a process that is gone or is not ours to look at."""
        inodes = _socket_inodes(self._pid)
        if inodes <= self._known_inodes:
            self._listeners = {listener for listener in self._listeners if listener.inode in inodes}
        else:
            self._listeners = _find_listeners(self._pid, inodes)
        self._known_inodes, self._last_inodes = inodes & self._last_inodes, inodes
        return self._listeners


def _find_listeners(pid: int, inodes: set[int]) -> set[Listener]:
    listeners = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                address, state, inode = fields[1], fields[3], int(fields[9])
                if state == _LISTEN and inode in inodes:
                    host, _, port = address.partition(":")
                    listeners.add(Listener(_reachable(host, family), int(port, 16), inode))
    return listeners


def _socket_inodes(pid: int) -> set[int]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            kind, _, rest = os.readlink(descriptor).partition(":[")
            if kind == "socket":
                inodes.add(int(rest.removesuffix("]")))
    return inodes


def _reachable(hex_host: str, family: socket.AddressFamily) -> str:
    """The host of a /proc/net table (little-endian words); a socket on all addresses is reached by loopback."""
    words = [bytes.fromhex(hex_host[start : start + 8])[::-1] for start in range(0, len(hex_host), 8)]
    host = b"".join(words)
    if any(host):
        return socket.inet_ntop(family, host)
    return "127.0.0.1" if family == socket.AF_INET else "::1"
