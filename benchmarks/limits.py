"""What the machine itself can do: bytes a second from memory, operations a second in matrix products.

Memory is read by a C function of a few lines, compiled for this machine when it is first needed, on as many threads as
the engines get, in each of the ways that kernels read; matrix products are torch's, of a size at which they are at
their best.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("read_memory.c")
_LINE_BYTES = 64
_LINES_AT_ONCE = 8  # read_lines takes multiples of it
# Streams of a thread, and how many bytes ahead they are fetched: which one is fastest differs between machines, and
# from one to several threads.
_WAYS_TO_READ = ((1, 0), (1, 1024), (2, 4096), (4, 512), (4, 2048), (8, 512), (8, 1024))
_BUFFER_BYTES = 512 << 20  # several times any level-3 cache
_MIN_SIZE, _MAX_SIZE = 256, 2048
_LONG_S = 1.0
_NUM_TRIES = 5
_NUM_TRIES_OF_A_WAY = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and operations a second of num_threads threads, and bytes of one. A multiplication and an addition are two
    operations; a type that torch does not multiply here is 0."""

    num_threads: int
    bandwidth_one_thread: float
    bandwidth: float
    float32: float
    bfloat16: float
    int8: float

    def operations(self, weights: str) -> float:
        """The best rate for weights stored like this: narrower ones can be widened in registers."""
        float_rate = self.float32 if weights == "f32" else max(self.float32, self.bfloat16)
        return max(float_rate, self.int8) if weights in ("8-bit", "4-bit") else float_rate


class MemoryReader:
    """Owns a buffer that no cache holds. measure() is for every round anew: other machines' load on the same memory
    changes the answer from minute to minute."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._read_lines = compile_reader()
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)
        with contextlib.suppress(OSError):  # a kernel without them
            self._buffer.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, _BUFFER_BYTES, mmap.PAGESIZE):
            self._buffer[offset] = 1
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def measure(self, num_threads: int | None = None) -> float:
        """Bytes a second, the best of all ways to read."""
        num_threads = num_threads or self.num_threads
        unit = _LINES_AT_ONCE * _LINE_BYTES
        part_bytes = _BUFFER_BYTES // num_threads // unit * unit
        durations_s = [self._read(num_threads, part_bytes, *way) for way in _WAYS_TO_READ * _NUM_TRIES_OF_A_WAY]
        return num_threads * part_bytes / min(durations_s)

    def _read(self, num_threads: int, part_bytes: int, num_streams: int, ahead_bytes: int) -> float:
        """Seconds from when all threads begin until the last has read its part."""
        barrier = threading.Barrier(num_threads + 1)

        def read(index: int) -> None:
            begin = self._address + index * part_bytes
            barrier.wait()
            self._read_lines(begin, part_bytes // _LINE_BYTES, num_streams, ahead_bytes)  # without the GIL

        threads = [threading.Thread(target=read, args=(index,)) for index in range(num_threads)]
        for thread in threads:
            thread.start()
        barrier.wait()
        started = time.perf_counter()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started


def measure_limits(reader: MemoryReader) -> Limits:
    torch.set_num_threads(reader.num_threads)
    return Limits(
        num_threads=reader.num_threads,
        bandwidth_one_thread=reader.measure(1),
        bandwidth=reader.measure(),
        float32=_product_rate(torch.float32),
        bfloat16=_product_rate(torch.bfloat16),
        int8=_product_rate(torch.int8),
    )


def _product_rate(dtype: torch.dtype) -> float:
    """At _MAX_SIZE, or below it where that would take long: some types are not optimized on some machines."""
    size, rate = _MIN_SIZE, 0.0
    while size <= _MAX_SIZE:
        if dtype == torch.int8:
            left, right = (torch.randint(-128, 128, (size, size), dtype=dtype) for _ in range(2))
            multiply: Callable[..., torch.Tensor] = torch._int_mm
        else:
            left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
            multiply = torch.mm
        try:
            multiply(left, right)
        except RuntimeError:
            return 0.0
        durations_s = []
        for _ in range(_NUM_TRIES):
            started = time.perf_counter()
            multiply(left, right)
            durations_s.append(time.perf_counter() - started)
        rate = 2 * size**3 / min(durations_s)
        size *= 2
        if 2 * size**3 / rate > _LONG_S:
            break
    return rate


def compile_reader() -> Callable[[int, int, int, int], int]:
    """read_lines of read_memory.c, which says what it takes."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or "gcc"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read_memory.so"
        subprocess.run([*compiler, "-O3", "-march=native", "-shared", "-fPIC", _SOURCE, "-o", library], check=True)
        function = ctypes.CDLL(str(library)).read_lines
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
    function.restype = ctypes.c_uint64
    return function
