"""What a client sees of a stream on the live server: one FINAL, whole characters, exact stop strings."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_backend.models.loader import resolve_model
from deepinfer_backend.triton.server import TritonServer
from tests.support.oracle import TransformersOracle
from tests.support.triton_client import GrpcRequest, http_generate, http_stream, stream_text

# What the model makes of these at random has all of it: emoji, CJK, Arabic, code, leading spaces, halves of characters.
PROMPTS = {
    "emoji": "😀 😃 👍🏽 👩‍👩‍👧 🇫🇷 😀 😃",
    "cjk": "日本語の文章。中文句子。한국어 문장.",
    "arabic": "مرحبا بالعالم، كيف حالك اليوم؟",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "leading spaces": "     five spaces,\n\n\t\ttwo tabs:   ",
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 24},
    "any token": {"temperature": 100, "seed": 7, "max_tokens": 24, "ignore_eos": True},
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_joined_stream_is_the_text_without_stream(
    server: TritonServer, tokenizer: Any, prompt: str, sampling: str
) -> None:
    params = SAMPLING[sampling]
    responses = GrpcRequest(server, text_input=PROMPTS[prompt], sampling_parameters=params, stream=True).result()
    text = stream_text(responses)
    whole = GrpcRequest(
        server, text_input=PROMPTS[prompt], sampling_parameters=params, exclude_input_in_output=True
    ).result()
    assert stream_text(whole) == text
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    assert whole[0].token_ids == token_ids
    # Half a character at the end, where max_tokens cut it, is left out.
    assert text.rstrip("\ufffd") == new_text(tokenizer, PROMPTS[prompt], token_ids).rstrip("\ufffd")


def new_text(tokenizer: Any, prompt: str, token_ids: list[int]) -> str:
    """What transformers makes of these tokens after this prompt."""
    prompt_ids = tokenizer(prompt)["input_ids"]
    whole = tokenizer.decode(prompt_ids + token_ids, skip_special_tokens=True)
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    assert isinstance(whole, str) and whole.startswith(before)
    return whole[len(before) :]


def test_the_model_really_splits_characters(server: TritonServer, tokenizer: Any) -> None:
    """Else the test above would show nothing of halves."""
    [whole] = GrpcRequest(server, text_input=PROMPTS["arabic"], sampling_parameters=SAMPLING["greedy"]).result()
    assert any("\ufffd" in tokenizer.decode([token_id]) for token_id in whole.token_ids)


def test_stream_over_http_has_one_event_per_response_and_the_reason_on_the_last(server: TritonServer) -> None:
    body: dict[str, Any] = {"text_input": PROMPTS["code"], "temperature": 0, "max_tokens": 16}
    events = http_stream(server, **body, stream=True, return_finish_reason=True)
    assert [event["finish_reason"] for event in events] == ["None"] * (len(events) - 1) + ["length"]
    status, answer = http_generate(server, **body, exclude_input_in_output=True)
    assert status == 200
    assert "".join(event["text_output"] for event in events) == answer["text_output"]
    assert len(events) > 8


def test_the_prompt_stands_before_the_answer_unless_excluded(server: TritonServer) -> None:
    body: dict[str, Any] = {"text_input": "Once upon a time", "temperature": 0, "max_tokens": 8}
    _, with_prompt = http_generate(server, **body)
    _, without = http_generate(server, **body, exclude_input_in_output=True)
    assert with_prompt["text_output"] == body["text_input"] + without["text_output"]


def test_text_and_its_token_ids_give_the_same_answer(server: TritonServer, tokenizer: Any) -> None:
    params = {"temperature": 0, "max_tokens": 16}
    text = "The capital of Italy is"
    by_text = GrpcRequest(server, text_input=text, sampling_parameters=params, stream=True).result()
    by_ids = GrpcRequest(
        server, input_ids=tokenizer(text)["input_ids"], sampling_parameters=params, stream=True
    ).result()
    assert stream_text(by_ids) == stream_text(by_text)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_that_spans_tokens_is_cut_exactly(server: TritonServer, tokenizer: Any, stream: bool) -> None:
    prompt = "Once upon a time, in a small village,"
    params = {"temperature": 0, "max_tokens": 32}
    free = GrpcRequest(server, text_input=prompt, sampling_parameters=params, stream=True).result()
    text, token_ids = stream_text(free), [token_id for response in free for token_id in response.token_ids]
    stop = _string_across_tokens(tokenizer, token_ids)
    stopped = GrpcRequest(
        server,
        text_input=prompt,
        sampling_parameters={**params, "stop": [stop]},
        stream=stream,
        exclude_input_in_output=True,
    ).result()
    assert stream_text(stopped) == text[: text.index(stop)]
    assert stopped[-1].finish_reason == "stop"


def _string_across_tokens(tokenizer: Any, token_ids: list[int]) -> str:
    """The end of one token, the next, and the beginning of a third, from the middle of the text."""
    pieces = [tokenizer.decode([token_id]) for token_id in token_ids]
    middle = next(i for i in range(10, len(pieces) - 1) if len(pieces[i - 1]) > 2 and len(pieces[i + 1]) > 2)
    return str(pieces[middle - 1][-2:] + pieces[middle] + pieces[middle + 1][:2])


def test_a_stop_string_that_never_completes_is_sent_after_all(server: TritonServer) -> None:
    params = {"temperature": 0, "max_tokens": 24}
    prompt = "Once upon a time, in a small village,"
    text = stream_text(GrpcRequest(server, text_input=prompt, sampling_parameters=params, stream=True).result())
    held_back = {**params, "stop": [text[-6:] + "#never#"]}
    assert (
        stream_text(GrpcRequest(server, text_input=prompt, sampling_parameters=held_back, stream=True).result()) == text
    )


def test_32_streams_at_once_give_transformers_own_tokens(server: TritonServer, tokenizer: Any) -> None:
    prompts = [f"Fact number {number} about the sea" + " and the sky" * number + ":" for number in range(32)]
    params = {"temperature": 0, "max_tokens": 20}
    together = [GrpcRequest(server, text_input=p, sampling_parameters=params, stream=True) for p in prompts]
    token_ids = []
    for request in together:
        responses = request.result()
        stream_text(responses)
        token_ids.append([token_id for response in responses for token_id in response.token_ids])
    oracle = TransformersOracle(resolve_model(None))
    assert token_ids == [oracle.greedy(tokenizer(p)["input_ids"], 20) for p in prompts]
