"""SamplingParams refuses what it cannot do, in words that name field, value and limit."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.sampling_params import (
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS_LIMIT,
    SamplingParams,
)

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature is -1: must be at least 0"),
    ({"temperature": "hot"}, "temperature is 'hot': must be a number"),
    ({"temperature": float("nan")}, "temperature is nan: must be a finite number"),
    ({"temperature": "NaN"}, "temperature is 'NaN': must be a finite number"),
    ({"temperature": float("inf")}, "temperature is inf: must be a finite number"),
    ({"temperature": 101}, "temperature is 101: must be at most 100"),
    ({"temperature": None}, "temperature is None: must be a number"),
    ({"temperature": [0.5]}, "temperature is [0.5]: must be a number"),
    ({"top_p": 0}, "top_p is 0: must be greater than 0"),
    ({"top_p": 1.5}, "top_p is 1.5: must be at most 1"),
    ({"top_k": -2}, "top_k is -2: must be at least -1"),
    ({"top_k": 2.5}, "top_k is 2.5: must be an integer"),
    ({"top_k": 2**31}, "top_k is 2147483648: must be at most 2147483647"),
    ({"max_tokens": 0}, "max_tokens is 0: must be at least 1"),
    ({"max_tokens": 10**12}, f"max_tokens is 1000000000000: must be at most {MAX_TOKENS_LIMIT}"),
    ({"max_tokens": "9" * 5000}, "max_tokens is '9"),
    ({"max_tokens": "many"}, "max_tokens is 'many': must be an integer"),
    ({"min_tokens": -1}, "min_tokens is -1: must be at least 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5: must be at most max_tokens (4)"),
    ({"seed": -(2**63) - 1}, "seed is -9223372036854775809: must be at least -9223372036854775808"),
    ({"seed": 2**64}, "seed is 18446744073709551616: must be at most 18446744073709551615"),
    ({"stop": ""}, "stop is"),
    ({"stop": ["ok", ""]}, f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters"),
    ({"stop": "x" * (MAX_STOP_STRING_CHARS + 1)}, f"must have 1 to {MAX_STOP_STRING_CHARS} characters"),
    ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, f"must have at most {MAX_STOP_STRINGS} entries"),
    ({"stop": [1]}, "stop.0 is 1: must be a string"),
    ({"stop": 0}, "stop is 0: must be a list"),
    ({"stop": ["\ud800"]}, "stop is ['\\ud800']: each stop string must be valid Unicode"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0 is -1: must be at least 0"),
    ({"stop_token_ids": 0}, "stop_token_ids is 0: must be a list"),
    ({"stop_token_ids": "2"}, "stop_token_ids is '2': must be a list"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids.0 is 2147483648: must be at most 2147483647"),
    ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, f"must have at most {MAX_STOP_TOKEN_IDS} entries"),
    ({"ignore_eos": "maybe"}, "ignore_eos is 'maybe': must be true or false"),
    ({"temprature": 1}, "unknown field 'temprature' (did you mean 'temperature'?)"),
    ({"zzz": 1}, "unknown field 'zzz'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=[f"{fields}"[:40] for fields, _ in BAD_FIELDS])
def test_a_bad_value_is_refused_with_field_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**fields)
    assert message in refusal.value.message
    assert str(refusal.value).startswith("INVALID_ARG: ")
    assert len(str(refusal.value)) < 300
    assert "\n" not in str(refusal.value)


def test_values_may_come_as_strings() -> None:
    params = SamplingParams(
        temperature="0.5", top_k="7", top_p="0.25", seed="3", max_tokens="9", min_tokens="2", ignore_eos="false"
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, seed=3, max_tokens=9, min_tokens=2, ignore_eos=False
    )


def test_one_stop_string_is_a_list_of_one_and_none_is_none() -> None:
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0, top_k=-1, top_p=1, seed=2**64 - 1, max_tokens=MAX_TOKENS_LIMIT)
    SamplingParams(stop=["x" * MAX_STOP_STRING_CHARS] * MAX_STOP_STRINGS, stop_token_ids=[0] * MAX_STOP_TOKEN_IDS)
    SamplingParams(min_tokens=4, max_tokens=4, seed=-(2**63))


def test_params_cannot_be_changed_after_the_check() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SamplingParams().max_tokens = 0
