"""The interface of Triton's vLLM backend, by its documentation: same repository, same clients, same answers.

The repository is what one of its users has, but for the word in `backend:`. Clients are Triton's own.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_backend.models.loader import resolve_model
from deepinfer_backend.triton.server import TritonServer
from tests.support.lora import make_random_adapter, merged_model
from tests.support.oracle import TransformersOracle
from tests.support.tiny_text_model import make_tiny_text_model
from tests.support.triton_server import START_TIMEOUT_S, free_ports
from tests.support.vllm_clients import (
    PROTOCOLS,
    STREAMING_PROTOCOLS,
    Outputs,
    Protocol,
    RequestFailed,
    grpc_stream,
    http_generate,
)

MODEL = "vllm_model"
DECLARED_MODEL = "declared"
BARE_MODEL = "bare"
ADAPTER = "tuned"
PROMPT = "The three largest cities of Italy are"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}

# Optional output → the input that asks for it.
FLAGS = {
    name: f"return_{name}"
    for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
}
COMBINATIONS = [
    frozenset(itertools.compress(FLAGS, chosen)) for chosen in itertools.product((False, True), repeat=len(FLAGS))
]
# Each combination by one protocol, and none and all by every one.
CASES = [
    (protocol, names)
    for index, names in enumerate(COMBINATIONS)
    for place, protocol in enumerate(PROTOCOLS)
    if place == index % len(PROTOCOLS) or names in (COMBINATIONS[0], COMBINATIONS[-1])
]

TENSORS = {
    "input": {
        "text_input": ("TYPE_STRING", ["1"]),
        "image": ("TYPE_STRING", ["-1"]),
        "stream": ("TYPE_BOOL", ["1"]),
        "sampling_parameters": ("TYPE_STRING", ["1"]),
        "exclude_input_in_output": ("TYPE_BOOL", ["1"]),
        "embedding_request": ("TYPE_STRING", ["1"]),
        **{flag: ("TYPE_BOOL", ["1"]) for flag in FLAGS.values()},
    },
    "output": {
        "text_output": ("TYPE_STRING", ["-1"]),
        "finish_reason": ("TYPE_STRING", ["-1"]),
        "cumulative_logprob": ("TYPE_FP32", ["-1"]),
        "logprobs": ("TYPE_STRING", ["-1"]),
        "num_input_tokens": ("TYPE_UINT32", ["1"]),
        "num_output_tokens": ("TYPE_UINT32", ["-1"]),
    },
}


def write_model(folder: Path, config_pbtxt: str, **files: Any) -> None:
    """A model's folder; `files`: name without .json → what is in it."""
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config_pbtxt, encoding="utf-8")
    for name, content in files.items():
        (folder / "1" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that changes what the model says at once."""
    folder = tmp_path_factory.mktemp("adapters") / ADAPTER
    modules = ["q_proj", "v_proj", "down_proj"]
    return make_random_adapter(resolve_model(None), folder, seed=1, r=8, lora_alpha=128, target_modules=modules)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("vllm")
    write_model(
        folder / "models" / MODEL,
        'backend: "deepinfer"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n',
        model={
            "model": str(resolve_model(None)),
            "dtype": "float",
            "disable_log_requests": "true",
            "disable_log_stats": True,
            "gpu_memory_utilization": "0.5",
            "enforce_eager": "true",
            "tensor_parallel_size": 1,
            "distributed_executor_backend": "mp",
            "max_model_len": "1024",
            "enable_lora": "true",
            "max_lora_rank": 16,
        },
        # As the vLLM backend takes it: from the server's working directory.
        multi_lora={ADAPTER: os.path.relpath(adapter)},
    )
    write_model(
        folder / "models" / DECLARED_MODEL,
        """
        backend: "deepinfer"
        input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] },
                { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
        output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
        instance_group [ { count: 1 kind: KIND_CPU } ]
        parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }
        parameters: { key: "ENABLE_VLLM_HEALTH_CHECK" value: { string_value: "true" } }
        """,
        model={"model": str(make_tiny_text_model(folder)), "block_size": 16},
    )
    write_model(folder / "models" / BARE_MODEL, 'backend: "deepinfer"\n')
    http_port, grpc_port, metrics_port = free_ports(3)
    with TritonServer(
        folder / "models",
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_file=folder / "tritonserver.log",
    ) as running:
        running.wait_ready(2 * START_TIMEOUT_S)  # three models
        yield running


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return TransformersOracle(resolve_model(None))


@pytest.fixture(scope="module")
def merged_answer(tokenizer: Any, adapter: Path) -> str:
    """What PEFT's merged model says."""
    model: Any = merged_model(resolve_model(None), adapter)
    prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=GREEDY["max_tokens"],
        do_sample=False,
        pad_token_id=0,
    )
    return str(tokenizer.decode(tokens[0, prompt.shape[1] :]))


def ask(
    protocol: Protocol,
    server: TritonServer,
    sampling: dict[str, Any] | None = None,
    *,
    model: str = MODEL,
    parameters: dict[str, Any] | None = None,
    **inputs: Any,
) -> list[Outputs]:
    """All responses; `sampling` goes into the tensor."""
    tensors = {"text_input": PROMPT, **inputs}
    if sampling is not None:
        tensors["sampling_parameters"] = json.dumps(sampling)
    return protocol(server, model, tensors, parameters or {})


def text_of(responses: list[Outputs]) -> str:
    assert all(len(response["text_output"]) == 1 for response in responses)
    return "".join(response["text_output"][0] for response in responses)


def answers_in_any_protocol(protocol: Protocol) -> Any:
    return protocol.__name__ if callable(protocol) else "+".join(sorted(protocol)) or "none"


@pytest.mark.parametrize(("protocol", "names"), CASES, ids=answers_in_any_protocol)
def test_optional_outputs_come_exactly_when_asked_for(
    server: TritonServer, tokenizer: Any, protocol: Protocol, names: frozenset[str]
) -> None:
    stream = protocol in STREAMING_PROTOCOLS
    # Both ways to not ask: false, and silence.
    flags: dict[str, Any] = {flag: name in names for name, flag in FLAGS.items() if name in names or len(names) % 2}
    responses = ask(protocol, server, {**GREEDY, "logprobs": 1, "ignore_eos": True}, stream=stream, **flags)
    assert responses and (stream or len(responses) == 1)  # of a slow sender a stream has few, longer ones
    for response in responses:
        assert response.keys() & FLAGS.keys() == names
    check_finish_reasons(responses, names)
    check_counts(responses, names, len(tokenizer(PROMPT)["input_ids"]))
    check_logprobs(responses, names)


def check_finish_reasons(responses: list[Outputs], names: frozenset[str]) -> None:
    if "finish_reason" in names:
        assert [response["finish_reason"] for response in responses[:-1]] == [["None"]] * (len(responses) - 1)
        assert responses[-1]["finish_reason"] == ["length"]


def check_counts(responses: list[Outputs], names: frozenset[str], num_prompt_tokens: int) -> None:
    if "num_input_tokens" in names:
        assert all(response["num_input_tokens"] == [num_prompt_tokens] for response in responses)
    if "num_output_tokens" in names:
        assert sum(response["num_output_tokens"][0] for response in responses) == GREEDY["max_tokens"]


def check_logprobs(responses: list[Outputs], names: frozenset[str]) -> None:
    if "logprobs" not in names:
        return
    positions = [position for response in responses for position in json.loads(response["logprobs"][0])]
    assert len(positions) == GREEDY["max_tokens"]
    for position in positions:
        [(token_id, entry)] = position.items()  # greedy: the token is the likeliest one
        assert int(token_id) >= 0
        assert entry.keys() == {"logprob", "rank", "decoded_token"}
        assert (type(entry["logprob"]), entry["rank"], type(entry["decoded_token"])) == (float, 1, str)
    if "cumulative_logprob" in names:
        total = math.fsum(entry["logprob"] for position in positions for entry in position.values())
        assert responses[-1]["cumulative_logprob"] == [pytest.approx(total, abs=1e-3)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_prompt_stands_in_front_unless_excluded_and_never_in_a_stream(
    server: TritonServer, tokenizer: Any, oracle: TransformersOracle, protocol: Protocol
) -> None:
    expected = tokenizer.decode(oracle.greedy(tokenizer(PROMPT)["input_ids"], GREEDY["max_tokens"]))
    assert text_of(ask(protocol, server, GREEDY)) == PROMPT + expected
    assert text_of(ask(protocol, server, GREEDY, exclude_input_in_output=False)) == PROMPT + expected
    assert text_of(ask(protocol, server, GREEDY, exclude_input_in_output=True)) == expected
    if protocol in STREAMING_PROTOCOLS:
        choices: list[dict[str, Any]] = [{}, {"exclude_input_in_output": True}]
        for inputs in choices:
            deltas = ask(protocol, server, GREEDY, stream=True, **inputs)
            assert len(deltas) > 1
            assert text_of(deltas) == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_that_must_not_exclude_the_prompt_is_an_error(server: TritonServer, protocol: Protocol) -> None:
    with pytest.raises(RequestFailed, match="exclude_input_in_output is false: must be true") as error:
        ask(protocol, server, GREEDY, stream=True, exclude_input_in_output=False)
    assert error.value.before == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sampling_parameters_may_be_request_parameters_and_the_tensor_wins(
    server: TritonServer, protocol: Protocol
) -> None:
    def num_tokens(sampling: dict[str, Any] | None, parameters: dict[str, Any]) -> int:
        responses = ask(protocol, server, sampling, parameters=parameters, return_num_output_tokens=True)
        return int(sum(response["num_output_tokens"][0] for response in responses))

    assert num_tokens(None, {"max_tokens": 2, "ignore_eos": True, "temperature": 0.5}) == 2
    assert num_tokens({"max_tokens": 3, "ignore_eos": True}, {"max_tokens": 2}) == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("is_tensor", [True, False], ids=["tensor", "parameters"])
def test_numbers_may_come_as_text(server: TritonServer, protocol: Protocol, is_tensor: bool) -> None:
    fields = {"temperature": "0", "max_tokens": "15", "n": "2", "ignore_eos": "true", "top_p": "0.9"}
    where: dict[str, Any] = {"sampling": fields} if is_tensor else {"parameters": fields}
    [response] = ask(
        protocol,
        server,
        **where,
        exclude_input_in_output=True,
        return_num_output_tokens=True,
        return_finish_reason=True,
    )
    first, second = response["text_output"]
    assert first == second
    assert response["num_output_tokens"] == [15, 15]
    assert response["finish_reason"] == ["length", "length"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_structured_outputs_is_a_json_string(server: TritonServer, protocol: Protocol) -> None:
    form = json.dumps({"choice": ["Turin", "Naples"]})
    places: list[dict[str, Any]] = [
        {"sampling": {"structured_outputs": form}},
        {"parameters": {"structured_outputs": form}},
    ]
    for where in places:
        [response] = ask(protocol, server, **where, exclude_input_in_output=True, return_finish_reason=True)
        assert response["text_output"][0] in ("Turin", "Naples")
        assert response["finish_reason"] == ["stop"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_adapter_of_multi_lora_json_answers_as_the_merged_model(
    server: TritonServer, merged_answer: str, protocol: Protocol
) -> None:
    fields = {**GREEDY, "lora_name": ADAPTER}
    assert text_of(ask(protocol, server, fields)) == PROMPT + merged_answer
    assert text_of(ask(protocol, server, parameters=fields)) == PROMPT + merged_answer
    assert text_of(ask(protocol, server, GREEDY)) != PROMPT + merged_answer
    with pytest.raises(RequestFailed, match="lora_name is 'unknown': must be one of 'tuned'"):
        ask(protocol, server, {**GREEDY, "lora_name": "unknown"})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_embedding_is_a_json_list(
    server: TritonServer, tokenizer: Any, oracle: TransformersOracle, protocol: Protocol
) -> None:
    hidden = oracle.last_hidden_state(tokenizer(PROMPT)["input_ids"])
    prompts: list[Any] = [PROMPT, tokenizer(PROMPT)["input_ids"]]
    for prompt in prompts:
        request = json.dumps({"input": prompt, "pooling_params": {"dimensions": [8]}})
        [response] = protocol(server, MODEL, {"embedding_request": request}, {})
        embedding = torch.tensor(json.loads(response["text_output"][0]))
        torch.testing.assert_close(embedding, hidden[:8] / hidden[:8].norm(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_model_of_text_refuses_an_image_by_name(server: TritonServer, protocol: Protocol) -> None:
    with pytest.raises(RequestFailed, match=r"INVALID_ARG: image\.0 is set: .*this model takes no images"):
        ask(protocol, server, GREEDY, image=["aGVsbG8=", "aGVsbG8="])


@pytest.mark.parametrize("model", [MODEL, DECLARED_MODEL, BARE_MODEL])
def test_the_configuration_is_completed(server: TritonServer, model: str) -> None:
    url = f"http://localhost:{server.http_port}/v2/models/{model}/config"
    with urllib.request.urlopen(url, timeout=10) as response:
        config = json.load(response)
    assert config["backend"] == "deepinfer"
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"]["decoupled"] is True
    for kind, expected in TENSORS.items():
        tensors = {
            tensor["name"]: (tensor["data_type"], [str(dim) for dim in tensor["dims"]]) for tensor in config[kind]
        }
        if model == DECLARED_MODEL:
            assert tensors.pop("text_input", None) == (("TYPE_STRING", ["-1"]) if kind == "input" else None)
        assert {name: spec for name, spec in expected.items() if name in tensors} == {
            name: spec for name, spec in tensors.items() if name in expected
        }
        assert expected.keys() - tensors.keys() <= {"text_input"}


def test_a_model_without_any_file_is_the_bundled_one(server: TritonServer) -> None:
    assert text_of(ask(http_generate, server, {"max_tokens": 1}, model=BARE_MODEL)).startswith(PROMPT)
    assert "bare/1/model.json is missing" in Path(str(server.log_file)).read_text(encoding="utf-8")


def test_tensors_that_the_file_declares_keep_their_shape(server: TritonServer) -> None:
    assert text_of(ask(grpc_stream, server, {"max_tokens": 1}, model=DECLARED_MODEL)).startswith(PROMPT)
    with pytest.raises(RequestFailed, match=r"text_input has shape \[2\]: must be \[1\]"):
        ask(grpc_stream, server, {"max_tokens": 1}, model=DECLARED_MODEL, text_input=["one", "two"])


def test_what_has_no_effect_is_in_the_log_once(server: TritonServer) -> None:
    log = Path(str(server.log_file)).read_text(encoding="utf-8")
    lines = [line for line in log.splitlines() if "without effect here" in line]
    assert len(lines) == 1
    for name in ("disable_log_requests", "enforce_eager", "distributed_executor_backend"):
        assert name in lines[0]
