"""Our own interface, a superset of the vLLM backend's: Triton's tensors and parameters → GenerateRequest, checked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.chat import Chat, read_json
from deepinfer_backend.engine.input_processor import Prompt, TextWithMedia
from deepinfer_backend.engine.messages import EmbeddingParams, EngineInfo
from deepinfer_backend.errors import InvalidRequestError, nearest_name, shown
from deepinfer_backend.media.medium import from_wire
from deepinfer_backend.models.vision_families import KINDS
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.triton.generate_request import CancelRequest, GenerateRequest, RequestParser
from deepinfer_backend.triton.input_tensors import InputTensors
from deepinfer_backend.triton.model_config import OUTPUTS, RETURN_INPUTS
from deepinfer_backend.triton.response_tensors import build_output_tensors

MAX_SAMPLING_PARAMETERS_BYTES = 1_048_576
MAX_SHOWN_ID_CHARS = 64
MAX_ABS_PRIORITY = 2**31 - 1

# About the request as a whole. Also taken from sampling_parameters: Triton 2.51 keeps what a gRPC client gives as
# priority to itself, and its client library lets no parameter have that name.
_PRIORITY = "priority"
_TIMEOUT = "timeout"  # microseconds, as in Triton's own protocol
_QUEUE_TIMEOUT = "queue_timeout"  # likewise
_CONTROLS = (_PRIORITY, _TIMEOUT, _QUEUE_TIMEOUT)
# Parameters that belong to Triton and its clients; everything else must be one of those or a sampling parameter.
_TRITONS_OWN = frozenset({"id", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"})
_TRITONS_PREFIX = "triton_"

_PROMPT_INPUTS = ("text_input", "input_ids", "messages", "embedding_request")
_CHAT_INPUTS = ("tools", "chat_template_kwargs")
_CANCEL_INPUT = "cancel_request_id"
_ALWAYS_SENT = frozenset({"text_output", "token_ids"})
_ALL_OUTPUTS = frozenset(spec.name for spec in OUTPUTS)

_request_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """What is beside the tensors of a request; `sampling_fields`: of SamplingParams, not checked yet.

    A priority of 0 and timeouts that are None were left out, or are Triton's word for that.
    """

    priority: int
    timeout_s: float | None
    queue_timeout_s: float | None
    sampling_fields: dict[str, Any]


def new_request_id(client_id: str, model_name: str) -> str:
    """A unique id that carries the client's, escaped (so that it cannot forge a log line) and cut.

    The model's name is in it, since several may share one engine.
    """
    escaped = client_id.encode("unicode_escape").decode("ascii")[:MAX_SHOWN_ID_CHARS]
    return f"{escaped or 'request'}#{model_name}.{next(_request_numbers)}"


def read_utf8(what: str, read: Callable[[], str]) -> str:
    """A text of Triton's InferenceRequest. Over HTTP it is whatever bytes the client put there.

    Raises:
        InvalidRequestError: it is not UTF-8.
    """
    try:
        return read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{what} is not valid UTF-8: {error.reason} at {error.start}") from None


def native_interface(tokenizer: Any, info: EngineInfo, config: EngineConfig) -> RequestParser:
    """The WireInterface of our own."""
    return partial(
        parse_request,
        max_message_bytes=config.max_message_bytes,
        max_media_bytes=config.max_media_bytes if info.modalities else 0,
    )


def parse_request(
    request: Any, request_id: str, client_request_id: str, *, max_message_bytes: int, max_media_bytes: int
) -> GenerateRequest | CancelRequest:
    """Reads a Triton InferenceRequest.

    max_message_bytes: the largest `messages`, `tools`, `chat_template_kwargs` and `embedding_request`, each.
    max_media_bytes: of the images and videos in messages.

    Raises:
        InvalidRequestError: the message names the field, the value and the limit.
    """
    tensors = InputTensors(request)
    if _CANCEL_INPUT in tensors:
        return CancelRequest(request_id, _read_cancelled_id(request, tensors))
    stream = tensors.bool("stream") or False
    exclude_input = tensors.bool("exclude_input_in_output")
    if stream and exclude_input is False:
        raise InvalidRequestError("exclude_input_in_output is false: must be true (or left out) when stream is true")
    prompt, embedding = _read_prompt(tensors, max_message_bytes, max_media_bytes)
    text = prompt.text if isinstance(prompt, TextWithMedia) else prompt
    is_echoed = isinstance(text, str) and embedding is None and not stream and not exclude_input
    parameters = read_parameters(request, _read_sampling_parameters(tensors))
    params = SamplingParams(**parameters.sampling_fields)
    output_names = _output_names(tensors, request.requested_output_names(), params)
    return GenerateRequest(
        request_id=request_id,
        client_request_id=client_request_id,
        prompt=prompt,
        sampling_params=params,
        build_tensors=partial(build_output_tensors, output_names=output_names),
        embedding=embedding,
        stream=stream,
        echo=str(text) if is_echoed else "",
        priority=parameters.priority,
        timeout_s=parameters.timeout_s,
        queue_timeout_s=parameters.queue_timeout_s,
        wants_logprobs="logprobs" in output_names,
        wants_cumulative_logprob="cumulative_logprob" in output_names,
        wants_prompt_logprobs="prompt_logprobs" in output_names,
    )


def _read_cancelled_id(request: Any, tensors: InputTensors) -> str:
    others = [name for tensor in request.inputs() if (name := tensor.name()) != _CANCEL_INPUT]
    for name in (*others, *_read_our_parameters(request)):
        raise InvalidRequestError(f"{name} is set: must be left out with {_CANCEL_INPUT}")
    cancelled_id = tensors.text(_CANCEL_INPUT)
    if not cancelled_id:
        raise InvalidRequestError(f"{_CANCEL_INPUT} is empty: must have at least 1 character")
    return cancelled_id


def _read_prompt(tensors: InputTensors, max_bytes: int, max_media_bytes: int) -> tuple[Prompt, EmbeddingParams | None]:
    given = [name for name in _PROMPT_INPUTS if name in tensors]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        names = f"{', '.join(_PROMPT_INPUTS[:-1])} and {_PROMPT_INPUTS[-1]}"
        raise InvalidRequestError(f"a request needs exactly one of {names}: got {found}")
    (name,) = given
    for chat_input in _CHAT_INPUTS:
        if chat_input in tensors and name != "messages":
            raise InvalidRequestError(f"{chat_input} is set: must be left out without messages")
    for kind in KINDS:
        if kind in tensors and name != "text_input":
            raise InvalidRequestError(f"{kind} is set: must be left out without text_input (messages have parts)")
    if name == "input_ids":
        token_ids = tensors.token_ids(name)
        assert token_ids is not None
        return token_ids, None
    text = tensors.text(name)
    assert text is not None
    if name == "text_input":
        media = [
            from_wire(kind, f"{kind}.{index}", value)
            for kind in KINDS
            for index, value in enumerate(tensors.elements(kind))
        ]
        return TextWithMedia(text, media) if media else text, None
    if name == "messages":
        tools, template_kwargs = tensors.text("tools"), tensors.text("chat_template_kwargs")
        return Chat.from_json(text, tools, template_kwargs, max_bytes, max_media_bytes), None
    return _read_embedding_request(read_json(name, text, max_bytes))


def _read_embedding_request(content: Any) -> tuple[Prompt, EmbeddingParams]:
    """As Triton's OpenAI frontend writes it: an input, and perhaps pooling_params with dimensions."""
    name = "embedding_request"
    _check_keys(name, content, ("input", "pooling_params"))
    prompt = content.get("input")
    is_token_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
    if not isinstance(prompt, str) and not is_token_ids:
        raise InvalidRequestError(f"{name}.input is {shown(prompt)}: must be a string or a list of token ids")
    pooling = content.get("pooling_params") or {}
    _check_keys(f"{name}.pooling_params", pooling, ("dimensions",))
    dimensions = pooling.get("dimensions")
    if isinstance(dimensions, list) and len(dimensions) == 1:
        (dimensions,) = dimensions
    if dimensions is not None and type(dimensions) is not int:
        raise InvalidRequestError(
            f"{name}.pooling_params.dimensions is {shown(dimensions)}: must be a whole number or a list of one"
        )
    return prompt, EmbeddingParams(dimensions)


def _check_keys(name: str, content: Any, known: tuple[str, ...]) -> None:
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{name} is {shown(content)}: must be a JSON object")
    for key in content:
        if key not in known:
            raise InvalidRequestError(f"{name}: unknown field {shown(key)}{nearest_name(key, known)}")


def _output_names(tensors: InputTensors, requested: set[str], params: SamplingParams) -> frozenset[str]:
    """What to send: an additional output only if the client asked for it, by `return_…` or by its name.

    Triton names all outputs for a client that named none, so "all" is nobody's wish.
    """
    asked = {output for name, outputs in RETURN_INPUTS.items() if tensors.bool(name) for output in outputs}
    if params.n > 1:
        asked.add("sequence_index")
    is_selection = bool(requested) and not requested >= _ALL_OUTPUTS
    return _ALWAYS_SENT | asked | (requested if is_selection else set())


def _read_sampling_parameters(tensors: InputTensors) -> dict[str, Any]:
    text = tensors.text("sampling_parameters")
    if text is None:
        return {}
    fields = read_json("sampling_parameters", text, MAX_SAMPLING_PARAMETERS_BYTES)
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"sampling_parameters is {shown(text)}: must be a JSON object")
    return fields


def read_parameters(request: Any, sampling_parameters: Mapping[str, Any] | None = None) -> RequestParameters:
    """Those of a Triton InferenceRequest, and what its sampling_parameters say, which wins.

    Raises:
        InvalidRequestError: one is unknown or out of its range.
    """
    fields = {**_read_our_parameters(request), **(sampling_parameters or {})}
    priority = _whole_number(_PRIORITY, fields.pop(_PRIORITY, 0), -MAX_ABS_PRIORITY, MAX_ABS_PRIORITY)
    timeout_s, queue_timeout_s = _pop_timeout(_TIMEOUT, fields), _pop_timeout(_QUEUE_TIMEOUT, fields)
    return RequestParameters(priority, timeout_s or request.timeout() / 1e6 or None, queue_timeout_s, fields)


def _read_our_parameters(request: Any) -> dict[str, Any]:
    """All but Triton's own."""
    parameters = json.loads(read_utf8("a parameter", request.parameters) or "{}")
    known = [*SamplingParams.model_fields, *_CONTROLS]
    ours = {}
    for name, value in parameters.items():
        if name in _TRITONS_OWN or name.startswith(_TRITONS_PREFIX):
            continue
        if name not in known:
            raise InvalidRequestError(f"unknown parameter {shown(name)}{nearest_name(name, known)}")
        ours[name] = value
    return ours


def _pop_timeout(name: str, fields: dict[str, Any]) -> float | None:
    """Microseconds → seconds."""
    return _whole_number(name, fields.pop(name, 0), 0, 2**63 - 1) / 1e6 or None


def _whole_number(name: str, value: Any, lowest: int, highest: int) -> int:
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or not lowest <= number <= highest:
        raise InvalidRequestError(f"{name} is {shown(value)}: must be a whole number from {lowest} to {highest}")
    return number
