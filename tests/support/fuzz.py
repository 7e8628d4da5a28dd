"""Wrong values of every kind, and requests that are almost right: what both of the fuzzer's wires send.

Everything comes out of the `Random` that a caller gives, so the same seed makes the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

_LARGE_CHARS = 200_000

_PLAUSIBLE: dict[str, list[Any]] = {
    "n": [1, 2, 3, "2"],
    "temperature": [0, 0.7, 2, "0.5"],
    "top_k": [-1, 0, 5],
    "top_p": [0.5, 1],
    "min_p": [0, 0.2],
    "presence_penalty": [-1, 0.5],
    "frequency_penalty": [-1, 0.5],
    "repetition_penalty": [1.2],
    "seed": [0, 7, -(2**63), 2**64 - 1],
    "logit_bias": [{"5": 1.5}, '{"7": -100}', {}],
    "bad_words": [["a"], "b", []],
    "allowed_token_ids": [[5, 6, 7]],
    "max_tokens": [1, 2, 3, 4, "2"],
    "min_tokens": [0, 1],
    "stop": [["a", "bc"], "x", []],
    "stop_token_ids": [[5], []],
    "ignore_eos": [True, "true"],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "detokenize": [False],
    "truncate_prompt_tokens": [-1, 5],
    "logprobs": [0, 3],
    "prompt_logprobs": [0, 2],
    "beam_width": [1, 2],
    "length_penalty": [0, 1.5],
    "early_stopping": [True, "never"],
    "lora_name": ["law"],
    "structured_outputs": [
        {"json_object": True},
        {"json": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]}},
        {"json": '{"enum": ["a", 1, null]}'},
        {"choice": ["a", "b"]},
        {"regex": "[a-f]{2}(x|y)*"},
        '{"regex": "a+"}',
        {"grammar": 'root ::= "a" root | "b"'},
    ],
}
_COMPILED = frozenset({"structured_outputs"})  # a grammar costs a hundred times what another field does
_PARAMETERS_OF_TRITON = ("timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "binary_data_output")
FLAGS = (
    "exclude_input_in_output",
    "return_finish_reason",
    "return_stop_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_prompt_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
    "return_perf_metrics",
)
_STRANGE_NAMES = (
    "max_token",
    "model",
    "id",
    "inputs",
    "parameters",
    "image",
    "self",
    "a\nERROR b",
    "\ud800",
    "x" * 3_000,
)
_TEXTS = (
    "",
    "a",
    "The sea",
    "</s><s>",
    "日本語 🌊",
    "é\u0301",
    "\x00",
    "\ufffd",
    "\u202e\u0000\n\r\t",
    "{{ 7 * 7 }}",
    "%s%n",
)
_NUMBERS = (0, 1, -1, 2, 64, 127, 128, 511, 512, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64)
_STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    *_NUMBERS,
    *(-number for number in _NUMBERS),
    10**30,
    10**400,
    0.5,
    -0.0,
    1e-300,
    1e39,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    *_TEXTS,
    "0",
    "1.5",
    "-1",
    "NaN",
    "1e400",
    "Infinity",
    "٣",  # a digit that int() reads
    "1_0",
    " 1 ",
    "true",
    "null",
    "[",
    "\ud800",
    "a\udfffb",
    [],
    {},
    [[]],
    [None],
    [1, "a", None],
    {"": None},
    {"a": {"b": [1]}},
)


def strange_value(random: Random) -> Any:
    """A value that JSON, or Python's reading of it, can have; seldom the right one."""
    match random.randrange(40):
        case 0:
            return random.choice(["a", "\x00", "é", "[", "9"]) * random.choice([100, 5_000])
        case 1:
            return nested(random, strange_value(random), random.choice([2, 30, 150]))
        case 2:
            return {f"k{number}": strange_value(random) for number in range(random.randrange(5))}
        case 3:
            return [strange_value(random) for _ in range(random.choice([1, 2, 70]))]
        case 4:
            return random.randbytes(random.randrange(20)).decode("latin-1")
    return random.choice(_STRANGE)


def nested(random: Random, value: Any, depth: int) -> Any:
    in_list = random.random() < 0.5
    for _ in range(depth):
        value = [value] if in_list else {"a": value}
    return value


def nested_text(random: Random) -> str:
    """JSON deeper than Python's writer goes, and not so deep that it would end tritonserver 2.51: see `test_fuzz`."""
    depth = random.choice([500, 990, 1_010, 3_000, 10_000])
    opening, closing = random.choice([("[", "]"), ('{"a": ', "}")])
    value = opening * depth + "1" + closing * depth
    name = random.choice(["text_input", "input_ids", "input", "stop", "logit_bias", "structured_outputs", "a"])
    return random.choice([value, f'{{"{name}": {value}}}', f'[{{"role": "user", "content": {value}}}]'])


def sampling_fields(random: Random) -> dict[str, Any]:
    """A few sampling fields that go together as a rule; never many tokens."""
    fields: dict[str, Any] = {"max_tokens": random.choice([1, 2, 3])}
    for name in random.sample(sorted(_PLAUSIBLE), random.choice([0, 1, 1, 2, 4])):
        if name not in _COMPILED or random.random() < 0.4:
            fields[name] = random.choice(_PLAUSIBLE[name])
    return fields


def messages(random: Random) -> list[Any]:
    content = random.choice(["Hi", "", None, [{"type": "text", "text": "a"}], "</s>"])
    return [{"role": random.choice(["user", "system", "assistant"]), "content": content}] * random.choice([1, 1, 3])


def embedding_request(random: Random) -> dict[str, Any]:
    pooling = random.choice([None, {}, {"dimensions": [8]}, {"dimensions": 3}, {"dimensions": [10**6]}])
    return {"input": random.choice(["a sea", [5, 6, 7]]), "pooling_params": pooling}


def mutated(random: Random, value: Any) -> Any:
    """The same with one change somewhere inside: another value, key, order or depth. `value` itself stays."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(sorted(value))
        match random.randrange(8):
            case 0:
                return {name: each for name, each in value.items() if name != key}
            case 1:
                return {
                    **value,
                    random.choice([key + "s", key[:-1], key.upper(), "", "__class__", "a\x00b"]): value[key],
                }
            case 2:
                return {**value, unexpected_name(random): strange_value(random)}
        return {**value, key: mutated(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        match random.randrange(4):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value * random.choice([2, 40])
        return [*value[:place], mutated(random, value[place]), *value[place + 1 :]]
    match random.randrange(12):
        case 0:
            return nested(random, value, random.choice([1, 2, 30, 150]))
        case 1:
            return json_text(random, value)
        case 2:
            return str(value)
    return strange_value(random)


def unexpected_name(random: Random) -> str:
    return random.choice([*_PLAUSIBLE, *_PARAMETERS_OF_TRITON, *_STRANGE_NAMES])


_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_TEXT_CHANGES: list[Callable[[Random, str], str]] = [
    lambda random, text: text[: random.randrange(len(text) + 1)],
    lambda random, text: text[random.randrange(len(text) + 1) :],
    lambda random, text: _NUMBER.sub(
        lambda _: random.choice(["NaN", "-Infinity", "1e999", "0x1", "01", "9" * 300]), text
    ),
    lambda random, text: text.replace('"', random.choice(["'", '"\\ud800', '"\\u0000', "“", '\\"']), 1),
    lambda random, text: text + random.choice([text, "}", ",", "\x00", "\n\n", " {}"]),
    lambda random, text: text.replace(":", ": [" * random.choice([1, 900]), 1),
    lambda random, text: text.replace("{", '{"text_input": "b", ', 1),
    lambda random, text: text.replace("true", "True").replace(",", ",,", 1),
    lambda random, text: "\ufeff" + text,
]


def json_text(random: Random, value: Any, num_changes: int = 0) -> str:
    """JSON as Python writes it (with NaN, Infinity and halves of characters), changed so many times as a text."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.8)
    for _ in range(num_changes):
        text = random.choice(_TEXT_CHANGES)(random, text)
    return text


def mutated_bytes(random: Random, data: bytes) -> bytes:
    """The same with one change that does not care what the bytes mean."""
    place = random.randrange(len(data) + 1)
    end = min(len(data), place + random.choice([1, 1, 4, 50]))
    match random.randrange(6):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + random.randbytes(random.choice([1, 1, 4, 30])) + data[place:]
        case 2:
            return data[:place] + data[end:]
        case 3:
            return data[:place] + data[place:end] * random.choice([2, 30]) + data[end:]
        case 4:
            return data[:place] + bytes(end - place) + data[end:]
    return data[:place] + random.randbytes(end - place) + data[end:]


def to_bytes(text: str) -> bytes:
    """UTF-8; halves of characters as UTF-8 does not allow them."""
    return text.encode("utf-8", errors="surrogatepass")


def large_text(random: Random) -> str:
    return random.choice(["a", "word ", "\x00", "🌊", "[", '"', "\\"]) * random.choice([30_000, _LARGE_CHARS])
