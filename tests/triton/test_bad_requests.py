"""Bad requests on the live server: each gets INVALID_ARG with field, value and limit, and disturbs nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_client import GrpcRequest, http_generate, http_post, stream_error, stream_text

NUM_UNDISTURBED = 16
_UNDISTURBED_PARAMS = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}


def _sampling(**fields: Any) -> dict[str, Any]:
    return {"text_input": "x", "sampling_parameters": json.dumps(fields)}


# name → (tensors, words of the message)
BAD_REQUESTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no input": ({"stream": True}, ["text_input", "input_ids", "got none"]),
    "both inputs": ({"text_input": "x", "input_ids": [1, 2]}, ["exactly one of", "text_input and input_ids"]),
    "empty prompt": ({"text_input": ""}, ["text_input", "empty", "at least 1"]),
    "token id below 0": ({"input_ids": [1, -1]}, ["input_ids", "-1", "0 to 49151"]),
    "token id over the vocabulary": ({"input_ids": [1, 49152]}, ["input_ids", "49152", "0 to 49151"]),
    "prompt too long": ({"input_ids": [1] * 3000}, ["prompt", "3000 tokens", "2047"]),
    "text too long": ({"text_input": "word " * 3000}, ["prompt", "tokens", "2047"]),
    "unknown field": (_sampling(max_token=1), ["max_token", "did you mean 'max_tokens'?"]),
    "temperature below 0": (_sampling(temperature=-1), ["temperature", "-1", "0"]),
    "temperature no number": (_sampling(temperature="hot"), ["temperature", "'hot'", "number"]),
    "temperature NaN": ({"text_input": "x", "sampling_parameters": '{"temperature": NaN}'}, ["temperature", "nan"]),
    "top_p 0": (_sampling(top_p=0), ["top_p", "0"]),
    "max_tokens 0": (_sampling(max_tokens=0), ["max_tokens", "0", "1"]),
    "max_tokens 10^12": (_sampling(max_tokens=10**12), ["max_tokens", "1000000000000", "1048576"]),
    "malformed JSON": ({"text_input": "x", "sampling_parameters": "{max"}, ["sampling_parameters", "JSON"]),
    "JSON but no object": ({"text_input": "x", "sampling_parameters": "[1]"}, ["sampling_parameters", "object"]),
    "stream with the prompt": (
        {"text_input": "x", "stream": True, "exclude_input_in_output": False},
        ["exclude_input_in_output", "false"],
    ),
}


@pytest.fixture(scope="module")
def undisturbed(server: TritonServer) -> Iterator[None]:
    """16 streams that run while the bad requests come; they must give what they give in quiet."""

    def run() -> list[GrpcRequest]:
        return [
            GrpcRequest(
                server,
                text_input=f"Fact number {number}:",
                sampling_parameters=_UNDISTURBED_PARAMS,
                stream=True,
            )
            for number in range(NUM_UNDISTURBED)
        ]

    quiet = [_token_ids(request) for request in run()]
    requests = run()
    for request in requests:
        request.wait_first()
    yield
    assert [_token_ids(request) for request in requests] == quiet
    assert {len(token_ids) for token_ids in quiet} == {_UNDISTURBED_PARAMS["max_tokens"]}


def _token_ids(request: GrpcRequest) -> list[int]:
    responses = request.result()
    stream_text(responses)
    return [token_id for response in responses for token_id in response.token_ids]


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request_over_grpc(server: TritonServer, name: str) -> None:
    tensors, words = BAD_REQUESTS[name]
    error = stream_error(GrpcRequest(server, **tensors).result())
    _check(error, words)


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request_over_http(server: TritonServer, name: str) -> None:
    tensors, words = BAD_REQUESTS[name]
    status, answer = http_generate(server, **tensors)
    assert 400 <= status < 500
    _check(answer["error"], words)


def _check(error: str, words: list[str]) -> None:
    assert error.startswith("INVALID_ARG: ")
    for word in words:
        assert word in error
    assert "/" not in error, "no path of the server in a message"


@pytest.mark.usefixtures("undisturbed")
def test_wrong_shape(server: TritonServer) -> None:
    """Triton itself refuses what config.pbtxt does not have, in its own words."""
    error = stream_error(GrpcRequest(server, text_input=["a", "b"]).result())
    assert all(word in error for word in ("text_input", "Expected [1]", "got [2]"))
    status, answer = http_generate(server, text_input=["a", "b"])
    assert status == 400 and "text_input" in answer["error"]


@pytest.mark.usefixtures("undisturbed")
def test_invalid_utf_8(server: TritonServer) -> None:
    assert "text_input is not valid UTF-8" in stream_error(GrpcRequest(server, text_input=b"ab\xff").result())


@pytest.mark.usefixtures("undisturbed")
def test_invalid_json_body_is_answered(server: TritonServer) -> None:
    status, _ = http_post(server, "/v2/models/deepinfer/generate", b'{"text_input": "\xff"')
    assert status >= 400


@pytest.mark.usefixtures("undisturbed")
def test_unknown_request_parameter_is_refused_with_the_nearest_name(server: TritonServer) -> None:
    status, answer = http_generate(server, text_input="x", max_token=3)
    assert (status, answer["error"]) == (
        400,
        "INVALID_ARG: unknown parameter 'max_token' (did you mean 'max_tokens'?)",
    )


@pytest.mark.usefixtures("undisturbed")
def test_numbers_that_come_as_strings_are_understood(server: TritonServer) -> None:
    status, answer = http_generate(server, text_input="x", max_tokens="3", temperature="0", ignore_eos="true")
    assert (status, len(answer["token_ids"])) == (200, 3)


def test_status_of_an_error_in_a_stream_that_has_not_begun(server: TritonServer) -> None:
    """HTTP status codes of streams too, since `generate_stream` may fail before its first event."""
    status, answer = http_generate(server, text_input="", stream=True)
    assert status == 400 and answer["error"].startswith("INVALID_ARG: ")
