"""What a request's `structured_outputs` asks for, checked and put into the words of the grammar compiler.

No xgrammar here: the frontend refuses what is wrong before the engine hears of it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

import msgspec

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.grammar_regex import to_xgrammar_regex
from deepinfer_backend.engine.json_schema import to_xgrammar_schema
from deepinfer_backend.errors import InvalidRequestError, shown
from deepinfer_backend.sampling_params import StructuredOutputs

MAX_SCHEMA_DEPTH = 64
"""Objects and lists inside each other in a JSON schema."""

# A string, a comment, or a set of characters: what is inside belongs to it.
_EBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|#[^\n]*|\[(?:\\.|[^\]\\])*\]')


class GrammarSource(msgspec.Struct, frozen=True):
    """What xgrammar compiles. Equal sources make equal grammars, so it is a key of the cache."""

    field: str
    """The field of the request, for messages: structured_outputs.json …"""
    kind: Literal["json", "regex", "grammar"]
    text: str


def check_spec(spec: StructuredOutputs, config: EngineConfig) -> None:
    """Everything that can be said about a spec without compiling it.

    Raises:
        InvalidRequestError: it is larger than `max_grammar_bytes`, or what `to_source` raises.
    """
    field, value = _given(spec)
    if field == "json_object":
        return
    num_bytes = len(_utf8(f"structured_outputs.{field}", _text_of(value)))
    if num_bytes > config.max_grammar_bytes:
        raise InvalidRequestError(
            f"structured_outputs.{field} has {num_bytes} bytes: must be at most {config.max_grammar_bytes} "
            "(max_grammar_bytes)"
        )
    to_source(spec)


def to_source(spec: StructuredOutputs) -> GrammarSource:
    """The spec in xgrammar's words.

    Raises:
        InvalidRequestError: not JSON, nested too deeply, not an expression, or it uses what cannot be enforced.
    """
    name, value = _given(spec)
    field = f"structured_outputs.{name}"
    match name:
        case "json_object":
            return GrammarSource(field, "json", '{"type": "object"}')
        case "json":
            schema = _read_schema(value, field)
            return GrammarSource(field, "json", json.dumps(to_xgrammar_schema(schema), ensure_ascii=False))
        case "regex":
            return GrammarSource(field, "regex", to_xgrammar_regex(value, field))
        case "choice":
            return GrammarSource(field, "grammar", "root ::= " + " | ".join(_ebnf_string(text) for text in value))
    return GrammarSource(field, "grammar", _EBNF_PART.sub(_exclude_surrogates, value))


def _given(spec: StructuredOutputs) -> tuple[str, Any]:
    if spec.json_object:
        return "json_object", True
    if spec.json_schema is not None:
        return "json", spec.json_schema
    if spec.regex is not None:
        return "regex", spec.regex
    if spec.choice is not None:
        return "choice", spec.choice
    return "grammar", spec.grammar


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(f"structured_outputs.json is {shown(value)}: must be JSON") from None


def _utf8(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{field} must be valid Unicode") from None


def _read_schema(value: Any, field: str) -> Any:
    try:
        # Also what came as an object is read from its text: nothing but JSON goes on.
        schema = json.loads(_text_of(value))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is {shown(value)}: must be JSON: {error}") from None
    _check_json(schema, field, MAX_SCHEMA_DEPTH)
    return schema


def _check_json(value: Any, field: str, depth_left: int) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(f"{field} has the number {value}: must be finite")
    if isinstance(value, str):
        _utf8(field, value)
    elif isinstance(value, dict | list):
        if depth_left == 0:
            raise InvalidRequestError(f"{field} is nested more than {MAX_SCHEMA_DEPTH} deep")
        for child in value.values() if isinstance(value, dict) else value:
            _check_json(child, field, depth_left - 1)
        for key in value if isinstance(value, dict) else ():
            _utf8(field, key)


def _exclude_surrogates(part: re.Match[str]) -> str:
    """`[^a]` also lets xgrammar take a half of a character, which is not UTF-8."""
    return part[0].replace("[^", r"[^\ud800-\udfff", 1) if part[0].startswith("[^") else part[0]


def _ebnf_string(text: str) -> str:
    # Escaped throughout: then no character can mean anything to the grammar's reader.
    return '"' + "".join(char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}" for char in text) + '"'
