"""A process of its own for work that can take long, take much or crash: asked over its standard input and output.

Frames are a length (4 bytes, little endian) and as many bytes. The process ends when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from typing import IO

_FRAME_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 2**20


def read_frame(stream: IO[bytes]) -> bytes:
    """For the process itself: the next question; b"" when there will be none."""
    header = stream.read(_FRAME_LENGTH.size)
    if len(header) < _FRAME_LENGTH.size:
        return b""
    return stream.read(_FRAME_LENGTH.unpack(header)[0])


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """For the process itself: its answer."""
    stream.write(_FRAME_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def take_over_output() -> IO[bytes]:
    """For the process itself: where answers go; whatever a library prints goes to standard error from here on."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def describe_exit(code: int) -> str:
    """A process's end in words, by its `returncode`."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"


class HelperProcess:
    """One such process. Belongs to one thread, but any thread may `kill` it."""

    def __init__(self, module: str) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # A process group of its own, to end it with its forks. Ctrl-C is for the engine, which then closes this.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):  # the most that a user may have can be less
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIECE_BYTES)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes, timeout_s: float) -> bytearray:
        """Sends a question and waits for the answer.

        Raises:
            TimeoutError: there is none in time.
            EOFError: the process has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        self._write(_FRAME_LENGTH.pack(len(question)), deadline_s)
        self._write(question, deadline_s)
        (length,) = _FRAME_LENGTH.unpack(self._read(_FRAME_LENGTH.size, deadline_s))
        return self._read(length, deadline_s)

    def kill(self) -> None:
        """With the forks that it may have."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> str:
        """Ends it, if it has not ended, and says how it did. Not while another thread asks."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.kill()
        code = self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        return describe_exit(code)

    def _write(self, data: bytes, deadline_s: float) -> None:
        rest = memoryview(data)
        try:
            while rest:
                _wait(self._input, select.POLLOUT, deadline_s)
                with contextlib.suppress(BlockingIOError):
                    rest = rest[os.write(self._input, rest[:_PIECE_BYTES]) :]
        except BrokenPipeError:
            raise EOFError from None

    def _read(self, num_bytes: int, deadline_s: float) -> bytearray:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            _wait(self._output, select.POLLIN, deadline_s)
            num_read = os.readv(self._output, [rest])
            if not num_read:
                raise EOFError
            rest = rest[num_read:]
        return data


def _wait(file: int, event: int, deadline_s: float) -> None:
    poller = select.poll()
    poller.register(file, event)
    if not poller.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        raise TimeoutError
