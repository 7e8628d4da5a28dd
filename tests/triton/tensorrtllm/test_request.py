"""The interfaces of tensorrt_llm and tensorrt_llm_bls: Triton's tensors → GenerateRequest, or what is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.chat import Chat
from deepinfer_backend.engine.input_processor import InputProcessor
from deepinfer_backend.engine.messages import EngineInfo, EngineRequest
from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.triton.generate_request import CancelRequest, GenerateRequest
from deepinfer_backend.triton.model_config import TensorSpec
from deepinfer_backend.triton.tensorrtllm.tensors import TENSORRT_LLM, TENSORRT_LLM_BLS
from tests.support import fake_triton
from tests.support.fake_triton import Request
from tests.support.tokenizers import bundled_tokenizer

from deepinfer_backend.triton.tensorrtllm.request import (  # isort: skip (after fake_triton)
    ModelOptions,
    TensorrtLlmBlsParser,
    TensorrtLlmParser,
)

assert fake_triton

VOCAB_SIZE = 49_152
DTYPES = {
    "TYPE_STRING": np.object_,
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_UINT64": np.uint64,
    "TYPE_UINT8": np.uint8,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
}
SPECS: dict[type[Any], dict[str, TensorSpec]] = {
    TensorrtLlmParser: {spec.name: spec for spec in TENSORRT_LLM.inputs},
    TensorrtLlmBlsParser: {spec.name: spec for spec in TENSORRT_LLM_BLS.inputs},
}
NEEDED: dict[type[Any], dict[str, Any]] = {
    TensorrtLlmParser: {"input_ids": [5, 6, 7], "request_output_len": 8},
    TensorrtLlmBlsParser: {"text_input": "The sea", "max_tokens": 8},
}
BOTH = pytest.mark.parametrize("parser", [TensorrtLlmParser, TensorrtLlmBlsParser])


def tensor(spec: TensorSpec, value: Any) -> NDArray[Any]:
    """As a client sends it: with the batch dimension in front."""
    if isinstance(value, np.ndarray):
        return value
    if spec.data_type == "TYPE_STRING":
        value = [text.encode() for text in ([value] if isinstance(value, str) else value)]
    array = np.array(value, dtype=DTYPES[spec.data_type])
    return array.reshape(1, *(array.shape or (1,)))


def parse(
    parser: type[Any], *, request_id: str = "", options: ModelOptions | None = None, config: Any = (), **values: Any
) -> Any:
    tensors: dict[str, Any] = {name: tensor(SPECS[parser][name], value) for name, value in values.items()}
    made = parser(bundled_tokenizer(), engine_info(), EngineConfig(**dict(config)), options or ModelOptions())
    return made(Request(**tensors), "id", request_id)


def engine_info() -> EngineInfo:
    defaults = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 5}
    return EngineInfo("/nowhere", 4096, VOCAB_SIZE, 500, 16, "cpu", "float32", default_sampling_params={**defaults})


def generate(parser: type[Any], **values: Any) -> GenerateRequest:
    request = parse(parser, **{**NEEDED[parser], **values})
    assert isinstance(request, GenerateRequest)
    return request


def for_engine(request: GenerateRequest) -> EngineRequest:
    return InputProcessor(bundled_tokenizer(), engine_info(), EngineConfig()).process(
        request.request_id,
        request.prompt,
        request.sampling_params,
        stream=request.stream,
        bad_words_token_ids=request.bad_words_token_ids,
    )


def params_of(parser: type[Any], **values: Any) -> SamplingParams:
    """What the engine is told, the model's own defaults included."""
    return for_engine(generate(parser, **values)).sampling_params


def refusal(parser: type[Any], **values: Any) -> str:
    with pytest.raises(InvalidRequestError) as error:
        generate(parser, **values)
    return error.value.message


def word_list(*words: list[int]) -> NDArray[np.int32]:
    """[1, 2, length]: the words' tokens over the offset of each one's end, filled up with -1."""
    flat = [token_id for word in words for token_id in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return np.array([[flat, ends + [-1] * (len(flat) - len(ends))]], dtype=np.int32)


@BOTH
def test_without_a_word_about_sampling_the_answer_is_greedy_whatever_the_models_defaults_are(
    parser: type[Any],
) -> None:
    params = params_of(parser)
    assert (params.temperature, params.repetition_penalty, params.max_tokens) == (0.0, 1.0, 8)
    assert (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.7}, (0.0, 0, 1.0)),
        ({"temperature": 0.7, "top_k": 1}, (0.0, 0, 1.0)),
        ({"temperature": 0.7, "top_k": 1, "top_p": 0.5}, (0.0, 0, 1.0)),
        ({"temperature": 0.7, "top_k": 0, "top_p": 0.0}, (0.0, 0, 1.0)),
        ({"top_k": 5}, (1.0, 5, 1.0)),
        ({"top_p": 0.5}, (1.0, 0, 0.5)),
        ({"temperature": 0.5, "top_k": 7, "top_p": 0.25}, (0.5, 7, 0.25)),
        ({"temperature": 0.0, "top_k": 7}, (0.0, 7, 1.0)),
    ],
)
def test_top_k_and_top_p_turn_sampling_on(given: dict[str, Any], expected: tuple[float, int, float]) -> None:
    params = params_of(TensorrtLlmBlsParser, **given)
    assert (params.temperature, params.top_k, params.top_p) == expected
    renamed = {{"top_k": "runtime_top_k", "top_p": "runtime_top_p"}.get(name, name): given[name] for name in given}
    params = params_of(TensorrtLlmParser, **renamed)
    assert (params.temperature, params.top_k, params.top_p) == expected


@BOTH
def test_penalties_lengths_and_the_seed_are_read_by_newer_and_older_names(parser: type[Any]) -> None:
    given = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    params = params_of(parser, **given, min_tokens=2, seed=2**64 - 1)
    assert {name: getattr(params, name) for name in given} == given
    assert (params.min_tokens, params.seed) == (2, 2**64 - 1)
    params = params_of(parser, min_length=3, random_seed=4)
    assert (params.min_tokens, params.seed) == (3, 4)
    assert "random_seed is 4" in refusal(parser, seed=5, random_seed=4)


@BOTH
def test_the_same_request_without_a_seed_is_the_same_request(parser: type[Any]) -> None:
    assert params_of(parser).seed == params_of(parser).seed == 0


@BOTH
def test_all_beams_are_returned_unless_fewer_are_asked_for(parser: type[Any]) -> None:
    params = params_of(parser, beam_width=4)
    assert (params.beam_width, params.n, params.length_penalty, params.early_stopping) == (4, 4, 0.0, True)
    assert params_of(parser, beam_width=4, num_return_sequences=2).n == 2
    assert params_of(parser, beam_width=1, num_return_sequences=0).n == 1


def test_a_beams_length_and_end_can_be_weighed() -> None:
    params = params_of(TensorrtLlmParser, beam_width=2, len_penalty=1.5, early_stopping=False)
    assert (params.length_penalty, params.early_stopping) == (1.5, False)
    assert params_of(TensorrtLlmBlsParser, beam_width=2, length_penalty=1.5).length_penalty == 1.5


@BOTH
def test_end_id_takes_the_place_of_the_models_own_end_tokens(parser: type[Any]) -> None:
    eos = bundled_tokenizer().eos_token_id
    for given in ({}, {"end_id": -1}):
        params = params_of(parser, **given)
        assert (params.stop_token_ids, params.ignore_eos) == ([], False)
    params = params_of(parser, end_id=198, pad_id=198)
    assert (params.stop_token_ids, params.ignore_eos) == ([198], True)
    params = params_of(parser, end_id=eos, pad_id=eos)
    assert (params.stop_token_ids, params.ignore_eos) == ([eos], False)
    assert f"end_id is {VOCAB_SIZE}: must be 0 to {VOCAB_SIZE - 1}" in refusal(parser, end_id=VOCAB_SIZE)


def test_stop_words_given_as_token_ids_are_found_in_the_text() -> None:
    tokenizer = bundled_tokenizer()
    words = [tokenizer.encode(text) for text in (" the end", "\n\nUser:", "<|im_end|>")]
    params = params_of(TensorrtLlmParser, stop_words_list=word_list(*words))
    assert params.stop == [" the end", "\n\nUser:"]
    assert params.stop_token_ids == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_stop_words_given_as_texts_mean_the_same() -> None:
    params = params_of(TensorrtLlmBlsParser, stop_words=[" the end", "", "<|im_end|>"])
    assert params.stop == [" the end"]
    assert params.stop_token_ids == [bundled_tokenizer().convert_tokens_to_ids("<|im_end|>")]


def test_a_stop_word_that_can_never_be_found_is_refused() -> None:
    assert "stop_words has '<|im_end|>\\n': must be text" in refusal(TensorrtLlmBlsParser, stop_words=["<|im_end|>\n"])
    globe = bundled_tokenizer().encode("🌍")
    assert len(globe) > 2
    message = refusal(TensorrtLlmParser, stop_words_list=word_list(globe[:2]))
    assert f"stop_words_list has the tokens {globe[:2]}" in message
    message = refusal(TensorrtLlmParser, stop_words_list=np.array([[[5, 6], [3, -1]]], np.int32))
    assert "stop_words_list has the offset 3: must be 0 to 2" in message


def test_bad_words_given_as_token_ids_reach_the_engine_as_they_are() -> None:
    request = generate(TensorrtLlmParser, bad_words_list=word_list([10, 11], [12]))
    assert for_engine(request).bad_words_token_ids == [[10, 11], [12]]
    with pytest.raises(InvalidRequestError, match=f"bad_words has token {VOCAB_SIZE}: must be 0 to"):
        for_engine(generate(TensorrtLlmParser, bad_words_list=word_list([VOCAB_SIZE])))
    too_many = word_list(*([[token_id] for token_id in range(65)]))
    assert "bad_words_list has 65 entries: must have at most 64" in refusal(TensorrtLlmParser, bad_words_list=too_many)


def test_bad_words_given_as_texts_are_those_of_the_sampling_parameters() -> None:
    assert params_of(TensorrtLlmBlsParser, bad_words=["cat", ""]).bad_words == ["cat"]


@pytest.mark.parametrize("length", [0, 1])
def test_empty_lists_of_words_are_no_words(length: int) -> None:
    empty = np.full((1, 2, length), -1, np.int32)
    request = generate(TensorrtLlmParser, stop_words_list=empty, bad_words_list=empty)
    assert (request.sampling_params.stop, list(request.bad_words_token_ids)) == ([], [])


def test_a_bias_of_the_whole_vocabulary_biases_the_tokens_that_it_is_not_0_for() -> None:
    biases = np.zeros((1, VOCAB_SIZE), np.float32)
    biases[0, [7, 9, 11]] = [2.5, -3.0, -math.inf]
    request = for_engine(generate(TensorrtLlmParser, embedding_bias=biases))
    assert request.sampling_params.logit_bias == {7: 2.5, 9: -3.0}
    assert request.bad_words_token_ids == [[11]]
    assert generate(TensorrtLlmParser, embedding_bias=biases[:, :0]).sampling_params.logit_bias == {}


@pytest.mark.parametrize(
    ("token_ids", "bias", "message"),
    [
        (range(1025), 1.0, "embedding_bias changes 1025 tokens: must be at most 1024 (max_logit_bias_entries)"),
        ([3], 101.0, "embedding_bias is 101.0 for token 3: must be -100.0 to 100.0, or -inf"),
        ([3], math.nan, "embedding_bias is nan for token 3"),
    ],
)
def test_a_bias_over_the_limits_is_refused_with_the_numbers(token_ids: Any, bias: float, message: str) -> None:
    biases = np.zeros((1, VOCAB_SIZE), np.float32)
    biases[0, list(token_ids)] = bias
    assert refusal(TensorrtLlmParser, embedding_bias=biases).startswith(message)


def test_biased_words_add_up_on_their_tokens() -> None:
    tokenizer = bundled_tokenizer()
    words, weights = [" sea", " sea shore", ""], [2.0, -0.5, 0.0]
    expected: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for token_id in tokenizer.encode(word, add_special_tokens=False):
            expected[token_id] = expected.get(token_id, 0.0) + weight
    params = params_of(TensorrtLlmBlsParser, embedding_bias_words=words, embedding_bias_weights=weights)
    assert params.logit_bias == expected
    message = refusal(TensorrtLlmBlsParser, embedding_bias_words=words, embedding_bias_weights=[1.0])
    assert "embedding_bias_words has 3 entries: must have as many as embedding_bias_weights, 1" in message


@BOTH
@pytest.mark.parametrize(
    ("guide_type", "guide", "expected"),
    [
        ("json", None, {"json_object": True}),
        ("json_schema", '{"type": "object"}', {"json": '{"type": "object"}'}),
        ("regex", "[0-9]+", {"regex": "[0-9]+"}),
        ("ebnf_grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        ("", "", None),
    ],
)
def test_a_guide_is_a_structured_output(
    parser: type[Any], guide_type: str, guide: str | None, expected: dict[str, Any] | None
) -> None:
    given = {"guided_decoding_guide_type": guide_type}
    if guide is not None:
        given["guided_decoding_guide"] = guide
    params = params_of(parser, **given, end_id=198)
    assert params.model_dump(by_alias=True)["structured_outputs"] == expected
    assert params.ignore_eos == (expected is None)


@BOTH
def test_a_guide_that_is_not_known_or_half_given_is_refused(parser: type[Any]) -> None:
    message = refusal(parser, guided_decoding_guide_type="structural_tag", guided_decoding_guide="x")
    assert message == (
        "guided_decoding_guide_type is 'structural_tag': must be one of json, json_schema, regex, ebnf_grammar"
    )
    assert "guided_decoding_guide is missing" in refusal(parser, guided_decoding_guide_type="regex")
    assert "guided_decoding_guide is set" in refusal(parser, guided_decoding_guide="x")


@BOTH
def test_a_lora_task_is_the_adapter_of_that_number(parser: type[Any]) -> None:
    config = {"lora_modules": {"7": "/a", "law": "/b"}}
    assert generate(parser, lora_task_id=7, config=config).sampling_params.lora_name == "7"
    assert refusal(parser, lora_task_id=0, config=config).startswith("lora_task_id is 0: must be one of 7")
    assert refusal(parser, lora_task_id=7).startswith("lora_task_id is 7: must be left out")


def test_stop_cancels_by_the_id_that_the_client_gave() -> None:
    assert parse(TensorrtLlmParser, stop=True, request_id="mine") == CancelRequest("id", "mine")
    assert parse(TensorrtLlmParser, stop=True, request_id="mine", **NEEDED[TensorrtLlmParser]) == CancelRequest(
        "id", "mine"
    )
    with pytest.raises(InvalidRequestError, match="stop is true: the request must have the id"):
        parse(TensorrtLlmParser, stop=True)
    assert generate(TensorrtLlmParser, stop=False, request_id="mine").client_request_id == "mine"


def test_input_lengths_says_how_many_of_the_tokens_count() -> None:
    def prompt(**values: Any) -> list[int]:
        return list(generate(TensorrtLlmParser, **values).prompt)  # type: ignore[arg-type]

    assert prompt(input_lengths=2) == [5, 6]
    assert prompt(input_lengths=3) == [5, 6, 7]
    message = refusal(TensorrtLlmParser, input_lengths=4)
    assert message == "input_lengths is 4: must be at most 3, those in input_ids"


def test_a_prompt_outside_the_vocabulary_is_the_clients_mistake() -> None:
    for token_id in (-1, VOCAB_SIZE, 2**31 - 1):
        with pytest.raises(InvalidRequestError, match=f"input_ids has {token_id}: must be 0 to {VOCAB_SIZE - 1}"):
            for_engine(generate(TensorrtLlmParser, input_ids=[5, token_id]))


@BOTH
def test_several_rows_are_refused_with_their_shape(parser: type[Any]) -> None:
    name, value = next(iter(NEEDED[parser].items()))
    row = tensor(SPECS[parser][name], value)
    message = refusal(parser, **{name: np.concatenate([row, row])})
    assert message.startswith(f"{name} has shape {[2, *row.shape[1:]]}: must be [1, ")
    assert "one prompt in a request" in message
    assert "beam_width has shape [2, 1]" in refusal(parser, beam_width=np.array([[1], [1]], np.int32))


@BOTH
def test_a_scalar_whose_dimension_a_config_takes_away_is_read_as_well(parser: type[Any]) -> None:
    assert params_of(parser, min_tokens=np.array([3], np.int32)).min_tokens == 3


@BOTH
def test_the_length_of_the_answer_is_needed_and_limited(parser: type[Any]) -> None:
    name = list(NEEDED[parser])[1]
    assert refusal(parser, **{name: 0}) == f"{name} is 0: must be 1 to 1048576"
    with pytest.raises(InvalidRequestError, match=f"{name} is missing"):
        parse(parser, **dict(list(NEEDED[parser].items())[:1]))


UNDERSTOOD = {
    *("input_ids", "input_lengths", "request_output_len", "text_input", "max_tokens", "stop", "streaming", "stream"),
    *("decoder_input_ids", "decoder_input_lengths", "end_id", "pad_id", "beam_width", "num_return_sequences"),
    *("stop_words_list", "bad_words_list", "stop_words", "bad_words", "early_stopping", "len_penalty"),
    *("embedding_bias", "embedding_bias_words", "embedding_bias_weights", "length_penalty"),
    *("temperature", "runtime_top_k", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_reset_ids"),
    *("top_k", "top_p", "min_tokens", "min_length", "seed", "random_seed", "lora_task_id"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "exclude_input_in_output"),
    *("return_log_probs", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
    *("guided_decoding_guide_type", "guided_decoding_guide", "runtime_top_p_decay"),
    *("image_bytes_input", "video_bytes_input"),
}


def filled(spec: TensorSpec, value: Any) -> NDArray[Any]:
    return np.full([1, *(2 if size == -1 else size for size in spec.dims)], value, dtype=DTYPES[spec.data_type])


NOT_UNDERSTOOD = [
    (parser, spec) for parser, specs in SPECS.items() for spec in specs.values() if spec.name not in UNDERSTOOD
]


@pytest.mark.parametrize(
    ("parser", "spec"), NOT_UNDERSTOOD, ids=[f"{parser.__name__}-{spec.name}" for parser, spec in NOT_UNDERSTOOD]
)
def test_what_cannot_be_done_is_refused_by_its_name_and_accepted_where_it_asks_for_nothing(
    parser: type[Any], spec: TensorSpec
) -> None:
    is_text = spec.data_type == "TYPE_STRING"
    assert refusal(parser, **{spec.name: filled(spec, b"x" if is_text else 1)}).startswith(f"{spec.name} is set: ")
    assert generate(parser, **{spec.name: filled(spec, b"" if is_text else 0)})


def test_pixels_stand_before_the_text_of_a_users_turn() -> None:
    images, frames = np.full((1, 2, 4, 5, 3), 7, np.uint8), np.full((1, 3, 4, 5, 3), 9, np.uint8)
    prompt = generate(TensorrtLlmBlsParser, image_bytes_input=images, video_bytes_input=frames).prompt
    assert isinstance(prompt, Chat)
    ((role, content),) = [(message["role"], message["content"]) for message in prompt.messages]
    assert (role, [part["type"] for part in content]) == ("user", ["image", "image", "video", "text"])
    assert [medium.shape for medium in prompt.media] == [(4, 5, 3), (4, 5, 3), (3, 4, 5, 3)]
    assert prompt.media[0].data == images[0, 0].tobytes()
    message = refusal(TensorrtLlmBlsParser, image_bytes_input=np.ones((1, 2, 4, 5, 4), np.uint8))
    assert message.startswith("image_bytes_input.0 is an array of uint8 with shape [4, 5, 4]: must be uint8")


def test_one_padding_token_for_a_decoder_is_nothing_and_more_is_refused() -> None:
    assert generate(TensorrtLlmParser, decoder_input_ids=[2], decoder_input_lengths=1)
    message = refusal(TensorrtLlmParser, decoder_input_ids=[2, 3], decoder_input_lengths=2)
    assert message.startswith("decoder_input_ids has 2 tokens: must be left out")


def test_a_top_p_that_decays_is_refused() -> None:
    assert generate(TensorrtLlmParser, runtime_top_p_decay=1.0, runtime_top_p_min=1e-6, runtime_top_p_reset_ids=-1)
    assert refusal(TensorrtLlmParser, runtime_top_p_decay=0.5).startswith("runtime_top_p_decay is 0.5")


@BOTH
def test_what_beam_search_cannot_do_is_refused_by_name(parser: type[Any]) -> None:
    assert "temperature is 0.5" in refusal(parser, beam_width=2, temperature=0.5)
    stream = "streaming" if parser is TensorrtLlmParser else "stream"
    with pytest.raises(InvalidRequestError, match="beam_width is 2: must be 1 when stream is true"):
        for_engine(generate(parser, beam_width=2, **{stream: True}))


@BOTH
@pytest.mark.parametrize(
    ("stream", "exclude", "model_excludes", "is_echoed"),
    [
        (False, None, False, True),
        (False, None, True, False),
        (False, True, False, False),
        (False, False, True, True),
        (True, None, False, False),
        (True, False, False, False),
    ],
)
def test_the_prompt_stands_in_front_of_an_answer_in_one_piece_unless_it_is_excluded(
    parser: type[Any], stream: bool, exclude: bool | None, model_excludes: bool, is_echoed: bool
) -> None:
    name = "streaming" if parser is TensorrtLlmParser else "stream"
    given: dict[str, Any] = {name: stream}
    if exclude is not None:
        given["exclude_input_in_output"] = exclude
    tokenizer = bundled_tokenizer()
    if parser is TensorrtLlmParser:
        given["input_ids"] = tokenizer.encode("<|im_start|>The sea")
    request = generate(parser, **given, options=ModelOptions(excludes_input=model_excludes))
    assert (request.echo, request.stream) == ("The sea" if is_echoed else "", stream)


@BOTH
def test_a_model_that_is_not_decoupled_streams_to_nobody(parser: type[Any]) -> None:
    name = "streaming" if parser is TensorrtLlmParser else "stream"
    options = ModelOptions(is_decoupled=False)
    assert refusal(parser, options=options, **{name: True}).startswith(f"{name} is true: must be false")
    assert not generate(parser, options=options, **{name: False}).stream


def test_a_sampling_field_as_a_request_parameter_is_refused_not_ignored() -> None:
    parser = TensorrtLlmBlsParser(bundled_tokenizer(), engine_info(), EngineConfig(), ModelOptions())
    specs, needed = SPECS[TensorrtLlmBlsParser], NEEDED[TensorrtLlmBlsParser]
    tensors: dict[str, Any] = {name: tensor(specs[name], value) for name, value in needed.items()}
    with pytest.raises(InvalidRequestError, match="'temperature' is a parameter of the request"):
        parser(Request(**tensors, parameters={"temperature": 0.5}), "id", "")
    request = parser(Request(**tensors, parameters={"priority": 2, "timeout": 1_500_000, "cache_salt": "a"}), "id", "")
    assert isinstance(request, GenerateRequest)
    assert (request.priority, request.timeout_s, request.sampling_params.cache_salt) == (2, 1.5, "a")


def test_a_model_without_a_tokenizer_takes_token_ids_and_refuses_what_needs_text() -> None:
    config = EngineConfig(skip_tokenizer_init=True)
    parser = TensorrtLlmParser(None, engine_info(), config, ModelOptions())
    specs, needed = SPECS[TensorrtLlmParser], NEEDED[TensorrtLlmParser]
    tensors: dict[str, Any] = {name: tensor(specs[name], value) for name, value in needed.items()}
    request = parser(Request(**tensors), "id", "")
    assert isinstance(request, GenerateRequest)
    assert (list(request.prompt), request.echo) == ([5, 6, 7], "")  # type: ignore[arg-type]
    params = InputProcessor(None, engine_info(), config).process("id", request.prompt, request.sampling_params)
    assert not params.sampling_params.detokenize
    with pytest.raises(InvalidRequestError, match="stop_words_list is set: must be left out"):
        parser(Request(**tensors, stop_words_list=word_list([5])), "id", "")


def test_text_that_is_not_utf_8_is_refused() -> None:
    text = np.array([[b"\xff"]], dtype=np.object_)
    assert "text_input is not valid UTF-8" in refusal(TensorrtLlmBlsParser, text_input=text)
