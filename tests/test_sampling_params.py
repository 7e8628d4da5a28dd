"""SamplingParams refuses what it cannot do, in words that name field, value and limit."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.sampling_params import (
    MAX_STOP_STRING_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS_LIMIT,
    SamplingParams,
)

NAN, INFINITY = float("nan"), float("inf")
BEAMS = {"beam_width": 4}

# Every field has its entries: the first word of a message is the field that is wrong.
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n is 0: must be at least 1"),
    ({"n": 2**16 + 1}, "n is 65537: must be at most 65536"),
    ({"n": 1.5}, "n is 1.5: must be an integer"),
    ({"temperature": -1}, "temperature is -1: must be at least 0"),
    ({"temperature": "hot"}, "temperature is 'hot': must be a number"),
    ({"temperature": NAN}, "temperature is nan: must be a finite number"),
    ({"temperature": "NaN"}, "temperature is 'NaN': must be a finite number"),
    ({"temperature": INFINITY}, "temperature is inf: must be a finite number"),
    ({"temperature": 101}, "temperature is 101: must be at most 100"),
    ({"temperature": None}, "temperature is None: must be a number"),
    ({"temperature": [0.5]}, "temperature is [0.5]: must be a number"),
    ({"top_p": 0}, "top_p is 0: must be greater than 0"),
    ({"top_p": 1.5}, "top_p is 1.5: must be at most 1"),
    ({"top_k": -2}, "top_k is -2: must be at least -1"),
    ({"top_k": 2.5}, "top_k is 2.5: must be an integer"),
    ({"top_k": 2**31}, "top_k is 2147483648: must be at most 2147483647"),
    ({"min_p": -0.1}, "min_p is -0.1: must be at least 0"),
    ({"min_p": 1.1}, "min_p is 1.1: must be at most 1"),
    ({"presence_penalty": -2.1}, "presence_penalty is -2.1: must be at least -2"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1: must be at most 2"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3: must be at least -2"),
    ({"frequency_penalty": 3}, "frequency_penalty is 3: must be at most 2"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0: must be greater than 0"),
    ({"repetition_penalty": 101}, "repetition_penalty is 101: must be at most 100"),
    ({"seed": -(2**63) - 1}, "seed is -9223372036854775809: must be at least -9223372036854775808"),
    ({"seed": 2**64}, "seed is 18446744073709551616: must be at most 18446744073709551615"),
    ({"logit_bias": [1]}, "logit_bias is [1]: must be an object"),
    ({"logit_bias": "{5"}, "logit_bias is '{5': must be a JSON object"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5 is 101: must be at most 100"),
    ({"logit_bias": {"5": -101}}, "logit_bias.5 is -101: must be at least -100"),
    ({"logit_bias": {"5": NAN}}, "logit_bias.5 is nan: must be a finite number"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1 is '-1': must be at least 0"),
    ({"logit_bias": {"word": 1}}, "logit_bias.word is 'word': must be an integer"),
    ({"bad_words": [""]}, "bad_words.0 is '': must have at least 1 characters"),
    ({"bad_words": ["x" * (MAX_STOP_STRING_CHARS + 1)]}, f"must have at most {MAX_STOP_STRING_CHARS} characters"),
    ({"bad_words": [7]}, "bad_words.0 is 7: must be a string"),
    ({"bad_words": ["\ud800"]}, "bad_words.0 is '\\ud800': must be valid Unicode"),
    ({"allowed_token_ids": []}, "allowed_token_ids is []: must have at least 1 entries"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids.0 is -1: must be at least 0"),
    ({"allowed_token_ids": 5}, "allowed_token_ids is 5: must be a list"),
    ({"max_tokens": 0}, "max_tokens is 0: must be at least 1"),
    ({"max_tokens": 10**12}, f"max_tokens is 1000000000000: must be at most {MAX_TOKENS_LIMIT}"),
    ({"max_tokens": "9" * 5000}, "max_tokens is '9"),
    ({"max_tokens": "many"}, "max_tokens is 'many': must be an integer"),
    ({"min_tokens": -1}, "min_tokens is -1: must be at least 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5: must be at most max_tokens (4)"),
    ({"stop": ""}, "stop.0 is '': must have at least 1 characters"),
    ({"stop": "x" * (MAX_STOP_STRING_CHARS + 1)}, f"must have at most {MAX_STOP_STRING_CHARS} characters"),
    ({"stop": [1]}, "stop.0 is 1: must be a string"),
    ({"stop": 0}, "stop is 0: must be a list"),
    ({"stop": ["\ud800"]}, "stop.0 is '\\ud800': must be valid Unicode"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0 is -1: must be at least 0"),
    ({"stop_token_ids": 0}, "stop_token_ids is 0: must be a list"),
    ({"stop_token_ids": "2"}, "stop_token_ids is '2': must be a list"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids.0 is 2147483648: must be at most 2147483647"),
    ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, f"must have at most {MAX_STOP_TOKEN_IDS} entries, not 65"),
    ({"ignore_eos": "maybe"}, "ignore_eos is 'maybe': must be true or false"),
    ({"include_stop_str_in_output": 2}, "include_stop_str_in_output is 2: must be true or false"),
    ({"skip_special_tokens": None}, "skip_special_tokens is None: must be true or false"),
    ({"spaces_between_special_tokens": "x"}, "spaces_between_special_tokens is 'x': must be true or false"),
    ({"detokenize": "nope"}, "detokenize is 'nope': must be true or false"),
    ({"detokenize": False, "stop": "x"}, "detokenize is false: must be true when stop is set"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0: must be -1 or at least 1"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2: must be at least -1"),
    ({"logprobs": -1}, "logprobs is -1: must be at least 0"),
    ({"logprobs": "all"}, "logprobs is 'all': must be an integer"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1: must be at least 0"),
    ({"structured_outputs": 5}, "structured_outputs is 5: must be an object"),
    ({"structured_outputs": "{"}, "structured_outputs is '{': must be a JSON object"),
    ({"structured_outputs": {}}, "must set exactly one of json, json_object, regex, choice and grammar, not none"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "must set exactly one of"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is []: must have at least 1 entries"),
    ({"structured_outputs": {"regx": "a"}}, "unknown field 'structured_outputs.regx'"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos is true: must be false when"),
    ({"beam_width": 0}, "beam_width is 0: must be at least 1"),
    ({"beam_width": 2**16 + 1}, "beam_width is 65537: must be at most 65536"),
    ({"n": 5, **BEAMS}, "n is 5: must be at most beam_width (4)"),
    ({"stop": "x", **BEAMS}, "stop is set: must be left out when beam_width is over 1"),
    ({"logprobs": 0, **BEAMS}, "logprobs is set: must be left out when beam_width is over 1"),
    ({"prompt_logprobs": 0, **BEAMS}, "prompt_logprobs is set: must be left out when beam_width is over 1"),
    ({"structured_outputs": {"regex": "a"}, **BEAMS}, "structured_outputs is set: must be left out when"),
    ({"length_penalty": 101}, "length_penalty is 101: must be at most 100"),
    ({"length_penalty": -101}, "length_penalty is -101: must be at least -100"),
    ({"early_stopping": "later"}, "early_stopping is 'later': must be true or false"),
    ({"lora_name": ""}, "lora_name is '': must have at least 1 characters"),
    ({"lora_name": "\ud800"}, "lora_name is '\\ud800': must be valid Unicode"),
    ({"lora_name": 5}, "lora_name is 5: must be a string"),
    ({"cache_salt": ""}, "cache_salt is '': must have at least 1 characters"),
    ({"cache_salt": "x" * 257}, "must have at most 256 characters"),
    ({"cache_salt": "\ud800"}, "cache_salt is '\\ud800': must be valid Unicode"),
    ({"cache_salt": 5}, "cache_salt is 5: must be a string"),
]
UNKNOWN_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "unknown field 'temprature' (did you mean 'temperature'?)"),
    ({"zzz": 1}, "unknown field 'zzz'"),
    ({"self": 1}, "unknown field 'self'"),
    ({"\ud800": 1}, "unknown field '\\ud800': must be valid Unicode"),
    ({"logit_bias": {"a\nb": 1}}, "logit_bias.a\\nb is 'a\\nb': must be an integer"),
]
ALL_BAD = [*BAD_FIELDS, *UNKNOWN_FIELDS]


@pytest.mark.parametrize(("fields", "message"), ALL_BAD, ids=[f"{fields}"[:40] for fields, _ in ALL_BAD])
def test_a_bad_value_is_refused_with_field_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**fields)
    assert message in refusal.value.message
    assert str(refusal.value).startswith("INVALID_ARG: ")
    assert len(str(refusal.value)) < 300
    assert "\n" not in str(refusal.value)


def test_every_field_has_a_bad_value_in_the_table() -> None:
    assert {name for fields, _ in BAD_FIELDS for name in fields} == set(SamplingParams.model_fields)


def test_values_may_come_as_strings() -> None:
    as_strings = SamplingParams(
        n="2",
        temperature="0.5",
        top_k="7",
        top_p="0.25",
        min_p="0.1",
        presence_penalty="-1",
        frequency_penalty="0.5",
        repetition_penalty="1.5",
        seed="3",
        logit_bias='{"5": "1.5"}',
        allowed_token_ids=["5"],
        max_tokens="9",
        min_tokens="2",
        stop_token_ids=["6"],
        ignore_eos="false",
        include_stop_str_in_output="true",
        truncate_prompt_tokens="-1",
        logprobs="3",
        structured_outputs='{"regex": "a+"}',
        length_penalty="0.5",
        early_stopping="true",
    )
    assert as_strings == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        seed=3,
        logit_bias={5: 1.5},
        allowed_token_ids=[5],
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[6],
        ignore_eos=False,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=-1,
        logprobs=3,
        structured_outputs={"regex": "a+"},
        length_penalty=0.5,
        early_stopping=True,
    )


def test_one_string_is_a_list_of_one_and_none_is_none() -> None:
    assert SamplingParams(stop="end", bad_words="no") == SamplingParams(stop=["end"], bad_words=["no"])
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None) == SamplingParams()


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=1, seed=2**64 - 1, max_tokens=MAX_TOKENS_LIMIT)
    SamplingParams(stop=["x" * MAX_STOP_STRING_CHARS], stop_token_ids=[0] * MAX_STOP_TOKEN_IDS)
    SamplingParams(min_tokens=4, max_tokens=4, seed=-(2**63), presence_penalty=-2, frequency_penalty=2)
    SamplingParams(logit_bias={0: -100, 2**31 - 1: 100}, logprobs=0, prompt_logprobs=0, truncate_prompt_tokens=-1)
    SamplingParams(n=4, beam_width=4, length_penalty=-100, early_stopping="never")


def test_a_models_defaults_hold_for_what_was_left_out_only() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 100}
    params = SamplingParams(top_k=0, structured_outputs={"json": {"type": "object"}}).with_defaults(defaults)
    assert params == SamplingParams(
        temperature=0.6, top_k=0, max_tokens=100, structured_outputs={"json": {"type": "object"}}
    )


def test_params_cannot_be_changed_after_the_check() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SamplingParams().max_tokens = 0
