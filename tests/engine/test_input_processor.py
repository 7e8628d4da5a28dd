"""What the input processor refuses, with field, value and limit, and what it makes of the rest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.chat import Chat
from deepinfer_backend.engine.input_processor import InputProcessor, TextWithMedia
from deepinfer_backend.engine.messages import EmbeddingParams, EngineInfo, EngineRequest
from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.media.medium import Medium
from deepinfer_backend.sampling_params import SamplingParams
from tests.support.tokenizers import bundled_tokenizer

MAX_MODEL_LEN, VOCAB_SIZE, HIDDEN_SIZE = 64, 49_152, 576
CONFIG = EngineConfig(
    max_n=4,
    max_beam_width=4,
    max_logprobs=5,
    max_logit_bias_entries=2,
    max_stop_strings=2,
    max_bad_words=2,
    max_grammar_bytes=20,
    lora_modules={"law": "/adapters/law"},
)


def info(**others: Any) -> EngineInfo:
    shape = {"num_blocks": 50, "block_size": 16, "hidden_size": HIDDEN_SIZE, **others}
    return EngineInfo("/model", MAX_MODEL_LEN, VOCAB_SIZE, device="cpu", dtype="float32", **shape)


def process(
    fields: dict[str, Any] | None = None,
    prompt: Any = "The sea",
    *,
    tokenizer: Any = ...,
    engine_info: EngineInfo | None = None,
    **options: Any,
) -> EngineRequest:
    tokenizer = bundled_tokenizer() if tokenizer is ... else tokenizer
    processor = InputProcessor(tokenizer, engine_info or info(), CONFIG)
    return processor.process("id", prompt, SamplingParams(**(fields or {})), **options)


NO_TOKENIZER: dict[str, Any] = {"prompt": [1], "tokenizer": None}
BEAMS = {"beam_width": 2}

# (sampling fields, other arguments, the message)
BAD_REQUESTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"n": 5}, {}, "n is 5: must be at most 4 (max_n)"),
    ({"beam_width": 5}, {}, "beam_width is 5: must be at most 4 (max_beam_width)"),
    ({"logprobs": 6}, {}, "logprobs is 6: must be at most 5 (max_logprobs)"),
    ({"prompt_logprobs": 6}, {}, "prompt_logprobs is 6: must be at most 5 (max_logprobs)"),
    ({"logit_bias": {1: 1, 2: 1, 3: 1}}, {}, "logit_bias has 3 entries: must have at most 2 (max_logit_bias_entries)"),
    ({"stop": ["a", "b", "c"]}, {}, "stop has 3 entries: must have at most 2 (max_stop_strings)"),
    ({"bad_words": ["a", "b", "c"]}, {}, "bad_words has 3 entries: must have at most 2 (max_bad_words)"),
    ({"bad_words": ["  "]}, {}, "bad_words has '  ': must have at least 1 token besides spaces"),
    ({"logit_bias": {VOCAB_SIZE: 1}}, {}, "logit_bias has 49152: must be 0 to 49151"),
    ({"allowed_token_ids": [1, 50_000]}, {}, "allowed_token_ids has 50000: must be 0 to 49151"),
    ({"stop_token_ids": [49_152]}, {}, "stop_token_ids has 49152: must be 0 to 49151"),
    ({"lora_name": "art"}, {}, "lora_name is 'art': must be one of 'law'"),
    ({"structured_outputs": {"regex": "x" * 21}}, {}, "structured_outputs.regex has 21 bytes: must be at most 20"),
    (
        {"structured_outputs": {"json": {"type": "string", "pattern": "x"}}},
        {},
        "structured_outputs.json has 34 bytes: must be at most 20 (max_grammar_bytes)",
    ),
    ({"structured_outputs": {"json": '"\ud800"'}}, {}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "("}}, {}, "structured_outputs.regex"),
    (BEAMS, {"stream": True}, "beam_width is 2: must be 1 when stream is true"),
    (BEAMS, {"wants_logprobs": True}, "return_logprobs is True: must be false when beam_width is over 1"),
    (BEAMS, {"wants_prompt_logprobs": True}, "return_prompt_logprobs is True: must be false when beam_width"),
    ({"stop": "x"}, NO_TOKENIZER, "stop is set: must be left out, since this model has no tokenizer"),
    ({"bad_words": "x"}, NO_TOKENIZER, "bad_words is set: must be left out, since this model has no tokenizer"),
    ({"structured_outputs": {"regex": "x"}}, NO_TOKENIZER, "structured_outputs is set: must be left out, since"),
    ({"detokenize": True}, NO_TOKENIZER, "detokenize is True: must be false, since this model has no tokenizer"),
    ({}, {"tokenizer": None}, "text_input: this model has no tokenizer; send input_ids"),
    (
        {},
        {"tokenizer": None, "prompt": Chat.from_objects([{"role": "user", "content": "x"}])},
        "messages: this model has no tokenizer; send input_ids",
    ),
    ({}, {"prompt": ""}, "text_input is empty: must have at least 1 character"),
    ({}, {"prompt": "x" * 4097}, "text_input has 4097 characters: must have at most 4096"),
    ({}, {"prompt": "a\ud800"}, "text_input has '\\ud800' at 1: must be valid Unicode"),
    ({}, {"prompt": [5, -1]}, "input_ids has -1: must be 0 to 49151"),
    ({}, {"prompt": [5, VOCAB_SIZE]}, "input_ids has 49152: must be 0 to 49151"),
    ({}, {"prompt": [5, 2**70]}, "input_ids: must be whole numbers"),
    ({}, {"prompt": [[5]]}, "input_ids has 2 dimensions: must have 1"),
    ({}, {"prompt": []}, "the prompt has 0 tokens: must have at least 1"),
    ({}, {"prompt": [5] * 64}, "the prompt has 64 tokens: must have at most 63, one less than max_model_len (64)"),
    (
        {},
        {"prompt": [5] * 32, "engine_info": info(num_blocks=2)},
        "the prompt has 32 tokens: must have at most 31, one less than the KV cache holds (2 blocks of 16)",
    ),
    ({}, {"embedding": EmbeddingParams(0)}, "dimensions is 0: must be 1 to 576, the model's hidden size"),
    ({}, {"embedding": EmbeddingParams(577)}, "dimensions is 577: must be 1 to 576, the model's hidden size"),
    (
        {"temperature": 0},
        {"embedding": EmbeddingParams()},
        "temperature is set: an embedding request can have only cache_salt, lora_name, truncate_prompt_tokens",
    ),
    (
        {"min_tokens": 10},
        {"engine_info": info(default_sampling_params={"max_tokens": 9})},
        "min_tokens is 10: must be at most max_tokens (9)",
    ),
]


@pytest.mark.parametrize(
    ("fields", "arguments", "message"), BAD_REQUESTS, ids=[message[:40] for *_, message in BAD_REQUESTS]
)
def test_a_bad_request_is_refused_with_field_value_and_limit(
    fields: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        process(fields, **arguments)
    assert str(refusal.value).startswith(f"INVALID_ARG: {message}")


def test_a_lora_name_without_any_adapter_says_so() -> None:
    processor = InputProcessor(None, info(), EngineConfig())
    with pytest.raises(InvalidRequestError, match="must be left out, since this model has no lora_modules"):
        processor.process("id", [1], SamplingParams(lora_name="law"))


def test_the_limits_themselves_are_allowed() -> None:
    process({"n": 4, "logprobs": 5, "prompt_logprobs": 5, "stop": ["a", "b"], "lora_name": "law"}, [5] * 63)
    process({"logit_bias": {0: 1, VOCAB_SIZE - 1: 1}, "bad_words": ["a", "b"], "allowed_token_ids": [VOCAB_SIZE - 1]})
    process({"beam_width": 4, "n": 4}, embedding=None)
    process(embedding=EmbeddingParams(HIDDEN_SIZE))


def test_the_models_own_defaults_fill_what_was_left_out() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 30}
    request = process({"top_p": 1}, engine_info=info(default_sampling_params=defaults))
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 1, 30)


@pytest.mark.parametrize(
    ("asked", "fields", "expected"),
    [
        ({}, {}, (None, None)),
        ({"wants_logprobs": True}, {}, (0, None)),
        ({"wants_cumulative_logprob": True}, {"logprobs": None}, (0, None)),
        ({"wants_logprobs": True, "wants_prompt_logprobs": True}, {"logprobs": 3}, (3, 0)),
        ({"wants_cumulative_logprob": True}, BEAMS, (None, None)),
    ],
)
def test_what_a_client_wants_to_be_told_is_computed(
    asked: dict[str, Any], fields: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    params = process(fields, **asked).sampling_params
    assert (params.logprobs, params.prompt_logprobs) == expected


@pytest.mark.parametrize(("kept", "num_tokens"), [(1, 1), (3, 3), (5, 5), (-1, 63), (63, 63)])
def test_truncation_keeps_the_prompts_last_tokens(kept: int, num_tokens: int) -> None:
    prompt = list(range(5, 105))
    token_ids = process({"truncate_prompt_tokens": kept}, prompt).prompt_token_ids
    assert token_ids.tolist() == prompt[-num_tokens:]


def test_truncation_leaves_a_short_prompt_whole_and_refuses_one_that_is_still_too_long() -> None:
    assert process({"truncate_prompt_tokens": 50}, [5, 6]).prompt_token_ids.tolist() == [5, 6]
    with pytest.raises(InvalidRequestError, match="the prompt has 64 tokens: must have at most 63"):
        process({"truncate_prompt_tokens": 64}, [5] * 100)


def test_bad_words_are_token_sequences_with_and_without_a_space() -> None:
    """vLLM's rule, read off the tokenizer: " sea" counts where it is as long as "sea" and begins otherwise."""
    encode = bundled_tokenizer().encode
    assert len(encode("sea")) == len(encode(" sea")) == 1
    assert process({"bad_words": ["sea"]}).bad_words_token_ids == [encode("sea"), encode(" sea")]
    assert process({"bad_words": [" sea"]}).bad_words_token_ids == [encode("sea"), encode(" sea")]
    longer = "mountains"
    assert len(encode(longer)) != len(encode(" " + longer))
    assert process({"bad_words": [longer]}).bad_words_token_ids == [encode(longer)]


def test_an_embedding_request_carries_its_parameters_and_none_of_the_models_defaults() -> None:
    request = process(
        {"lora_name": "law", "truncate_prompt_tokens": 2},
        [5, 6, 7],
        embedding=EmbeddingParams(4),
        engine_info=info(default_sampling_params={"temperature": 0.5}),
    )
    assert request.embedding == EmbeddingParams(4)
    assert request.prompt_token_ids.tolist() == [6, 7]
    assert (request.sampling_params.lora_name, request.sampling_params.temperature) == ("law", 1.0)


def test_without_a_tokenizer_token_ids_are_enough() -> None:
    request = process({"detokenize": False, "logprobs": 1}, [5, 6], tokenizer=None)
    assert request.prompt_token_ids.tolist() == [5, 6]
    assert process({}, [5], tokenizer=None).bad_words_token_ids == []


def test_engines_for_prompts_take_no_media() -> None:
    config = EngineConfig(data_parallel_size=2, num_prompt_engines=1)
    engine_info = msgspec.structs.replace(info(), modalities=["image"])
    prompt = TextWithMedia("<image>", [Medium("image.0", "image", b"x")])
    with pytest.raises(InvalidRequestError, match=r"image\.0 is set: must be left out with num_prompt_engines over 0"):
        InputProcessor(None, engine_info, config).process("id", prompt, SamplingParams())
