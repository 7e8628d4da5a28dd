"""Triton's tensors and parameters → GenerateRequest, checked; TextDelta → tensors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from deepinfer_backend.errors import InvalidRequestError, nearest_name, shown
from deepinfer_backend.outputs import TextDelta
from deepinfer_backend.sampling_params import SamplingParams

MAX_SAMPLING_PARAMETERS_BYTES = 1_048_576
MAX_SHOWN_ID_CHARS = 64
MAX_ABS_PRIORITY = 2**31 - 1

# Parameters that belong to Triton and its clients; everything else must be a sampling parameter.
_PRIORITY = "priority"
_TIMEOUT = "timeout"  # microseconds, as in Triton's own protocol
_TRITONS_OWN = frozenset({"sequence_id", "sequence_start", "sequence_end", "binary_data_output"})
_TRITONS_PREFIX = "triton_"

_request_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the client sent it, copied out of shared memory and checked as far as that is cheap.

    `request_id` is ours: unique in this process, and begins with what a log may show of the client's own.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: NDArray[np.int32] | None
    sampling_params: SamplingParams
    stream: bool
    prepend_prompt: bool
    priority: int
    timeout_s: float | None
    output_names: frozenset[str]


def new_request_id(client_id: str) -> str:
    """A unique id that carries the client's, escaped (so that it cannot forge a log line) and cut."""
    escaped = client_id.encode("unicode_escape").decode("ascii")[:MAX_SHOWN_ID_CHARS]
    return f"{escaped or 'request'}#{next(_request_numbers)}"


def parse_request(request: Any, request_id: str) -> GenerateRequest:
    """Reads a Triton InferenceRequest.

    Raises:
        InvalidRequestError: the message names the field, the value and the limit.
    """
    tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    parameters = json.loads(request.parameters() or "{}")
    stream = _read_bool(tensors, "stream") or False
    exclude_input = _read_bool(tensors, "exclude_input_in_output")
    if stream and exclude_input is False:
        raise InvalidRequestError("exclude_input_in_output is false: must be true (or left out) when stream is true")
    prompt = _read_text(tensors, "text_input")
    prompt_token_ids = _read_token_ids(tensors)
    if (prompt is None) == (prompt_token_ids is None):
        found = "neither" if prompt is None else "both"
        raise InvalidRequestError(f"a request needs exactly one of text_input and input_ids: got {found}")
    priority, timeout_s, sampling_fields = _split_parameters(parameters)
    sampling_fields.update(_read_sampling_parameters(tensors))
    return GenerateRequest(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(**sampling_fields),
        stream=stream,
        prepend_prompt=not stream and not exclude_input,
        priority=priority,
        timeout_s=timeout_s if timeout_s is not None else _grpc_timeout_s(request),
        output_names=frozenset(request.requested_output_names()),
    )


def build_output_tensors(delta: TextDelta, output_names: frozenset[str]) -> list[Any]:
    """The tensors of one response; only those that the client asked for, all when it named none."""
    tensors = {
        "text_output": np.array([delta.text.encode("utf-8", errors="replace")], dtype=np.object_),
        "token_ids": np.array(delta.token_ids, dtype=np.int32),
        "finish_reason": np.array([str(delta.finish_reason)], dtype=np.object_),
    }
    wanted = output_names or tensors.keys()
    return [pb_utils.Tensor(name, array) for name, array in tensors.items() if name in wanted]


def _read_element(tensors: Mapping[str, NDArray[Any]], name: str) -> Any:
    """The only element of tensor `name`, or None when the client did not send it."""
    array = tensors.get(name)
    if array is None:
        return None
    if array.shape != (1,):
        raise InvalidRequestError(f"{name} has shape {list(array.shape)}: must be [1] (one prompt in a request)")
    return array[0]


def _read_bool(tensors: Mapping[str, NDArray[Any]], name: str) -> bool | None:
    value = _read_element(tensors, name)
    return None if value is None else bool(value)


def _read_text(tensors: Mapping[str, NDArray[Any]], name: str) -> str | None:
    value = _read_element(tensors, name)
    if value is None:
        return None
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", errors="surrogatepass")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid UTF-8: byte {shown(data[error.start : error.start + 1])} at {error.start}"
        ) from None


def _read_token_ids(tensors: Mapping[str, NDArray[Any]]) -> NDArray[np.int32] | None:
    array = tensors.get("input_ids")
    if array is None:
        return None
    if array.ndim != 1:
        raise InvalidRequestError(f"input_ids has shape {list(array.shape)}: must be [number of tokens]")
    return np.array(array, dtype=np.int32)  # a copy: the tensor is a view of shared memory


def _read_sampling_parameters(tensors: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    text = _read_text(tensors, "sampling_parameters")
    if text is None:
        return {}
    if len(text) > MAX_SAMPLING_PARAMETERS_BYTES:
        raise InvalidRequestError(
            f"sampling_parameters has {len(text)} characters: must be at most {MAX_SAMPLING_PARAMETERS_BYTES}"
        )
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"sampling_parameters is {shown(text)}: not valid JSON ({reason})") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"sampling_parameters is {shown(text)}: must be a JSON object")
    return fields


def _split_parameters(parameters: Mapping[str, Any]) -> tuple[int, float | None, dict[str, Any]]:
    """(priority, timeout in seconds, sampling fields) of the request parameters."""
    priority, timeout_s = 0, None
    sampling_fields: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in SamplingParams.model_fields:
            sampling_fields[name] = value
        elif name == _PRIORITY:
            priority = _whole_number(name, value, -MAX_ABS_PRIORITY, MAX_ABS_PRIORITY)
        elif name == _TIMEOUT:
            timeout_s = _whole_number(name, value, 0, 2**63 - 1) / 1e6 or None
        elif name not in _TRITONS_OWN and not name.startswith(_TRITONS_PREFIX):
            known = [*SamplingParams.model_fields, _PRIORITY, _TIMEOUT]
            raise InvalidRequestError(f"unknown parameter {shown(name)}{nearest_name(name, known)}")
    return priority, timeout_s, sampling_fields


def _whole_number(name: str, value: Any, lowest: int, highest: int) -> int:
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or not lowest <= number <= highest:
        raise InvalidRequestError(f"{name} is {shown(value)}: must be a whole number from {lowest} to {highest}")
    return number


def _grpc_timeout_s(request: Any) -> float | None:
    return request.timeout() / 1e6 or None
