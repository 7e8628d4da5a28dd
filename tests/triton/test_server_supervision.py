"""`deepinfer serve` when a model's process or the server dies: every client sees an error, then it serves again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend.errors import EngineError
from deepinfer_backend.triton import restart_budget, server_supervisor
from deepinfer_backend.triton.frontend_registry import FrontendEntry, find_dead_frontends
from deepinfer_backend.triton.model_config import write_model_repository
from deepinfer_backend.triton.restart_budget import RestartBudget
from deepinfer_backend.triton.server import TritonServer
from deepinfer_backend.triton.server_supervisor import ServerSupervisor
from tests.support.models import make_random_model
from tests.support.triton_client import GrpcRequest, http_generate
from tests.support.triton_server import START_TIMEOUT_S, free_ports, running_processes, wait_until

ARGUMENTS = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 200_000_000}
MAX_POSITIONS = 65_536
ENDLESS: dict[str, Any] = {"max_tokens": 60_000, "ignore_eos": True}
ANSWER_LIMIT_S = 3.0
EXIT_LIMIT_S = 15.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose requests may run for minutes."""
    folder = make_random_model("llama", tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MAX_POSITIONS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Launcher:
    """A `deepinfer serve`; `server` has its addresses."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        http_port, grpc_port, metrics_port = free_ports(3)
        self.server = TritonServer(folder, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
        # Not below `folder`: paths of sockets have to be short.
        self.temporary_folder = Path(tempfile.mkdtemp(prefix="di", dir="/tmp"))
        self._output, self._log = folder / "output", folder / "log"
        ports = ["--http-port", http_port, "--grpc-port", grpc_port, "--metrics-port", metrics_port]
        command = [sys.executable, "-c", "from deepinfer_backend.cli import main; main()", "serve", *arguments]
        with self._output.open("w") as output, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *map(str, ports)],
                stdout=output,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self.temporary_folder)},
            )
        self._seen: set[int] = set()

    def wait_ready(self) -> None:
        self._wait_for("Ctrl-C", self._output)

    def wait_for(self, text: str) -> None:
        """Until `text` is in the log."""
        self._wait_for(text, self._log)

    def _wait_for(self, text: str, file: Path) -> None:
        wait_until(
            lambda: text in file.read_text(errors="replace") or self._process.poll() is not None, START_TIMEOUT_S, text
        )
        assert self._process.poll() is None, self.log()[-3000:]

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def process_ids(self) -> dict[int, str]:
        """Everything that it has started and that runs, with its command line."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents[int(folder.name)] = (int(fields[1]), (folder / "cmdline").read_text(errors="replace"))
            except OSError:
                continue
        found = {self._process.pid: ""}
        while more := {pid: line for pid, (parent, line) in parents.items() if parent in found and pid not in found}:
            found |= more
        del found[self._process.pid]
        self._seen |= found.keys()
        return found

    def find(self, program: str) -> int:
        """The process id of "tritonserver" or of "triton_python_backend_stub"."""
        [pid] = [pid for pid, line in self.process_ids().items() if line.split("\0")[0].endswith(f"/{program}")]
        return pid

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_end(self) -> int:
        """Its exit status; nothing of what it started may be left."""
        status = self._process.wait(EXIT_LIMIT_S)
        wait_until(lambda: not running_processes(sorted(self._seen)), 2, "no process is left")
        assert list(self.temporary_folder.iterdir()) == []
        assert list(Path("/dev/shm").glob(f"deepinfer{self._process.pid}x*")) == []
        return status

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.temporary_folder)


@contextmanager
def launched(folder: Path, *arguments: str) -> Iterator[Launcher]:
    launcher = Launcher(folder, *arguments)
    try:
        launcher.wait_ready()
        yield launcher
    finally:
        launcher.kill()


def as_options(arguments: dict[str, object]) -> list[str]:
    return [
        part
        for name, value in arguments.items()
        for part in (["--" + name.replace("_", "-")] + ([] if value is True else [str(value)]))
    ]


class EndlessGenerate(threading.Thread):
    """One /generate that has no answer for minutes."""

    def __init__(self, server: TritonServer) -> None:
        super().__init__(name="endless-generate", daemon=True)
        self._server = server
        self.error: Exception | None = None
        self.end_s: float | None = None
        self.start()

    def run(self) -> None:
        try:
            http_generate(self._server, input_ids=[5], **ENDLESS)
        except (OSError, HTTPException) as error:
            self.error = error
        self.end_s = time.monotonic()


def start_requests(server: TritonServer) -> tuple[list[GrpcRequest], EndlessGenerate]:
    """Five requests that run."""
    generate = EndlessGenerate(server)
    streams = [GrpcRequest(server, input_ids=[n], sampling_parameters=ENDLESS, stream=True) for n in range(5, 9)]
    for stream in streams:
        stream.wait_first()
    return streams, generate


def check_answered(streams: list[GrpcRequest], generate: EndlessGenerate, killed_s: float) -> None:
    for stream in streams:
        stream.result(timeout_s=ANSWER_LIMIT_S)
        assert stream.rpc_error is not None, "the stream ended as if all were well"
        assert stream.end_s is not None and stream.end_s - killed_s < ANSWER_LIMIT_S
    generate.join(ANSWER_LIMIT_S)
    assert generate.error is not None and generate.end_s is not None
    assert not isinstance(generate.error, urllib.error.HTTPError)
    assert generate.end_s - killed_s < ANSWER_LIMIT_S


def generates(server: TritonServer, model: str = "deepinfer") -> bool:
    status, answer = http_generate(server, model=model, input_ids=[5], max_tokens=2)
    return status == 200 and len(answer["token_ids"]) == 2


@pytest.mark.parametrize("victim", ["triton_python_backend_stub", "tritonserver"])
def test_a_death_is_answered_within_seconds_and_served_again_as_often_as_agreed(
    tiny: Path, tmp_path: Path, victim: str
) -> None:
    arguments = as_options({**ARGUMENTS, "max_engine_restarts": 1})
    with launched(tmp_path, "--model", str(tiny), *arguments) as launcher:
        streams, generate = start_requests(launcher.server)
        before = launcher.process_ids().keys()
        os.kill(launcher.find(victim), signal.SIGKILL)
        killed_s = time.monotonic()
        check_answered(streams, generate, killed_s)
        launcher.wait_for("serving again")
        print(f"serving again {time.monotonic() - killed_s:.1f} s after the death")
        assert generates(launcher.server)
        assert not running_processes(sorted(before))
        assert launcher.log().count("running requests were cut off") == 1

        streams, generate = start_requests(launcher.server)
        os.kill(launcher.find(victim), signal.SIGKILL)
        killed_s = time.monotonic()
        check_answered(streams, generate, killed_s)
        assert launcher.wait_end() == 1
        last_line = launcher.log().splitlines()[-1]
        assert last_line.startswith("error: ") and last_line.endswith("giving up after 1 restarts within 600 s")


def test_sigterm_while_it_restarts_ends_it(tiny: Path, tmp_path: Path) -> None:
    with launched(tmp_path, "--model", str(tiny), *as_options(ARGUMENTS)) as launcher:
        os.kill(launcher.find("triton_python_backend_stub"), signal.SIGKILL)
        launcher.wait_for("the server starts again")
        wait_until(lambda: any("engine_loop" in line for line in launcher.process_ids().values()), 60, "a new engine")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait_end() == 0


def test_an_existing_repository_is_served_as_it_stands(tiny: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_model_repository(repository, {"mine": {**ARGUMENTS, "model": str(tiny)}})
    (repository / "mine" / "config.pbtxt").write_text('backend: "python"\n', encoding="utf-8")
    before = shutil.copytree(repository, tmp_path / "before")
    with launched(tmp_path, "--model-repository", str(repository)) as launcher:
        assert generates(launcher.server, "mine")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait_end() == 0
    files = {path.relative_to(before): path.read_bytes() for path in before.rglob("*") if path.is_file()}
    for name, content in files.items():
        assert (repository / name).read_bytes() == content


def test_a_frontend_that_dies_is_told_from_one_that_closes(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from deepinfer_backend.triton.frontend_registry import FrontendEntry\n"
        "entry = FrontendEntry(Path(sys.argv[1]), sys.argv[2]); print('here', flush=True); sys.stdin.readline()"
    )
    own = FrontendEntry(tmp_path, "own")
    command = [sys.executable, "-c", script, str(tmp_path), "other"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "here\n"
        assert find_dead_frontends(tmp_path) == []
        other.kill()
        # A process that nobody has asked for its status yet is dead all the same.
        wait_until(lambda: not running_processes([other.pid]), 10, "it is dead")
        assert find_dead_frontends(tmp_path) == [("other", other.pid)]
    (tmp_path / str(other.pid)).unlink()
    own.remove()
    assert find_dead_frontends(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


class FailingServer(TritonServer):
    """One that has ended and does not start again until `num_failures` attempts have failed."""

    def __init__(self, num_failures: int) -> None:
        super().__init__(Path("unused"))
        self.num_failures = num_failures
        self.num_starts = 0

    def start(self) -> None:
        self.num_starts += 1

    def wait_ready(self, timeout_s: float) -> None:
        if self.num_starts <= self.num_failures:
            raise EngineError("tritonserver ended with status 7")

    def wait(self, timeout_s: float) -> int | None:
        if self.num_starts > self.num_failures:
            raise Served
        return 9

    def kill(self) -> None:
        pass


class Served(Exception):
    pass


@pytest.mark.parametrize("num_failures", [0, 2])
def test_a_server_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    monkeypatch.setattr(server_supervisor, "_FIRST_RETRY_DELAY_S", 0.001)
    server = FailingServer(num_failures)
    with pytest.raises(Served):
        ServerSupervisor(server, max_restarts=3, ready_timeout_s=1.0).run()
    assert server.num_starts == num_failures + 1


def test_failed_starts_count_as_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_supervisor, "_FIRST_RETRY_DELAY_S", 0.001)
    server = FailingServer(10)
    with pytest.raises(EngineError, match="status 7; giving up after 3 restarts"):
        ServerSupervisor(server, max_restarts=3, ready_timeout_s=1.0).run()
    assert server.num_starts == 3


def test_restarts_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = RestartBudget(2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    monkeypatch.setattr(restart_budget, "RESTART_WINDOW_S", 0.01)
    wait_until(budget.take, 5, "the window has passed")
    assert not RestartBudget(0).take()
