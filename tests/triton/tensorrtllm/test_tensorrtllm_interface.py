"""The interface of Triton's TensorRT-LLM backend, by its documentation: same models, same clients, same answers.

Clients are Triton's own. The text model has another name than in the repository that we ship, and its tokenizer is of
the kind that is hardest to stream.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend.triton.model_config import write_model_repository
from deepinfer_backend.triton.server import TritonServer
from deepinfer_backend.triton.tensorrtllm.repository import MODEL_NAMES, write_tensorrtllm_models
from tests.support.byte_fallback_model import byte_fallback_tokenizer, make_byte_fallback_model
from tests.support.oracle import TransformersOracle
from tests.support.tensorrtllm_clients import (
    PROTOCOLS,
    STREAMING_PROTOCOLS,
    GrpcStream,
    Protocol,
    grpc_stream,
    http_generate,
    infer,
)
from tests.support.triton_server import START_TIMEOUT_S, engine_process_ids, free_ports, read_metrics, wait_until
from tests.support.vllm_clients import Outputs, RequestFailed

TEXT_MODEL = "small"
CLASSIC = "classic"
TEXT_MODELS = ["ensemble", "tensorrt_llm_bls"]
PROMPT = "the sea is blue"
ANSWER_FORM = " the (sea|sky) is 🌊, (blue|海) 🎉é sky "
LONG = 1900

# What the documentation lists as inputs and outputs of the ensemble (and of tensorrt_llm_bls): name → (type, dims).
INPUTS = {
    "text_input": ("STRING", [1]),
    "decoder_text_input": ("STRING", [1]),
    "max_tokens": ("INT32", [1]),
    "num_return_sequences": ("INT32", [1]),
    "bad_words": ("STRING", [-1]),
    "stop_words": ("STRING", [-1]),
    "exclude_input_in_output": ("BOOL", [1]),
    "end_id": ("INT32", [1]),
    "pad_id": ("INT32", [1]),
    "top_k": ("INT32", [1]),
    "top_p": ("FP32", [1]),
    "temperature": ("FP32", [1]),
    "length_penalty": ("FP32", [1]),
    "repetition_penalty": ("FP32", [1]),
    "min_tokens": ("INT32", [1]),
    "presence_penalty": ("FP32", [1]),
    "frequency_penalty": ("FP32", [1]),
    "seed": ("UINT64", [1]),
    "return_log_probs": ("BOOL", [1]),
    "return_context_logits": ("BOOL", [1]),
    "return_generation_logits": ("BOOL", [1]),
    "return_perf_metrics": ("BOOL", [1]),
    "return_num_input_tokens": ("BOOL", [1]),
    "return_num_output_tokens": ("BOOL", [1]),
    "beam_width": ("INT32", [1]),
    "stream": ("BOOL", [1]),
    "prompt_embedding_table": ("FP16", [-1, -1]),
    "prompt_table_extra_id": ("UINT64", [1]),
    "prompt_vocab_size": ("INT32", [1]),
    "embedding_bias_words": ("STRING", [-1]),
    "embedding_bias_weights": ("FP32", [-1]),
    "lora_task_id": ("UINT64", [1]),
    "lora_weights": ("FP16", [-1, -1]),
    "lora_config": ("INT32", [-1, 3]),
    "guided_decoding_guide_type": ("STRING", [1]),
    "guided_decoding_guide": ("STRING", [1]),
}
PERF_METRICS = {
    "kv_cache_alloc_new_blocks": ("INT32", [1]),
    "kv_cache_reused_blocks": ("INT32", [1]),
    "kv_cache_alloc_total_blocks": ("INT32", [1]),
    "arrival_time_ns": ("INT64", [1]),
    "first_scheduled_time_ns": ("INT64", [1]),
    "first_token_time_ns": ("INT64", [1]),
    "last_token_time_ns": ("INT64", [1]),
    "acceptance_rate": ("FP32", [1]),
    "total_accepted_draft_tokens": ("INT32", [1]),
    "total_draft_tokens": ("INT32", [1]),
}
OUTPUTS = {
    "text_output": ("STRING", [-1]),
    "cum_log_probs": ("FP32", [-1]),
    "output_log_probs": ("FP32", [-1, -1]),
    "context_logits": ("FP32", [-1, -1]),
    "generation_logits": ("FP32", [-1, -1, -1]),
    "batch_index": ("INT32", [1]),
    "sequence_index": ("INT32", [1]),
    **PERF_METRICS,
    "num_input_tokens": ("INT32", [1]),
    "num_output_tokens": ("INT32", [1]),
}
# Flag → the outputs that it asks for.
FLAGS = {
    "return_log_probs": ["cum_log_probs", "output_log_probs"],
    "return_perf_metrics": list(PERF_METRICS),
    "return_num_input_tokens": ["num_input_tokens"],
    "return_num_output_tokens": ["num_output_tokens"],
}
ALL_FLAGS: dict[str, Any] = dict.fromkeys(FLAGS, True)
COMBINATIONS = [
    frozenset(itertools.compress(FLAGS, chosen)) for chosen in itertools.product((False, True), repeat=len(FLAGS))
]
# Each combination by one protocol, and none and all by every one.
CASES = [
    (protocol, flags)
    for index, flags in enumerate(COMBINATIONS)
    for place, protocol in enumerate(PROTOCOLS)
    if place == index % len(PROTOCOLS) or flags in (COMBINATIONS[0], COMBINATIONS[-1])
]

# An ensemble as the backend's users have them, all three steps.
CLASSIC_CONFIG = """
name: "classic"
platform: "ensemble"
max_batch_size: 8
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "num_return_sequences" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "guided_decoding_guide_type" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "guided_decoding_guide" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [
  {
    model_name: "preprocessing" model_version: -1
    input_map { key: "QUERY" value: "text_input" }
    input_map { key: "REQUEST_OUTPUT_LEN" value: "max_tokens" }
    output_map { key: "REQUEST_INPUT_LEN" value: "_REQUEST_INPUT_LEN" }
    output_map { key: "INPUT_ID" value: "_INPUT_ID" }
    output_map { key: "REQUEST_DECODER_INPUT_LEN" value: "_REQUEST_DECODER_INPUT_LEN" }
    output_map { key: "DECODER_INPUT_ID" value: "_DECODER_INPUT_ID" }
    output_map { key: "REQUEST_OUTPUT_LEN" value: "_REQUEST_OUTPUT_LEN" }
    output_map { key: "STOP_WORDS_IDS" value: "_STOP_WORDS_IDS" }
    output_map { key: "BAD_WORDS_IDS" value: "_BAD_WORDS_IDS" }
    output_map { key: "EMBEDDING_BIAS" value: "_EMBEDDING_BIAS" }
    output_map { key: "OUT_END_ID" value: "_END_ID" }
    output_map { key: "OUT_PAD_ID" value: "_PAD_ID" }
    output_map { key: "OUT_PROMPT_TABLE_EXTRA_IDS" value: "_EXTRA_IDS" }
  },
  {
    model_name: "tensorrt_llm" model_version: -1
    input_map { key: "input_ids" value: "_INPUT_ID" }
    input_map { key: "decoder_input_ids" value: "_DECODER_INPUT_ID" }
    input_map { key: "input_lengths" value: "_REQUEST_INPUT_LEN" }
    input_map { key: "decoder_input_lengths" value: "_REQUEST_DECODER_INPUT_LEN" }
    input_map { key: "exclude_input_in_output" value: "exclude_input_in_output" }
    input_map { key: "request_output_len" value: "_REQUEST_OUTPUT_LEN" }
    input_map { key: "end_id" value: "_END_ID" }
    input_map { key: "pad_id" value: "_PAD_ID" }
    input_map { key: "embedding_bias" value: "_EMBEDDING_BIAS" }
    input_map { key: "stop_words_list" value: "_STOP_WORDS_IDS" }
    input_map { key: "bad_words_list" value: "_BAD_WORDS_IDS" }
    input_map { key: "prompt_table_extra_ids" value: "_EXTRA_IDS" }
    input_map { key: "streaming" value: "stream" }
    input_map { key: "num_return_sequences" value: "num_return_sequences" }
    input_map { key: "guided_decoding_guide_type" value: "guided_decoding_guide_type" }
    input_map { key: "guided_decoding_guide" value: "guided_decoding_guide" }
    output_map { key: "output_ids" value: "_TOKENS_BATCH" }
    output_map { key: "sequence_length" value: "_SEQUENCE_LENGTH" }
  },
  {
    model_name: "postprocessing" model_version: -1
    input_map { key: "TOKENS_BATCH" value: "_TOKENS_BATCH" }
    input_map { key: "SEQUENCE_LENGTH" value: "_SEQUENCE_LENGTH" }
    output_map { key: "OUTPUT" value: "text_output" }
  }
] }
"""


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_fallback_model(tmp_path_factory.mktemp("text_model"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("tensorrtllm")
    repository = folder / "models"
    arguments = {"model": str(text_model), "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 1024}
    write_model_repository(repository, {TEXT_MODEL: arguments})
    write_tensorrtllm_models(repository, TEXT_MODEL)
    (repository / CLASSIC / "1").mkdir(parents=True)
    (repository / CLASSIC / "config.pbtxt").write_text(CLASSIC_CONFIG, encoding="utf-8")
    http_port, grpc_port, metrics_port = free_ports(3)
    with TritonServer(
        repository,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_file=folder / "tritonserver.log",
    ) as running:
        running.wait_ready(2 * START_TIMEOUT_S)  # five processes
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_fallback_tokenizer()


@pytest.fixture(scope="module")
def oracle(text_model: Path) -> TransformersOracle:
    return TransformersOracle(text_model)


@pytest.fixture(scope="module")
def prompt_ids(tokenizer: Any) -> list[int]:
    token_ids: list[int] = tokenizer(PROMPT)["input_ids"]
    return token_ids


def ask(
    server: TritonServer, model: str = "ensemble", protocol: Protocol = grpc_stream, **inputs: Any
) -> list[Outputs]:
    """All responses; the prompt is left out of them unless the inputs say otherwise."""
    return protocol(server, model, {"text_input": PROMPT, "max_tokens": 8, "exclude_input_in_output": True, **inputs})


def ask_tokens(server: TritonServer, input_ids: list[int], max_tokens: int, **inputs: Any) -> list[Outputs]:
    tensors = {
        "input_ids": input_ids,
        "input_lengths": len(input_ids),
        "request_output_len": max_tokens,
        "exclude_input_in_output": True,
    }
    return grpc_stream(server, "tensorrt_llm", {**tensors, **inputs})


def text_of(responses: list[Outputs]) -> str:
    assert all(len(response["text_output"]) == 1 for response in responses)
    return "".join(response["text_output"][0] for response in responses)


def in_form(form: str, max_tokens: int = 64) -> dict[str, Any]:
    """Inputs that force the text into a form."""
    return {"guided_decoding_guide_type": "regex", "guided_decoding_guide": form, "max_tokens": max_tokens}


def case_name(case: Any) -> str:
    return case.__name__ if callable(case) else "+".join(sorted(case)).replace("return_", "") or "none"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_inputs_and_outputs_are_declared_as_documented(server: TritonServer, model: str) -> None:
    url = f"http://localhost:{server.http_port}/v2/models/{model}/config"
    with urllib.request.urlopen(url, timeout=10) as response:
        config = json.load(response)
    for kind, expected in (("input", INPUTS), ("output", OUTPUTS)):
        declared = {
            each["name"]: (each["data_type"].removeprefix("TYPE_"), [int(dim) for dim in each["dims"]])
            for each in config[kind]
        }
        assert {name: declared.get(name) for name in expected} == expected
    required = {each["name"] for each in config["input"] if not each.get("optional")}
    assert required == {"text_input", "max_tokens"}


def test_all_models_share_one_engine(server: TritonServer) -> None:
    assert len(engine_process_ids(server)) == 1
    for model in (*MODEL_NAMES, TEXT_MODEL, CLASSIC):
        assert server.is_model_ready(model), model


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_without_a_word_about_sampling_the_text_is_the_text_models_greedy_one(
    server: TritonServer, model: str, protocol: Protocol
) -> None:
    sampling = json.dumps({"temperature": 0, "max_tokens": 8})
    url = f"http://localhost:{server.http_port}/v2/models/{TEXT_MODEL}/generate"
    body = {"text_input": PROMPT, "sampling_parameters": sampling, "exclude_input_in_output": True}
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as response:
        expected = json.load(response)["text_output"]
    assert text_of(ask(server, model, protocol)) == expected
    assert text_of(ask(server, model, protocol, top_k=1, temperature=0.7)) == expected


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_prompt_stands_in_front_unless_excluded(server: TritonServer, model: str) -> None:
    answer = text_of(ask(server, model))
    inputs = {"text_input": PROMPT, "max_tokens": 8}
    assert text_of(http_generate(server, model, inputs)) == PROMPT + answer
    assert text_of(http_generate(server, model, {**inputs, "exclude_input_in_output": False})) == PROMPT + answer


def test_tokens_are_transformers_own(server: TritonServer, oracle: TransformersOracle, prompt_ids: list[int]) -> None:
    expected = oracle.greedy(prompt_ids, 12)
    [response] = ask_tokens(server, prompt_ids, 12)
    assert response["output_ids"] == expected
    assert response["sequence_length"] == [12]
    streamed = ask_tokens(server, prompt_ids, 12, streaming=True)
    assert len(streamed) > 1
    assert [id_ for each in streamed for id_ in each["output_ids"]] == expected
    [with_prompt] = ask_tokens(server, prompt_ids, 12, exclude_input_in_output=False)
    assert with_prompt["output_ids"] == prompt_ids + expected
    assert with_prompt["sequence_length"] == [len(prompt_ids) + 12]


@pytest.mark.parametrize("protocol", STREAMING_PROTOCOLS)
@pytest.mark.parametrize("model", [*TEXT_MODELS, CLASSIC])
def test_a_stream_has_whole_characters_and_all_spaces(server: TritonServer, model: str, protocol: Protocol) -> None:
    whole = text_of(ask(server, model, **in_form(ANSWER_FORM)))
    assert re.fullmatch(ANSWER_FORM, whole)
    pieces = ask(server, model, protocol, stream=True, **in_form(ANSWER_FORM))
    assert len(pieces) > 5
    assert text_of(pieces) == whole
    assert all("\N{REPLACEMENT CHARACTER}" not in piece["text_output"][0] for piece in pieces)


def test_an_ensemble_of_ones_own_has_all_sequences_and_the_prompt(server: TritonServer) -> None:
    inputs = in_form(ANSWER_FORM)
    [response] = ask(server, CLASSIC, num_return_sequences=2, **inputs)
    assert [bool(re.fullmatch(ANSWER_FORM, text)) for text in response["text_output"]] == [True, True]
    [response] = ask(server, CLASSIC, exclude_input_in_output=False, **inputs)
    assert re.fullmatch(" ?" + re.escape(PROMPT) + ANSWER_FORM, response["text_output"][0])


@pytest.mark.parametrize(("protocol", "flags"), CASES, ids=case_name)
def test_optional_outputs_come_exactly_when_asked_for(
    server: TritonServer, prompt_ids: list[int], protocol: Protocol, flags: frozenset[str]
) -> None:
    stream = protocol in STREAMING_PROTOCOLS
    # Both ways to not ask: false, and silence.
    inputs: dict[str, Any] = {flag: flag in flags for flag in FLAGS if flag in flags or len(flags) % 2}
    responses = ask(server, "ensemble", protocol, stream=stream, **inputs)
    assert responses and (stream or len(responses) == 1)  # of a slow sender a stream has few, longer ones
    asked = {name for flag in flags for name in FLAGS[flag]}
    for response in responses:
        assert response.keys() == {"text_output", "batch_index", "sequence_index"} | asked
        assert (response["batch_index"], response["sequence_index"]) == ([0], [0])
    check_values(responses, asked, len(prompt_ids))


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_all_optional_outputs_at_once(server: TritonServer, prompt_ids: list[int], model: str, stream: bool) -> None:
    responses = ask(server, model, stream=stream, **ALL_FLAGS)
    asked = {name for outputs in FLAGS.values() for name in outputs}
    assert all(response.keys() == {"text_output", "batch_index", "sequence_index"} | asked for response in responses)
    check_values(responses, asked, len(prompt_ids))


def check_values(responses: list[Outputs], names: set[str], num_prompt_tokens: int) -> None:
    if "num_input_tokens" in names:
        assert all(response["num_input_tokens"] == [num_prompt_tokens] for response in responses)
    if "num_output_tokens" in names:
        assert sum(response["num_output_tokens"][0] for response in responses) == 8
    if "output_log_probs" in names:
        log_probs = [value for response in responses for value in response["output_log_probs"]]
        assert len(log_probs) == 8
        assert all(-20.0 < value < 0.0 for value in log_probs)
        assert responses[-1]["cum_log_probs"] == [pytest.approx(math.fsum(log_probs), abs=1e-3)]
    if "arrival_time_ns" in names:
        last = {name: values[0] for name, values in responses[-1].items() if name in PERF_METRICS}
        assert last["arrival_time_ns"] <= last["first_scheduled_time_ns"] <= last["first_token_time_ns"]
        assert last["first_token_time_ns"] < last["last_token_time_ns"]
        new, reused = last["kv_cache_alloc_new_blocks"], last["kv_cache_reused_blocks"]
        assert last["kv_cache_alloc_total_blocks"] == new + reused > 0
        assert last["acceptance_rate"] == last["total_draft_tokens"] == last["total_accepted_draft_tokens"] == 0


def test_outputs_have_the_shapes_that_clients_index(server: TritonServer) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 4, "num_return_sequences": 2, **ALL_FLAGS}
    for model in TEXT_MODELS:
        stream = GrpcStream(server, model, inputs)
        [arrays] = stream.rest()
        stream.close()
        shapes = {name: array.shape for name, array in arrays.items()}
        assert shapes["text_output"] == (2,)  # as_numpy("text_output")[0].decode()
        assert shapes["batch_index"] == (1, 1)  # as_numpy("batch_index")[0][0]
        assert shapes["sequence_index"][0] == 1
        assert shapes["cum_log_probs"] == (1, 2)
        assert shapes["output_log_probs"] == (1, 2, 4)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_only_requested_outputs_come(server: TritonServer, model: str) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 2, "return_log_probs": True}
    stream = GrpcStream(server, model, inputs, outputs=["text_output", "cum_log_probs"])
    [arrays] = stream.rest()
    stream.close()
    assert arrays.keys() == {"text_output", "cum_log_probs"}


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_last_response_of_a_stream_is_the_one_with_the_final_flag(server: TritonServer, model: str) -> None:
    stream = GrpcStream(server, model, {"text_input": PROMPT, "max_tokens": 48, "stream": True})
    seen = []
    is_final = False
    while not is_final:
        arrays, is_final = stream.next()
        seen.append(bool(arrays))
    stream.close()
    assert len(seen) >= 2  # several steps may share a response while the machine has other work
    assert seen[:-1] == [True] * (len(seen) - 1)


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("protocol", [grpc_stream, http_generate])
def test_several_sequences_and_beams(server: TritonServer, model: str, protocol: Protocol) -> None:
    [sampled] = ask(server, model, protocol, num_return_sequences=3, temperature=2.0, top_p=0.9, seed=3)
    assert len(set(sampled["text_output"])) == 3
    [beams] = ask(server, model, protocol, beam_width=3)
    assert len(beams["text_output"]) == len(beams["sequence_index"]) == 3
    [best] = ask(server, model, protocol, beam_width=3, num_return_sequences=1)
    assert best["text_output"] == beams["text_output"][:1]
    with pytest.raises(RequestFailed, match="beam_width is 3: must be 1 when stream"):
        ask(server, model, beam_width=3, stream=True)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_stream_of_several_sequences_tells_which(server: TritonServer, model: str) -> None:
    inputs: dict[str, Any] = {"num_return_sequences": 2, "temperature": 2.0, "top_p": 0.9, "seed": 3}
    [whole] = ask(server, model, **inputs)
    texts = {0: "", 1: ""}
    for response in ask(server, model, stream=True, **inputs):
        texts[response["sequence_index"][0]] += response["text_output"][0]
    assert [texts[0], texts[1]] == whole["text_output"]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_seed_decides(server: TritonServer, model: str) -> None:
    def sample(seed: int) -> str:
        return text_of(ask(server, model, max_tokens=16, temperature=2.0, top_p=0.95, seed=seed))

    assert sample(5) == sample(5)
    assert len({sample(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_stop_words_are_found_across_tokens_and_cut_off(server: TritonServer, model: str, protocol: Protocol) -> None:
    inputs = in_form(" the sea is blue")
    stream = protocol in STREAMING_PROTOCOLS
    for words in (["a is b"], ["blue sky", "a is b"]):
        assert text_of(ask(server, model, protocol, stream=stream, stop_words=words, **inputs)) == " the se"
    # What clients send that want none.
    assert text_of(ask(server, model, protocol, stop_words=[""], bad_words=[""], **inputs)) == " the sea is blue"


@pytest.mark.parametrize("protocol", [grpc_stream, http_generate])
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_bad_words_and_biases_decide_between_words(server: TritonServer, model: str, protocol: Protocol) -> None:
    inputs = in_form("( sea| sky)")

    def choose(words: list[str], weights: list[float], **more: Any) -> str:
        biases = {"embedding_bias_words": words, "embedding_bias_weights": weights}
        return text_of(ask(server, model, protocol, **biases, **inputs, **more))

    assert choose(["sky"], [90.0]) == " sky"
    assert choose(["sea"], [90.0]) == " sea"
    assert choose(["sky", "sea"], [90.0, 80.0]) == " sky"
    assert choose(["sky", "sea"], [90.0, 80.0], bad_words=["sky"]) == " sea"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_end_id_ends_the_text_and_min_tokens_holds_it_off(
    server: TritonServer, oracle: TransformersOracle, prompt_ids: list[int], model: str
) -> None:
    tokens = oracle.greedy(prompt_ids, 12)
    end_id = next(token for token in tokens[3:] if token not in tokens[:3])
    place = tokens.index(end_id)

    def num_tokens(**inputs: Any) -> int:
        [response] = ask(server, model, max_tokens=12, end_id=end_id, return_num_output_tokens=True, **inputs)
        return int(response["num_output_tokens"][0])

    assert num_tokens() == place
    assert num_tokens(min_tokens=place + 2) > place + 1


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize(
    ("guide_type", "guide", "form"),
    [
        ("json", None, r"[\[{].*"),
        ("json_schema", json.dumps({"type": "boolean"}), "true|false"),
        ("regex", "(sea|sky){2}", "(sea|sky){2}"),
        ("ebnf_grammar", 'root ::= "sea" | "sky"', "sea|sky"),
    ],
)
def test_guided_decoding(server: TritonServer, model: str, guide_type: str, guide: str | None, form: str) -> None:
    guides: dict[str, Any] = {"guided_decoding_guide_type": guide_type}
    if guide is not None:
        guides["guided_decoding_guide"] = guide
    assert re.fullmatch(form, text_of(ask(server, model, max_tokens=32, **guides)), re.DOTALL)


def num_running(server: TritonServer) -> float:
    return read_metrics(server, TEXT_MODEL)["deepinfer_requests_running"]


def long_request(model: str) -> dict[str, Any]:
    inputs = {"temperature": 1.0, "min_tokens": LONG}
    if model == "tensorrt_llm":
        return {"input_ids": [260, 261], "input_lengths": 2, "request_output_len": LONG, "streaming": True, **inputs}
    return {"text_input": PROMPT, "max_tokens": LONG, "stream": True, **inputs}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_stop_by_the_requests_id_ends_it(server: TritonServer, model: str) -> None:
    running = GrpcStream(server, model, long_request(model), request_id="to-stop")
    running.next()
    # As the backend's own client writes it.
    stop = {"input_ids": np.empty((1, 1)), "input_lengths": 0, "request_output_len": 0, "stop": True}
    stopping = GrpcStream(server, "tensorrt_llm", stop, request_id="to-stop")
    assert stopping.rest() == []
    stopping.close()
    with pytest.raises(RequestFailed, match="CANCELLED"):
        running.rest()
    running.close()
    wait_until(lambda: num_running(server) == 0, 10, "nothing runs")


def test_a_stop_needs_an_id(server: TritonServer) -> None:
    stopping = GrpcStream(server, "tensorrt_llm", {"stop": True})
    with pytest.raises(RequestFailed, match="INVALID_ARG: stop is true: the request must have the id"):
        stopping.rest()
    stopping.close()


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "tensorrt_llm"])
def test_a_client_that_cancels_ends_its_request(server: TritonServer, model: str) -> None:
    stream = GrpcStream(server, model, long_request(model))
    stream.next()
    wait_until(lambda: num_running(server) == 1, 10, "it is seen to run")
    stream.close(cancel=True)
    wait_until(lambda: num_running(server) == 0, 10, "nothing runs")


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_timeout_and_priority_reach_the_engine_through_the_ensemble(server: TritonServer, model: str) -> None:
    stream = GrpcStream(server, model, long_request(model), timeout_us=200_000)
    with pytest.raises(RequestFailed, match=r"CANCELLED: timeout of 0.2 s passed"):
        stream.rest()
    stream.close()
    stream = GrpcStream(server, model, {"text_input": PROMPT, "max_tokens": 2}, priority=7)
    assert len(stream.rest()) == 1
    stream.close()


COMMON_REFUSED: dict[str, Any] = {
    "return_context_logits": True,
    "return_generation_logits": True,
    "prompt_embedding_table": np.ones((1, 2, 3)),
    "prompt_vocab_size": 7,
    "lora_task_id": 5,
    "lora_weights": np.ones((1, 2, 3)),
    "lora_config": np.ones((1, 1, 3)),
}
ENSEMBLE_REFUSED: dict[str, Any] = {**COMMON_REFUSED, "decoder_text_input": "a", "prompt_table_extra_id": 9}
REFUSED: dict[str, dict[str, Any]] = {
    "ensemble": ENSEMBLE_REFUSED,
    "tensorrt_llm_bls": {
        **ENSEMBLE_REFUSED,
        "image_input": np.ones((1, 1, 3, 2, 2)),
        "image_url_input": "http://localhost/image.png",
        "video_bytes_input": np.ones((1, 1, 2, 2, 3)),
        "num_draft_tokens": 4,
        "use_draft_logits": True,
    },
    "tensorrt_llm": {
        **COMMON_REFUSED,
        "encoder_input_features": np.ones((1, 2, 3)),
        "encoder_output_lengths": 3,
        "draft_input_ids": [4, 5],
        "draft_logits": np.ones((1, 2, 3)),
        "draft_acceptance_threshold": 0.5,
        "decoder_input_ids": [4, 5],
        "runtime_top_p_decay": 0.5,
        "beam_search_diversity_rate": 0.5,
        "prompt_table_extra_ids": [4, 5],
        "cross_attention_mask": np.ones((1, 2, 3)),
        "mrope_rotary_cos_sin": [1.0],
        "mrope_position_deltas": 1,
        "context_phase_params": [1, 2],
        "skip_cross_attn_blocks": True,
        "retention_token_range_starts": [1],
        "retention_token_range_ends": [1],
        "retention_token_range_priorities": [1],
        "retention_token_range_durations_ms": [1],
        "retention_decode_priority": 1,
        "retention_decode_duration_ms": 1,
        "lookahead_window_size": 1,
        "lookahead_ngram_size": 1,
        "lookahead_verification_set_size": 1,
    },
}
# What an ensemble calls otherwise than its first step does.
STEPS_OWN_NAMES = {"decoder_text_input": "DECODER_QUERY", "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID"}


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(server: TritonServer, model: str) -> None:
    for name, value in REFUSED[model].items():
        shown = STEPS_OWN_NAMES[name] if model == "ensemble" and name in STEPS_OWN_NAMES else name
        with pytest.raises(RequestFailed, match=rf"INVALID_ARG: {shown} "):
            if model == "tensorrt_llm":
                ask_tokens(server, [260, 261], 2, **{name: value})
            else:
                ask(server, model, **{name: value})


def test_the_page_on_migrating_names_what_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text(encoding="utf-8")
    names = {name for tensors in REFUSED.values() for name in tensors}
    assert {name for name in names if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_several_prompts_in_one_request_are_refused_with_their_shape(server: TritonServer, model: str) -> None:
    inputs = {"text_input": [["a"], ["b"]], "max_tokens": [[2], [2]]}
    with pytest.raises(RequestFailed, match=r"INVALID_ARG: .* has shape \[2, \d+\]: must be .*one prompt in a"):
        grpc_stream(server, model, inputs)


@pytest.mark.parametrize("is_grpc", [True, False], ids=["grpc", "http"])
def test_preprocessing_alone(server: TritonServer, tokenizer: Any, is_grpc: bool) -> None:
    texts = ["the sea 🌊", "the sea is blue, the sky"]
    inputs = {
        "QUERY": [[text] for text in texts],
        "REQUEST_OUTPUT_LEN": [[5], [6]],
        "STOP_WORDS_DICT": [["blue", "sky."], ["海", ""]],
    }
    arrays = infer(server, "preprocessing", inputs, is_grpc=is_grpc)
    for text, ids, length in zip(texts, arrays["INPUT_ID"].tolist(), arrays["REQUEST_INPUT_LEN"].tolist(), strict=True):
        assert ids[: length[0]] == tokenizer(text)["input_ids"]
    assert arrays["REQUEST_OUTPUT_LEN"].tolist() == [[5], [6]]
    assert arrays["OUT_END_ID"].tolist() == [[tokenizer.eos_token_id]] * 2
    assert arrays["STOP_WORDS_IDS"].shape[:2] == (2, 2)
    assert arrays["BAD_WORDS_IDS"].shape == (2, 2, 0)
    with pytest.raises(RequestFailed, match="INVALID_ARG: IMAGE_URL is set"):
        infer(server, "preprocessing", {**inputs, "IMAGE_URL": [["a"], ["b"]]}, is_grpc=is_grpc)


@pytest.mark.parametrize("is_grpc", [True, False], ids=["grpc", "http"])
def test_postprocessing_alone(server: TritonServer, tokenizer: Any, is_grpc: bool) -> None:
    token_ids = tokenizer("the sea 🌊 is blue")["input_ids"]
    inputs = {"TOKENS_BATCH": [[token_ids, token_ids]], "SEQUENCE_LENGTH": [[len(token_ids), 2]]}
    arrays = infer(server, "postprocessing", inputs, is_grpc=is_grpc)
    assert [text.decode() for text in arrays["OUTPUT"].tolist()] == [" the sea 🌊 is blue", " the sea"]
    with pytest.raises(RequestFailed, match="INVALID_ARG: SEQUENCE_LENGTH has 99"):
        infer(server, "postprocessing", {**inputs, "SEQUENCE_LENGTH": [[99, 2]]}, is_grpc=is_grpc)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_bad_requests_do_not_disturb_others(server: TritonServer, model: str) -> None:
    expected = text_of(ask(server, model))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"text_input": ""}, "is empty"),
        ({"max_tokens": -1}, "is -1: must be"),
        ({"text_input": "a" * 5000}, "tokens"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"stop_words": [b"\xff"]}, "is not valid UTF-8"),
    ]
    for inputs, message in bad:
        with pytest.raises(RequestFailed, match=message):
            ask(server, model, **inputs)
    assert text_of(ask(server, model)) == expected
