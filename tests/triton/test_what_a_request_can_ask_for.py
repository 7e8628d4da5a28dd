"""Everything a request can ask for, on the live server: several sequences, chat, probabilities, forms, adapters."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_backend.models.loader import resolve_model
from deepinfer_backend.triton.server import TritonServer
from tests.support.lora import merged_model
from tests.support.oracle import TransformersOracle
from tests.support.triton_client import GrpcRequest, Response, http_generate, stream_error, stream_text
from tests.triton.conftest import ADAPTER

PROMPT = "The three largest cities of Italy are"
RETURN_ALL: dict[str, Any] = {
    f"return_{name}": True
    for name in (
        "stop_reason",
        "cumulative_logprob",
        "logprobs",
        "prompt_logprobs",
        "num_input_tokens",
        "num_output_tokens",
        "num_cached_tokens",
        "perf_metrics",
    )
}
# Without the unlikely tokens, which a rounding error of the logits can exchange for their neighbours.
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "seed": 40, "ignore_eos": True}
TIMES = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"]


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return TransformersOracle(resolve_model(None))


def ask(server: TritonServer, sampling: dict[str, Any], **inputs: Any) -> list[Response]:
    return GrpcRequest(server, text_input=PROMPT, sampling_parameters=sampling, **inputs).result()


def ask_whole(server: TritonServer, sampling: dict[str, Any], **inputs: Any) -> dict[str, list[Any]]:
    [response] = ask(server, sampling, exclude_input_in_output=True, **inputs)
    assert response.error is None and response.is_final
    return response.outputs


def test_eight_streamed_sequences_are_what_eight_seeds_give_alone(server: TritonServer) -> None:
    sampling = {**DRAWN, "max_tokens": 12}
    together = ask(server, sampling={**sampling, "n": 8}, stream=True)
    texts: defaultdict[int, str] = defaultdict(str)
    for response in together:
        [index] = response.outputs["sequence_index"]
        texts[index] += response.text
    assert [response.is_final for response in together] == [False] * (len(together) - 1) + [True]
    assert sum(response.finish_reason == "length" for response in together) == 8
    alone = [ask_whole(server, sampling={**sampling, "seed": 40 + index}) for index in range(8)]
    assert [texts[index] for index in range(8)] == [outputs["text_output"][0] for outputs in alone]
    whole = ask_whole(server, sampling={**sampling, "n": 8}, return_num_output_tokens=True)
    assert whole["text_output"] == [texts[index] for index in range(8)]
    assert whole["sequence_index"] == list(range(8))
    assert whole["num_output_tokens"] == [12] * 8
    assert whole["token_ids"] == [token_id for outputs in alone for token_id in outputs["token_ids"]]


def test_a_stop_string_ends_one_of_several_sequences_and_no_other(server: TritonServer) -> None:
    sampling = {**DRAWN, "max_tokens": 24, "n": 4}
    free = ask_whole(server, sampling=sampling)["text_output"]
    stop = free[2][10:14]
    stopped = ask_whole(server, sampling={**sampling, "stop": [stop]}, return_finish_reason=True)
    assert stopped["text_output"] == [text.split(stop)[0] for text in free]
    assert stopped["finish_reason"] == ["stop" if stop in text else "length" for text in free]


def test_beams_equal_transformers_and_are_not_streamed(
    server: TritonServer, tokenizer: Any, oracle: TransformersOracle
) -> None:
    sampling = {"beam_width": 4, "n": 2, "max_tokens": 16}
    expected = oracle.beam_search(
        tokenizer(PROMPT)["input_ids"], num_beams=4, num_return_sequences=2, max_new_tokens=16
    )
    outputs = ask_whole(server, sampling=sampling, return_num_output_tokens=True)
    assert outputs["token_ids"] == [token_id for tokens in expected for token_id in tokens]
    assert outputs["num_output_tokens"] == [len(tokens) for tokens in expected]
    error = stream_error(ask(server, sampling=sampling, stream=True))
    assert error.startswith("INVALID_ARG: beam_width is 4")


def test_messages_are_what_the_models_own_template_makes_of_them(server: TritonServer, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river in Egypt."}]
    token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    sampling = {"temperature": 0, "max_tokens": 12}
    [by_ids] = GrpcRequest(server, input_ids=token_ids, sampling_parameters=sampling).result()
    [by_messages] = GrpcRequest(
        server, messages=messages, sampling_parameters=sampling, return_num_input_tokens=True
    ).result()
    assert by_messages.outputs["num_input_tokens"] == [len(token_ids)]
    assert by_messages.text == by_ids.text
    status, answer = http_generate(server, messages=json.dumps(messages), temperature=0, max_tokens=12)
    assert (status, answer["text_output"]) == (200, by_ids.text)


def test_additional_outputs_come_only_when_asked_for(server: TritonServer) -> None:
    bare = ask_whole(server, sampling={"max_tokens": 2, "logprobs": 1}, return_finish_reason=False)
    assert sorted(bare) == ["text_output", "token_ids"]
    asked = ask_whole(server, sampling={"max_tokens": 2}, **RETURN_ALL)
    names = {name.removeprefix("return_") for name in RETURN_ALL} - {"perf_metrics"}
    assert set(asked) == {"text_output", "token_ids", "finish_reason", *names, *TIMES}
    named = ask_whole(server, sampling={"max_tokens": 2}, outputs=["text_output", "num_input_tokens"])
    assert set(named) == {"text_output", "num_input_tokens"}


def test_log_probabilities_are_the_models_own(server: TritonServer, tokenizer: Any, oracle: TransformersOracle) -> None:
    sampling = {"temperature": 2.0, "seed": 5, "max_tokens": 8, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    outputs = ask_whole(server, sampling=sampling, **RETURN_ALL)
    prompt_ids, token_ids = tokenizer(PROMPT)["input_ids"], outputs["token_ids"]
    expected = oracle.logprobs([*prompt_ids, *token_ids])
    positions = json.loads(outputs["logprobs"][0])
    chosen = []
    for place, (token_id, entries) in enumerate(zip(token_ids, positions, strict=True), start=len(prompt_ids) - 1):
        entry = entries[str(token_id)]
        chosen.append(entry["logprob"])
        assert entry["logprob"] == pytest.approx(float(expected[place, token_id]), abs=1e-3)
        assert entry["rank"] == 1 + int((expected[place] > expected[place, token_id]).sum())
        assert {str(int(best)) for best in expected[place].topk(2).indices} <= entries.keys()
        assert entry["decoded_token"] == tokenizer.decode([token_id])
    assert outputs["cumulative_logprob"][0] == pytest.approx(math.fsum(chosen), abs=1e-3)
    first, *rest = json.loads(outputs["prompt_logprobs"][0])
    assert first is None
    for place, (token_id, entries) in enumerate(zip(prompt_ids[1:], rest, strict=True)):
        assert entries[str(token_id)]["logprob"] == pytest.approx(float(expected[place, token_id]), abs=1e-3)


def test_counts_and_times_of_a_stream_add_up(server: TritonServer, tokenizer: Any) -> None:
    responses = ask(server, sampling={"max_tokens": 10, "ignore_eos": True}, stream=True, **RETURN_ALL)
    stream_text(responses)
    assert sum(response.outputs["num_output_tokens"][0] for response in responses) == 10
    assert sum(len(json.loads(response.outputs["logprobs"][0])) for response in responses) == 10
    assert all(response.outputs["num_input_tokens"] == [len(tokenizer(PROMPT)["input_ids"])] for response in responses)
    last = responses[-1].outputs
    times = [last[name][0] for name in TIMES]
    assert times == sorted(times) and times[0] > 0
    assert responses[0].outputs["first_token_time_ns"] == last["first_token_time_ns"]


def test_forms_are_kept_by_requests_next_to_free_ones(server: TritonServer) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
    }
    forms: list[Any] = [{"json": schema}, {"regex": "[0-9]{2}-[a-f]{2,4}"}, {"choice": ["yes", "no"]}, None]
    requests = [
        GrpcRequest(
            server,
            text_input="One, please: ",
            sampling_parameters={
                "seed": index,
                "max_tokens": 60,
                **({"structured_outputs": json.dumps(form)} if form else {}),
            },
            stream=True,
        )
        for index in range(3)
        for form in forms
    ]
    for request, form in zip(requests, forms * 3, strict=True):
        responses = request.result()
        text = stream_text(responses)
        if form is None or responses[-1].finish_reason != "stop":
            continue
        if "json" in form:
            assert json.loads(text).keys() == {"name", "age"}
        elif "regex" in form:
            assert re.fullmatch(form["regex"], text)
        else:
            assert text in form["choice"]


def test_a_bad_grammar_fails_its_request_while_others_stream(server: TritonServer) -> None:
    stream = GrpcRequest(
        server, text_input=PROMPT, sampling_parameters={"max_tokens": 60, "ignore_eos": True}, stream=True
    )
    stream.wait_first()
    for form, reason in (({"grammar": "nothing"}, "cannot be used"), ({"regex": "(a"}, "regular expression")):
        error = stream_error(ask(server, sampling={"structured_outputs": form}))
        assert error.startswith("INVALID_ARG: structured_outputs.") and reason in error
    assert len(stream_text(stream.result())) > 0


def test_an_adapter_answers_as_the_merged_model(server: TritonServer, tokenizer: Any, adapter: Path) -> None:
    sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    requests = [
        GrpcRequest(server, text_input=PROMPT, sampling_parameters={**sampling, **extra}, stream=True)
        for extra in ({"lora_name": ADAPTER}, {}, {"lora_name": ADAPTER}, {})
    ]
    answers = [[token_id for response in request.result() for token_id in response.token_ids] for request in requests]
    prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    for answer, folder in zip(answers, (adapter, None, adapter, None), strict=True):
        model: Any = merged_model(resolve_model(None), folder)
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer == expected[0, prompt.shape[1] :].tolist()
    error = stream_error(ask(server, sampling={"lora_name": "tunde"}))
    assert error.startswith("INVALID_ARG: lora_name is 'tunde': must be one of 'tuned'")


def test_an_embedding_is_the_last_hidden_state_scaled_to_length_one(
    server: TritonServer, tokenizer: Any, oracle: TransformersOracle
) -> None:
    [response] = GrpcRequest(server, embedding_request={"input": PROMPT}).result()
    embedding = torch.tensor(json.loads(response.text))
    hidden = oracle.last_hidden_state(tokenizer(PROMPT)["input_ids"])
    torch.testing.assert_close(embedding, hidden / hidden.norm(), atol=1e-4, rtol=0)
    [short] = GrpcRequest(server, embedding_request={"input": PROMPT, "pooling_params": {"dimensions": [8]}}).result()
    torch.testing.assert_close(torch.tensor(json.loads(short.text)), hidden[:8] / hidden[:8].norm(), atol=1e-4, rtol=0)


def test_tokens_in_and_tokens_out_without_text(server: TritonServer, tokenizer: Any) -> None:
    sampling = {"temperature": 0, "max_tokens": 6, "detokenize": False}
    [response] = GrpcRequest(server, input_ids=tokenizer(PROMPT)["input_ids"], sampling_parameters=sampling).result()
    assert response.text == ""
    with_text = ask_whole(server, sampling={"temperature": 0, "max_tokens": 6})
    assert response.token_ids == with_text["token_ids"]
