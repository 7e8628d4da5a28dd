"""EngineClient: one engine as its callers see it, in this process or in a child process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq

from deepinfer_backend._core import FinishReason, RequestOutput
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.messages import (
    AbortRequests,
    AbortSequences,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineRequest,
    EngineStats,
    FromEngine,
    RequestFailed,
    RequestResult,
    Shutdown,
    StepOutputs,
    ToEngine,
    decode_from_engine,
    encode,
)
from deepinfer_backend.errors import ERRORS_BY_WORD, DeepInferError, EngineDeadError, EngineError

_CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One request failed; no output of it follows."""

    request_id: str
    error: DeepInferError


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """What one round of the engine brought: outputs in order, failures, and its counters afterwards.

    `results`: what belongs to a request besides its tokens; to be read before `outputs`.
    """

    outputs: list[RequestOutput]
    failures: list[RequestFailure]
    stats: EngineStats | None
    results: list[RequestResult] = field(default_factory=list)


class EngineClient(Protocol):
    """What stands between an engine and whatever serves it.

    `add_request` and the aborts may be called from any thread; `get_outputs` from one.
    """

    info: EngineInfo

    def add_request(self, request: EngineRequest) -> None:
        """Raises EngineDeadError when the engine has ended, InvalidRequestError when it refuses at once."""

    def abort_requests(self, request_ids: list[str]) -> None:
        """No output of these comes out of a later round. Unknown ids are ignored."""

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        """The same for single sequences of requests: (request id, sequence index)."""

    def get_outputs(self, timeout_s: float) -> EngineOutputs | None:
        """The next round's outputs, or None when there were none within `timeout_s`.

        Raises:
            EngineDeadError: the engine ended; every request in it is lost.
        """

    def close(self) -> None:
        """Ends the engine and frees what it held; safe to call twice."""


def _sort_out_failures(
    outputs: list[RequestOutput], results: list[RequestResult], stats: EngineStats | None
) -> EngineOutputs:
    failures = [
        RequestFailure(result.request_id, ERRORS_BY_WORD.get(result.word, EngineError)(result.message))
        for result in results
        if isinstance(result, RequestFailed)
    ]
    if failures:
        results = [result for result in results if not isinstance(result, RequestFailed)]
    # One failure per request, however many of its sequences were in the step.
    ids_in_failed_step = {output.request_id for output in outputs if output.finish_reason == FinishReason.ERROR}
    if ids_in_failed_step:
        outputs = [output for output in outputs if output.request_id not in ids_in_failed_step]
        error = EngineError("a step of the engine failed; its log has the traceback")
        failures += [RequestFailure(request_id, error) for request_id in ids_in_failed_step]
    return EngineOutputs(outputs, failures, stats, results)


class InprocEngineClient:
    """The engine in this process; `get_outputs` is one round of it, run by the caller's thread.

    For one thread only: the one that calls owns the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        from deepinfer_backend.engine.llm_engine import LLMEngine

        self.engine = LLMEngine(config)
        self.info = self.engine.info

    def add_request(self, request: EngineRequest) -> None:
        self.engine.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.engine.abort_request(request_ids)

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        self.engine.abort_sequences(sequences)

    def get_outputs(self, timeout_s: float) -> EngineOutputs | None:
        """One step while anything is unfinished, else the flush."""
        engine = self.engine
        handles = engine.step() if engine.has_unfinished_requests() else engine.flush_inflight_reqs()
        return _sort_out_failures(engine.request_output_pool.clone(handles), engine.take_results(), None)

    def close(self) -> None:
        self.engine.close()


class ChildEngineClient:
    """The engine in a child process, so that a crash in it can be answered for.

    Owns the process, two Unix sockets in a private folder, and the pipe whose end ends the child.

    Raises (constructor):
        EngineError: the engine could not start; the message is its own.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._folder = tempfile.mkdtemp(prefix="deepinfer-")
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        self._send_lock = threading.Lock()  # guards _requests and _is_closed: any thread may send
        self._is_closed = False
        addresses = [f"ipc://{self._folder}/{name}" for name in ("requests", "outputs")]
        for socket, address in zip((self._requests, self._outputs), addresses, strict=True):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        self._process = subprocess.Popen(
            [_python(), "-m", "deepinfer_backend.engine.engine_loop", *addresses],
            stdin=subprocess.PIPE,
            env=_child_environment(),
        )
        self._exited = os.pidfd_open(self._process.pid)
        self._poller = zmq.Poller()
        self._poller.register(self._outputs, zmq.POLLIN)
        self._poller.register(self._exited, zmq.POLLIN)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(config.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()
            self.info = self._wait_until_ready()
        except BrokenPipeError:
            self.close()
            raise EngineError("the engine process ended before it was ready; its log says why") from None
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def add_request(self, request: EngineRequest) -> None:
        self._send(
            AddRequest(
                request.request_id,
                request.prompt_token_ids.tobytes(),
                request.sampling_params.model_dump(exclude_unset=True),
                request.priority,
                request.bad_words_token_ids,
                request.embedding,
            )
        )

    def abort_requests(self, request_ids: list[str]) -> None:
        self._send(AbortRequests(request_ids))

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        self._send(AbortSequences(sequences))

    def get_outputs(self, timeout_s: float) -> EngineOutputs | None:
        match self._receive(timeout_s):
            case None:
                return None
            case StepOutputs(results, outputs, stats):
                return _sort_out_failures(RequestOutput.unpack(outputs), results, stats)
            case EngineFailed(message):
                raise EngineDeadError(message)
            case unexpected:
                raise EngineError(f"unexpected message {type(unexpected).__name__} from the engine")

    def close(self) -> None:
        with self._send_lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._process.poll() is None:
                # One that failed has let go of the socket, and is about to end by itself.
                with suppress(zmq.Again):
                    self._requests.send(encode(Shutdown()), zmq.NOBLOCK)
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._exited)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_ready(self) -> EngineInfo:
        while True:
            match self._receive(timeout_s=1.0):
                case None:
                    continue
                case EngineReady(info):
                    return info
                case EngineFailed(message):
                    raise EngineError(message)
                case unexpected:
                    raise EngineError(f"unexpected message {type(unexpected).__name__} from the engine")

    def _send(self, message: ToEngine) -> None:
        data = encode(message)
        with self._send_lock:
            if self._is_closed or self._process.poll() is not None:
                raise EngineDeadError("the engine process has ended")
            self._requests.send(data)

    def _receive(self, timeout_s: float) -> FromEngine | None:
        """The next message; what a process sent before it ended still arrives."""
        ready = dict(self._poller.poll(int(timeout_s * 1e3)))
        if self._outputs in ready or (ready and self._outputs.poll(0)):
            return decode_from_engine(self._outputs.recv())
        if ready:
            raise EngineDeadError(f"the engine process ended with status {self._process.wait()}")
        return None


def _python() -> str:
    """This environment's interpreter; inside Triton's stub `sys.executable` need not be one."""
    if Path(sys.executable).name.startswith("python"):
        return sys.executable
    candidates = [Path(sys.prefix) / "bin" / "python3", Path(sysconfig.get_path("scripts")) / "python3"]
    return next((str(path) for path in candidates if path.exists()), "python3")


def _child_environment() -> dict[str, str]:
    package_parent = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": search_path, "PYTHONUTF8": "1"}


__all__ = [
    "ChildEngineClient",
    "EngineClient",
    "EngineOutputs",
    "InprocEngineClient",
    "RequestFailure",
]
