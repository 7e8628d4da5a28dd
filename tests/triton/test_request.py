"""Triton's tensors and parameters → GenerateRequest."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.engine.chat import Chat
from deepinfer_backend.engine.messages import EmbeddingParams
from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.triton.model_config import OUTPUTS, RETURN_INPUTS
from tests.support import fake_triton
from tests.support.fake_triton import Request

from deepinfer_backend.triton.request import (  # isort: skip (after fake_triton)
    MAX_SAMPLING_PARAMETERS_BYTES,
    new_request_id,
    parse_request,
)

assert fake_triton


MAX_MESSAGE_BYTES = 1_000


def parse(**request: Any) -> Any:
    return parse_request(Request(**request), "id", "", max_message_bytes=MAX_MESSAGE_BYTES, max_media_bytes=1_000_000)


def test_the_tensor_wins_over_the_request_parameter() -> None:
    request = parse(
        text_input="x",
        sampling_parameters=json.dumps({"max_tokens": 3}),
        parameters={"max_tokens": 5, "top_k": 7},
    )
    assert (request.sampling_params.max_tokens, request.sampling_params.top_k) == (3, 7)


def test_tritons_own_parameters_are_no_sampling_parameters() -> None:
    request = parse(
        text_input="x",
        parameters={
            "priority": 2,
            "timeout": 1_500_000,
            "triton_enable_empty_final_response": True,
            "sequence_id": 1,
            "id": "a",
        },
    )
    assert (request.priority, request.timeout_s) == (2, 1.5)


def test_a_parameter_that_is_not_utf_8_is_the_clients_mistake() -> None:
    request = Request(text_input="x")
    request.parameters = b'{"\xff": 1}'.decode  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match="not valid UTF-8"):
        parse_request(request, "id", "", max_message_bytes=MAX_MESSAGE_BYTES, max_media_bytes=0)


def test_a_grpc_timeout_is_a_deadline_too() -> None:
    assert parse(text_input="x", timeout_us=250_000).timeout_s == 0.25


@pytest.mark.parametrize(
    ("stream", "exclude", "prepend"),
    [(None, None, True), (False, False, True), (False, True, False), (True, None, False), (True, True, False)],
)
def test_exclude_input_in_output_has_vllms_defaults(stream: bool | None, exclude: bool | None, prepend: bool) -> None:
    given = {"stream": stream, "exclude_input_in_output": exclude}
    tensors = {name: value for name, value in given.items() if value is not None}
    assert parse(text_input="x", **tensors).echo == ("x" if prepend else "")


def test_input_ids_are_copied_out_of_shared_memory() -> None:
    tensor = np.array([1, 2, 3], dtype=np.int32)
    request = parse(input_ids=tensor)
    tensor[:] = 0
    assert request.prompt.tolist() == [1, 2, 3]


@pytest.mark.parametrize("text", ["Grüße 😀\0\n", ""])
def test_text_arrives_as_it_was_sent(text: str) -> None:
    assert parse(text_input=text).prompt == text


def test_messages_with_tools_and_variables_become_a_chat() -> None:
    messages, tools, kwargs = [{"role": "user", "content": "hi"}], [{"name": "f"}], {"mood": "calm"}
    request = parse(messages=json.dumps(messages), tools=json.dumps(tools), chat_template_kwargs=json.dumps(kwargs))
    assert request.prompt == Chat.from_objects(messages, tools, kwargs)
    assert request.echo == ""


@pytest.mark.parametrize(
    ("content", "prompt", "dimensions"),
    [
        ({"input": "x"}, "x", None),
        ({"input": [1, 2]}, [1, 2], None),
        ({"input": "x", "pooling_params": {"dimensions": [64]}}, "x", 64),
        ({"input": "x", "pooling_params": {"dimensions": 64}}, "x", 64),
        ({"input": "x", "pooling_params": {"dimensions": None}}, "x", None),
        ({"input": "x", "pooling_params": {}}, "x", None),
    ],
)
def test_an_embedding_request_is_read_as_tritons_openai_frontend_writes_it(
    content: dict[str, Any], prompt: Any, dimensions: int | None
) -> None:
    request = parse(embedding_request=json.dumps(content))
    assert (request.prompt, request.embedding, request.echo) == (prompt, EmbeddingParams(dimensions), "")


ALWAYS = {"text_output", "token_ids"}
ALL_OUTPUTS = tuple(spec.name for spec in OUTPUTS)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, set()),
        ({"outputs": ALL_OUTPUTS}, set()),
        ({"outputs": ("token_ids",)}, set()),
        ({"outputs": ("token_ids", "finish_reason")}, {"finish_reason"}),
        ({"outputs": ALL_OUTPUTS[:-1]}, set(ALL_OUTPUTS[:-1])),
        ({"outputs": ALL_OUTPUTS, "return_logprobs": True}, {"logprobs"}),
        ({"return_finish_reason": False}, set()),
        ({"parameters": {"n": 2}}, {"sequence_index"}),
        *(({name: True}, set(outputs)) for name, outputs in RETURN_INPUTS.items()),
    ],
)
def test_an_additional_output_must_be_asked_for(asked: dict[str, Any], expected: set[str]) -> None:
    """All of them together are what Triton says for a client that named none."""
    assert parse(text_input="x", **asked).build_tensors.keywords["output_names"] == ALWAYS | expected


HELLO = json.dumps([{"role": "user", "content": "hi"}])

BAD_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({}, "exactly one of text_input, input_ids, messages and embedding_request: got none"),
    "both inputs": ({"text_input": "x", "input_ids": [1]}, "got text_input and input_ids"),
    "three inputs": (
        {"text_input": "x", "messages": HELLO, "embedding_request": "{}"},
        "got text_input and messages and embedding_request",
    ),
    "tools without messages": ({"text_input": "x", "tools": "[]"}, "tools is set: must be left out without messages"),
    "variables without messages": (
        {"input_ids": [1], "chat_template_kwargs": "{}"},
        "chat_template_kwargs is set: must be left out without messages",
    ),
    "messages that are no JSON": ({"messages": "hello"}, "messages is 'hello': not valid JSON"),
    "messages too large": ({"messages": " " * 1_001}, "messages has 1001 bytes: must have at most 1000"),
    "an image": (
        {"messages": json.dumps([{"role": "user", "content": [{"type": "image_url"}]}])},
        "messages.0.content.0.image_url is None: must be a data URL, since nothing is fetched",
    ),
    "embedding of nothing": (
        {"embedding_request": "{}"},
        r"embedding_request.input is None: must be a string or a list",
    ),
    "embedding of booleans": (
        {"embedding_request": '{"input": [true]}'},
        r"embedding_request.input is \[True\]: must be",
    ),
    "embedding as a list": ({"embedding_request": "[1]"}, r"embedding_request is \[1\]: must be a JSON object"),
    "embedding with a typing error": (
        {"embedding_request": '{"inputs": "x"}'},
        r"embedding_request: unknown field 'inputs' \(did you mean 'input'\?\)",
    ),
    "pooling with a typing error": (
        {"embedding_request": '{"input": "x", "pooling_params": {"dimension": 1}}'},
        "embedding_request.pooling_params: unknown field 'dimension'",
    ),
    "dimensions in words": (
        {"embedding_request": '{"input": "x", "pooling_params": {"dimensions": "all"}}'},
        "embedding_request.pooling_params.dimensions is 'all': must be a whole number",
    ),
    "two dimensions": (
        {"embedding_request": '{"input": "x", "pooling_params": {"dimensions": [1, 2]}}'},
        r"embedding_request.pooling_params.dimensions is \[1, 2\]: must be a whole number or a list of one",
    ),
    "batch of flags": (
        {"text_input": "x", "return_logprobs": np.array([True, True])},
        r"return_logprobs has shape \[2\]: must be \[1\]",
    ),
    "stream with the prompt": (
        {"text_input": "x", "stream": True, "exclude_input_in_output": False},
        "exclude_input_in_output is false",
    ),
    "two prompts": (
        {"text_input": np.array([b"a", b"b"], dtype=np.object_)},
        r"text_input has shape \[2\]: must be \[1\]",
    ),
    "batch dimension": (
        {"text_input": np.array([[b"a"]], dtype=np.object_)},
        r"text_input has shape \[1, 1\]: must be \[1\]",
    ),
    "batch of ids": ({"input_ids": np.zeros((1, 2), dtype=np.int32)}, r"input_ids has shape \[1, 2\]"),
    "invalid UTF-8": ({"text_input": b"ab\xff"}, r"text_input is not valid UTF-8: byte b'\\xff' at 2"),
    "invalid UTF-8 in JSON": (
        {"text_input": "x", "sampling_parameters": b'{"\xff'},
        "sampling_parameters is not valid",
    ),
    "malformed JSON": ({"text_input": "x", "sampling_parameters": "{max"}, "sampling_parameters is '{max': not valid"),
    "JSON list": ({"text_input": "x", "sampling_parameters": "[1]"}, "must be a JSON object"),
    "deep JSON": ({"text_input": "x", "sampling_parameters": "[" * 100_000}, "nested too deeply"),
    "long number": ({"text_input": "x", "sampling_parameters": '{"top_k":' + "1" * 5_000 + "}"}, "not valid JSON"),
    "long JSON": (
        {"text_input": "x", "sampling_parameters": " " * (MAX_SAMPLING_PARAMETERS_BYTES + 1)},
        f"must have at most {MAX_SAMPLING_PARAMETERS_BYTES}",
    ),
    "unknown field": (
        {"text_input": "x", "sampling_parameters": '{"max_token": 1}'},
        r"unknown field 'max_token' \(did you mean 'max_tokens'\?\)",
    ),
    "unknown parameter": (
        {"text_input": "x", "parameters": {"temprature": 1}},
        r"unknown parameter 'temprature' \(did you mean 'temperature'\?\)",
    ),
    "negative timeout": ({"text_input": "x", "parameters": {"timeout": -1}}, "timeout is -1: must be a whole number"),
    "boolean priority": ({"text_input": "x", "parameters": {"priority": True}}, "priority is True"),
    "text priority": ({"text_input": "x", "parameters": {"priority": "high"}}, "priority is 'high'"),
    "NaN": ({"text_input": "x", "sampling_parameters": '{"temperature": NaN}'}, "temperature is nan: must be a finite"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_names_field_value_and_limit(name: str) -> None:
    request, message = BAD_REQUESTS[name]
    with pytest.raises(InvalidRequestError, match=message):
        parse(**request)


def test_request_ids_are_unique_and_cannot_forge_a_log_line() -> None:
    first, second = (new_request_id("a\nERROR é" + "x" * 1_000, "model") for _ in range(2))
    assert first != second
    assert first.startswith("a\\nERROR \\xe9xxx")
    assert first.isascii() and first.isprintable() and len(first) < 100
