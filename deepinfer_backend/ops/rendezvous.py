"""Where the ranks of a world find each other: a file if they are on one machine, else a port of the first one's."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from deepinfer_backend.errors import ConfigError
from deepinfer_backend.rank_place import RankPlace

_FOREVER = timedelta(days=3650)
_CONNECT_TIMEOUT = timedelta(seconds=5)
_RETRY_S = 0.5
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR


def open_store(place: RankPlace) -> Store:
    """The first rank makes it; the others wait for that, for as long as it takes.

    Raises:
        ConfigError: the first rank's machine does not have the rendezvous's address or port.
    """
    address = urlsplit(place.rendezvous)
    if address.scheme == "file":
        _use_interface("lo")
        return FileStore(address.path, place.world_size)
    assert address.hostname is not None and address.port is not None
    if place.world_rank == 0:
        return _make_store(address.hostname, address.port)
    return connect_to_store(address.hostname, address.port)


def _make_store(host: str, port: int) -> Store:
    _use_interface(_interface_towards(host))
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=_FOREVER)
    except RuntimeError as error:
        raise ConfigError(f"master_addr is {host} and master_port {port}: this machine cannot listen there") from error


def connect_to_store(host: str, port: int) -> Store:
    while True:
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)
        except RuntimeError:  # nobody is there yet
            time.sleep(_RETRY_S)
            continue
        store.set_timeout(_FOREVER)
        _use_interface(_interface_towards(host))
        return store


def _use_interface(name: str) -> None:
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)


def _interface_towards(host: str) -> str:
    """The network interface through which this machine reaches another one, or has the address itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own_address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe.fileno(), _GET_INTERFACE_ADDRESS, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == own_address:
                return name
    raise ConfigError(f"master_addr is {host}: no network interface of this machine leads there")
