"""Triton's Python API as far as the frontend uses it, for tests without a server. Import it before the frontend."""

from __future__ import annotations

import json
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

FINAL = 1


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self.message = message
        self.code = code


class Tensor:
    def __init__(self, name: str, array: NDArray[Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        return self._array


@dataclass
class InferenceResponse:
    tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


class MetricFamily:
    GAUGE, COUNTER, HISTOGRAM = range(3)
    values: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._name = name
        self.values[name] = []

    def Metric(self, **_: Any) -> MetricFamily:
        return self

    def increment(self, value: float) -> None:
        self.values[self._name].append(value)

    set = observe = increment


class Sender:
    """Refuses what Triton refuses, and records what was sent."""

    def __init__(self) -> None:
        self.sent: list[InferenceResponse | None] = []
        self.num_finals = 0
        self.final = threading.Event()
        self.cancelled = False
        self.fail_with: Exception | None = None

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.num_finals:
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        if self.fail_with is not None and response is not None:
            raise self.fail_with
        self.sent.append(response)
        if flags & FINAL:
            self.num_finals += 1
            self.final.set()

    def is_cancelled(self) -> bool:
        assert not self.num_finals, "Triton 2.51 crashes here"
        return self.cancelled

    def wait(self, timeout_s: float = 10.0) -> None:
        assert self.final.wait(timeout_s), "no FINAL"

    @property
    def error(self) -> TritonError | None:
        last = self.sent[-1]
        return last.error if last is not None else None

    def outputs(self, name: str) -> list[Any]:
        """The values of one output tensor, response by response; strings are decoded."""
        arrays = [t.as_numpy() for r in self.sent if r is not None for t in r.tensors if t.name() == name]
        return [[decoded(value) for value in array.tolist()] for array in arrays]


def decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


class Request:
    """One InferenceRequest; keyword arguments are tensors."""

    def __init__(
        self,
        *,
        request_id: str = "",
        parameters: dict[str, Any] | str = "",
        outputs: tuple[str, ...] = (),
        timeout_us: int = 0,
        **tensors: Any,
    ) -> None:
        self.sender = Sender()
        self._request_id = request_id
        self._parameters = parameters if isinstance(parameters, str) else json.dumps(parameters)
        self._outputs = outputs
        self._timeout_us = timeout_us
        self._tensors = [Tensor(name, _as_array(value)) for name, value in tensors.items()]

    def request_id(self) -> str:
        return self._request_id

    def parameters(self) -> str:
        return self._parameters

    def requested_output_names(self) -> set[str]:
        return set(self._outputs)

    def timeout(self) -> int:
        return self._timeout_us

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def get_response_sender(self) -> Sender:
        return self.sender


def _as_array(value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bool):
        return np.array([value])
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)
    return np.array(value, dtype=np.int32)


def install() -> None:
    """Makes `import triton_python_backend_utils` give this module's names."""
    module = types.ModuleType("triton_python_backend_utils")
    for thing in (TritonError, Tensor, InferenceResponse, MetricFamily):
        setattr(module, thing.__name__, thing)
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    sys.modules["triton_python_backend_utils"] = module


install()
