"""The device's stream: work submitted to it runs in order and later than the call that submits it.

On CUDA that is a stream. On CPU one device thread plays its part, so that overlap, order and flush are real there
as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NoReturn, Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The value of submitted work."""

    def result(self) -> T_co:
        """Waits on the host until the device is done; raises what the work raised."""

    def on_stream(self) -> T_co:
        """The same without waiting, for work that runs later on the same stream."""

    def on_stream_or_none(self) -> T_co | None:
        """The same; None if the work raised."""


class DeviceStream(Protocol):
    """Runs submitted functions one after another. `busy_s`: seconds the device spent in them so far."""

    device: torch.device
    busy_s: float

    def submit(self, work: Callable[[], T]) -> Pending[T]: ...

    def close(self) -> None: ...


def open_stream(device: torch.device) -> DeviceStream:
    return CudaStream(device) if device.type == "cuda" else CpuStream()


class _OnDeviceThread(Generic[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self) -> T:
        return self._future.result()

    def on_stream(self) -> T:
        # Asked on the device thread, which ran the work before: it never waits.
        return self._future.result(timeout=0)

    def on_stream_or_none(self) -> T | None:
        return None if self._future.exception(timeout=0) else self._future.result(timeout=0)


class CpuStream:
    """Owns the one device thread; every torch operation of a step runs there."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.busy_s = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deepinfer-device")

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        return _OnDeviceThread(self._thread.submit(self._run, work))

    def _run(self, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                return work()
        finally:
            self.busy_s += time.perf_counter() - started

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


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

    def on_stream_or_none(self) -> T:
        return self._value


class _Failed:
    """Work that raised while it was being launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> NoReturn:
        raise self._error

    on_stream = result

    def on_stream_or_none(self) -> None:
        return None


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
