"""The device's stream: work submitted to it runs in order and later than the call that submits it.

On CUDA that is a stream. On CPU one device thread plays its part, so that overlap, order and flush are real there
as well.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The value of submitted work."""

    def result(self) -> T_co:
        """Waits on the host until the device is done; raises what the work raised."""

    def on_stream(self) -> T_co:
        """The same without waiting, for work that runs later on the same stream."""


class DeviceStream(Protocol):
    """Runs submitted functions one after another. `busy_s`: seconds the device spent in them so far."""

    device: torch.device

    @property
    def busy_s(self) -> float: ...

    def submit(self, work: Callable[[], T]) -> Pending[T]: ...

    def close(self) -> None: ...


def open_stream(device: torch.device) -> DeviceStream:
    return CudaStream(device) if device.type == "cuda" else CpuStream()


class _OnDeviceThread(Generic[T]):
    """Work for the device thread, then what came of it.

    A bare lock, held until then, stands where a `Future` would have a condition: between two forwards every
    microsecond of Python counts.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._error: BaseException | None = None
        self._not_done = threading.Lock()
        self._not_done.acquire()

    def run(self) -> None:
        """On the device thread, once."""
        assert self._work is not None
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        # What the work refers to, such as the step before, is not kept alive by its value.
        self._work = None
        self._not_done.release()

    def result(self) -> T:
        with self._not_done:
            return self.on_stream()

    def on_stream(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


@dataclass(slots=True)
class _BusyTime:
    """Written by the device thread."""

    seconds: float = 0.0


_Queue = SimpleQueue[_OnDeviceThread[Any] | None]


class CpuStream:
    """Owns the one device thread; every torch operation of a step runs there."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._busy = _BusyTime()
        self._queue: _Queue = SimpleQueue()
        thread = threading.Thread(
            target=_run_device, args=(self._queue, self._busy), name="deepinfer-device", daemon=True
        )
        thread.start()
        # Also when nobody closes it: the interpreter must not end while the thread computes.
        self._end = weakref.finalize(self, _end_device, self._queue, thread)

    @property
    def busy_s(self) -> float:
        return self._busy.seconds

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        pending = _OnDeviceThread(work)
        self._queue.put(pending)
        return pending

    def close(self) -> None:
        self._end()


def _run_device(queue: _Queue, busy: _BusyTime) -> None:
    with torch.inference_mode():
        while (pending := queue.get()) is not None:
            started = time.perf_counter()
            pending.run()
            busy.seconds += time.perf_counter() - started
            del pending  # its value may be freed while the thread waits


def _end_device(queue: _Queue, thread: threading.Thread) -> None:
    queue.put(None)
    thread.join()


class _OnCudaStream(Generic[T]):
    """Work whose kernels are on the CUDA stream; done when the event recorded after them is."""

    def __init__(self, value: T, done: torch.cuda.Event) -> None:
        self._value = value
        self._done = done

    def result(self) -> T:
        self._done.synchronize()
        return self._value

    def on_stream(self) -> T:
        return self._value


class _Failed:
    """Work that raised while it was being launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> NoReturn:
        raise self._error

    on_stream = result


class CudaStream:
    """Owns one CUDA stream. `busy_s` stays 0: CUDA's own profilers measure that."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.busy_s = 0.0
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                value = work()
                done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(self._stream)
        except Exception as error:
            return _Failed(error)
        return _OnCudaStream(value, done)

    def close(self) -> None:
        self._stream.synchronize()


def host_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, which the host does not wait for; the tensor itself on CPU."""
    if device.type == "cpu":
        return tensor
    # Pinned memory is not used again before the copy is done: torch's allocator sees to that.
    return tensor.pin_memory().to(device, non_blocking=True)


def device_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is there once the device has passed what was submitted so far; the tensor itself on CPU."""
    if tensor.device.type == "cpu":
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
