"""Engines in processes of their own: `ChildEngineClient` starts one, `AttachedEngineClient` shares another's."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq

from deepinfer_backend._core import RequestOutput
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineOutputs, sort_out_failures
from deepinfer_backend.engine.engine_info_file import write_engine_info
from deepinfer_backend.engine.engine_link import follow, point_to, remove_if_it_leads_to
from deepinfer_backend.engine.messages import (
    AbortRequests,
    AbortSequences,
    AddRequest,
    Attach,
    Detach,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineRequest,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
    decode_from_engine,
    encode,
)
from deepinfer_backend.errors import ConfigError, EngineDeadError, EngineError, UnavailableError
from deepinfer_backend.rank_place import RankPlace

_CLOSE_TIMEOUT_S = 2.0
_READY_POLL_S = 1.0
_ATTACH_POLL_S = 0.1
_LAST_WORDS_TIMEOUT_MS = 1000
_REQUESTS, _OUTPUTS, _RENDEZVOUS = "requests", "outputs", "ranks"

_attachment_numbers = itertools.count(1)


class _RemoteEngineClient:
    """An EngineClient over two Unix sockets: the engine's, which all its clients send to, and this client's own."""

    info: EngineInfo

    def __init__(self, client_id: str, requests_folder: Path, outputs_folder: Path) -> None:
        self._client_id = client_id
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        self._send_lock = threading.Lock()  # guards _requests and _is_closed: any thread may send
        self._is_closed = False
        for socket in (self._requests, self._outputs):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._requests_address = f"ipc://{requests_folder}/{_REQUESTS}"
        self._outputs_address = f"ipc://{outputs_folder}/{_OUTPUTS}"
        self._outputs.bind(self._outputs_address)
        self._requests.connect(self._requests_address)
        self._poller = zmq.Poller()
        self._poller.register(self._outputs, zmq.POLLIN)
        self._exited: int | None = None  # a pidfd of the engine, once it is known

    def add_request(self, request: EngineRequest) -> None:
        media = request.media
        self._send(
            AddRequest(
                self._client_id,
                request.request_id,
                request.prompt_token_ids.tobytes(),
                request.sampling_params.model_dump(exclude_unset=True),
                request.priority,
                request.bad_words_token_ids,
                request.embedding,
                request.queue_timeout_s,
                request.arrival_s,
                request.prompted,
                None if media is None else media.without_contents(),
            ),
            [] if media is None else [medium.data for medium in media.media],
        )

    def abort_requests(self, request_ids: list[str]) -> None:
        self._send(AbortRequests(request_ids))

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        self._send(AbortSequences(sequences))

    def forget_request(self, request_id: str) -> None:
        """The engine knows when it has ended."""

    def get_outputs(self, timeout_s: float) -> EngineOutputs | None:
        match self._receive(timeout_s):
            case None:
                return None
            case StepOutputs(results, outputs, stats):
                return sort_out_failures(RequestOutput.unpack(outputs) if outputs else [], results, stats)
            case EngineFailed(message):
                raise EngineDeadError(message)
            case unexpected:
                raise EngineError(f"unexpected message {type(unexpected).__name__} from the engine")

    def _watch(self, process_id: int) -> None:
        """From here on the end of that process is an EngineDeadError."""
        try:
            self._exited = os.pidfd_open(process_id)
        except ProcessLookupError:
            raise EngineDeadError("the engine process has ended") from None
        self._poller.register(self._exited, zmq.POLLIN)

    def _send(self, message: ToEngine, contents: Sequence[bytes] = ()) -> None:
        data = encode(message)
        with self._send_lock:
            if self._is_closed or self._has_ended():
                raise EngineDeadError("the engine process has ended")
            self._requests.send_multipart([data, *contents])

    def _has_ended(self) -> bool:
        poller = zmq.Poller()
        poller.register(self._exited, zmq.POLLIN)
        return bool(poller.poll(0))

    def _receive(self, timeout_s: float) -> FromEngine | None:
        """The next message; what a process sent before it ended still arrives."""
        ready = dict(self._poller.poll(int(timeout_s * 1e3)))
        if self._outputs in ready or (ready and self._outputs.poll(0)):
            return decode_from_engine(self._outputs.recv())
        if ready:
            raise EngineDeadError(self._describe_end())
        return None

    def _describe_end(self) -> str:
        return "the engine process ended"

    def _say_last(self, message: ToEngine) -> bool:
        """Sends it and lets nobody send after it; false if that was done before."""
        with self._send_lock:
            if self._is_closed:
                return False
            self._is_closed = True
            # An engine that failed has let go of its socket, and is about to end by itself.
            with suppress(zmq.Again):
                self._requests.send(encode(message), zmq.NOBLOCK)
        return True

    def _close_sockets(self, linger_ms: int) -> None:
        if self._exited is not None:
            os.close(self._exited)
        self._context.destroy(linger=linger_ms)


class ChildEngineClient(_RemoteEngineClient):
    """The engine in a child process, so that a crash in it can be answered for. Others may attach to it.

    Owns the process, the folder with its sockets, and the pipe whose end ends the child.

    Raises (constructor):
        EngineError: the engine could not start; the message is its own.
        ConfigError: there are fewer devices than ranks.
    """

    def __init__(
        self, config: EngineConfig, link: Path | None = None, rank: int = 0, rendezvous: Path | None = None
    ) -> None:
        """`link`: where others find the engine, see `AttachedEngineClient`; by default nobody does. `rank`: which of
        `data_parallel_size` engines this is; `rendezvous`: where it meets the others, if they are in lockstep.
        """
        environment = _child_environment(config, rank)
        # Requests without a seed must not draw the same numbers on every rank.
        config = config.model_copy(update={"seed": (config.seed + rank) % 2**64})
        folder = self._folder = Path(tempfile.mkdtemp(prefix="deepinfer-"))
        self._link = link
        super().__init__("owner", folder, folder)
        self._process = subprocess.Popen(
            [
                _python(),
                "-m",
                "deepinfer_backend.engine.engine_loop",
                self._requests_address,
                self._outputs_address,
                self._client_id,
            ],
            stdin=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        try:
            self._watch(self._process.pid)
            place = _place(config, rank, rendezvous or folder / _RENDEZVOUS)
            lines = [config.model_dump_json(), json.dumps(place), json.dumps(rank)]
            self._process.stdin.write("".join(f"{line}\n" for line in lines).encode())
            self._process.stdin.flush()
            self.info = self._wait_until_ready()
            write_engine_info(folder, self.info)
            if link is not None:
                point_to(link, folder)
        except BrokenPipeError:
            self.close()
            raise EngineError("the engine process ended before it was ready; its log says why") from None
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Ends an engine that is stuck; first it shows where, in its log."""
        self._process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_TIMEOUT_S)
        self._process.kill()

    def close(self) -> None:
        if not self._say_last(Shutdown()):
            return
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._close_sockets(linger_ms=0)
        if self._link is not None:
            remove_if_it_leads_to(self._link, self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_ready(self) -> EngineInfo:
        while True:
            match self._receive(_READY_POLL_S):
                case None:
                    continue
                case EngineReady(info):
                    return info
                case EngineFailed(message):
                    raise EngineError(message)
                case unexpected:
                    raise EngineError(f"unexpected message {type(unexpected).__name__} from the engine")

    def _describe_end(self) -> str:
        return f"the engine process ended with status {self._process.wait()}"


class AttachedEngineClient(_RemoteEngineClient):
    """An engine that another process has started, where `link` leads.

    What this client asks for ends with it; the engine's end is its owner's business.

    Raises (constructor):
        UnavailableError: there is no engine that is ready within `timeout_s`.
    """

    def __init__(self, link: Path, client_name: str, timeout_s: float) -> None:
        """`client_name`: for the logs, any."""
        deadline_s = time.monotonic() + timeout_s
        engine_folder = _wait_for_engine(link, deadline_s)
        self._folder = Path(tempfile.mkdtemp(prefix="deepinfer-client-"))
        client_id = f"{client_name}-{os.getpid()}-{next(_attachment_numbers)}"
        super().__init__(client_id, engine_folder, self._folder)
        try:
            self._requests.send(encode(Attach(client_id, self._outputs_address, os.getpid())))
            self.info = self._wait_until_attached(deadline_s)
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """Nothing: its owner sees what this client sees."""

    def close(self) -> None:
        if self._say_last(Detach(self._client_id)):
            self._close_sockets(linger_ms=0 if self._exited is None else _LAST_WORDS_TIMEOUT_MS)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_attached(self, deadline_s: float) -> EngineInfo:
        while time.monotonic() < deadline_s:
            match self._receive(_ATTACH_POLL_S):
                case EngineReady(info, process_id):
                    self._watch(process_id)
                    return info
        raise _no_engine_to_share()


def _wait_for_engine(link: Path, deadline_s: float) -> Path:
    while (folder := follow(link)) is None:
        if time.monotonic() > deadline_s:
            raise _no_engine_to_share()
        time.sleep(_ATTACH_POLL_S)
    return folder


def _no_engine_to_share() -> UnavailableError:
    return UnavailableError("there is no engine to share: the model that owns it is not ready", reason="engine")


def _python() -> str:
    """This environment's interpreter; inside Triton's stub `sys.executable` need not be one."""
    if Path(sys.executable).name.startswith("python"):
        return sys.executable
    candidates = [Path(sys.prefix) / "bin" / "python3", Path(sysconfig.get_path("scripts")) / "python3"]
    return next((str(path) for path in candidates if path.exists()), "python3")


def _place(config: EngineConfig, rank: int, rendezvous: Path) -> dict[str, Any] | None:
    """As the engine reads it; None if it works alone."""
    num_engines = config.data_parallel_size if config.data_parallel_lockstep else 1
    if num_engines == config.tensor_parallel_size == 1:
        return None
    data_rank = rank if config.data_parallel_lockstep else 0
    address = f"file://{rendezvous}" if config.nnodes == 1 else f"tcp://{config.master_addr}:{config.master_port}"
    return asdict(RankPlace(data_rank, num_engines, 0, config.tensor_parallel_size, address))


def _child_environment(config: EngineConfig, rank: int) -> dict[str, str]:
    package_parent = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search_path, "PYTHONUTF8": "1"}
    if config.num_processes > 1:
        _give_share(environment, config, rank)
    return environment


def _give_share(environment: dict[str, str], config: EngineConfig, rank: int) -> None:
    """Of the machine's cores, and the engine's devices of those that are visible."""
    num_cores, num_processes = len(os.sched_getaffinity(0)), config.num_processes
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_processes)))
    visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if visible and num_processes > len(visible):
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size} and tensor_parallel_size "
            f"{config.tensor_parallel_size}: they need {num_processes} devices, and {len(visible)} are visible"
        )
    size = config.num_local_ranks
    devices = (visible or [str(index) for index in range(num_processes)])[rank * size : (rank + 1) * size]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
