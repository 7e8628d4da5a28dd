"""One engine on two machines: Triton and the leader here, the other rank in a network namespace of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError
from deepinfer_backend.triton.server import TritonServer
from tests.support.known_answer import expected_answer, is_idle, known_answer, start_long_streams
from tests.support.processes import children_of
from tests.support.tiny_text_model import make_tiny_text_model
from tests.support.triton_client import stream_error
from tests.support.triton_server import free_ports, running_server, wait_until

ANSWERED_LIMIT_S = 10.0
SERVES_AGAIN_LIMIT_S = 90.0
OWN_ADDRESS, OTHER_ADDRESS = "10.213.77.1", "10.213.77.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)


@dataclass(frozen=True)
class OtherMachine:
    """A network namespace at the other end of a cable."""

    name: str
    cable: str

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command])

    def pull_cable(self) -> None:
        ip("link", "set", self.cable, "down")

    def plug_cable_in(self) -> None:
        ip("link", "set", self.cable, "up")


@contextmanager
def other_machine() -> Iterator[OtherMachine]:
    name, cable, far_end = f"deepinfer-{os.getpid()}", f"di{os.getpid()}a", f"di{os.getpid()}b"
    with ExitStack() as stack:
        try:
            ip("netns", "add", name)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("a network namespace needs root and iproute2")
        stack.callback(ip, "netns", "del", name)
        ip("link", "add", cable, "type", "veth", "peer", "name", far_end, "netns", name)
        ip("addr", "add", f"{OWN_ADDRESS}/24", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "addr", "add", f"{OTHER_ADDRESS}/24", "dev", far_end)
        for device in (far_end, "lo"):
            ip("-n", name, "link", "set", device, "up")
        yield OtherMachine(name, cable)


@dataclass(frozen=True)
class Served:
    server: TritonServer
    other: OtherMachine
    torchrun: subprocess.Popen[bytes]
    known: list[int]

    def wait_until_it_serves(self) -> None:
        wait_until(lambda: known_answer(self.server) == self.known, SERVES_AGAIN_LIMIT_S, "it serves")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    model, (port,) = make_tiny_text_model(tmp_path), free_ports(1)
    known = expected_answer(model)
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 2**27,
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "master_addr": OWN_ADDRESS,
        "master_port": port,
    }
    with other_machine() as other:
        torchrun = other.run(
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
            *("--max-restarts", "1000000", "-m", "deepinfer_backend.worker.remote_rank"),
            *("--node-rank", "1", "--master-addr", OWN_ADDRESS, "--master-port", str(port)),
        )
        try:
            with running_server(tmp_path, {"deepinfer": arguments}) as server:
                yield Served(server, other, torchrun, known)
        finally:
            torchrun.terminate()
            torchrun.wait(60)


@pytest.mark.timeout(400)
def test_a_pulled_cable_is_noticed_and_all_is_back_with_it(served: Served) -> None:
    served.wait_until_it_serves()
    for pulled_s in (0.0, 15.0):  # noticed while it is out, or by both ends only then
        requests = start_long_streams(served.server, 8)
        requests[0].wait_first()
        served.other.pull_cable()
        start_s = time.monotonic()
        for request in requests:
            assert stream_error(request.result(ANSWERED_LIMIT_S)).startswith(("INTERNAL: ", "UNAVAILABLE: "))
        print(f"answered {time.monotonic() - start_s:.1f} s after the cable was pulled")
        time.sleep(pulled_s)
        served.other.plug_cable_in()
        start_s = time.monotonic()
        served.wait_until_it_serves()
        print(f"serves {time.monotonic() - start_s:.1f} s after it was plugged in")
    wait_until(lambda: is_idle(served.server), 5, "nothing is left")


@pytest.mark.timeout(400)
def test_a_rank_of_the_other_machine_that_is_killed_is_started_again(served: Served) -> None:
    served.wait_until_it_serves()
    requests = start_long_streams(served.server, 4)
    requests[0].wait_first()
    (rank,) = children_of(served.torchrun.pid)
    os.kill(rank, signal.SIGKILL)
    for request in requests:
        assert stream_error(request.result(ANSWERED_LIMIT_S)).startswith(("INTERNAL: ", "UNAVAILABLE: "))
    served.wait_until_it_serves()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 3, "master_addr": "a"}, "tensor_parallel_size, 3, must be a multiple"),
        ({"tensor_parallel_size": 2}, "master_addr must say where"),
        ({"tensor_parallel_size": 2, "master_addr": "a", "data_parallel_size": 2}, "data_parallel_size must be 1"),
    ],
)
def test_layouts_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"nnodes is 2: {message}"):
        EngineConfig(nnodes=2, **arguments)
