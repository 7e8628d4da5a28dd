"""check_spec: what is wrong with a spec is said before the engine hears of it, with field, value and limit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.grammar_spec import MAX_SCHEMA_DEPTH, check_spec
from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.sampling_params import StructuredOutputs
from tests.support.grammar_cases import grammar_cases, json_schema_cases, regex_cases

CONFIG = EngineConfig(max_grammar_bytes=1_000)


def _spec(**fields: Any) -> StructuredOutputs:
    return StructuredOutputs(**fields)


def _nested(depth: int) -> Any:
    return {"type": "array", "items": _nested(depth - 1)} if depth > 1 else {"type": "null"}


UNSUPPORTED_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "number", "multipleOf": 0.5}, "uses 'multipleOf' with type number at #"),
    ({"type": "integer", "multipleOf": 1.5}, "'multipleOf' at # is 1.5: must be a whole number"),
    ({"type": "array", "uniqueItems": True}, "uses 'uniqueItems' at #"),
    ({"not": {"type": "string"}}, "uses 'not' at #"),
    ({"if": {"type": "integer"}, "then": {"maximum": 7}}, "uses 'if' at #"),
    ({"type": "array", "contains": {"const": 1}}, "uses 'contains'"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "uses 'dependentRequired'"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "uses 'dependentSchemas'"),
    ({"type": "object", "minProperties": 1}, "uses 'minProperties' without 'properties'"),
    ({"type": "object", "unevaluatedProperties": False}, "uses 'unevaluatedProperties'"),
    (
        {"type": "object", "properties": {"a/b": {}}, "additionalProperties": {"type": "null"}},
        "uses 'additionalProperties' beside 'properties'",
    ),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}}, "uses 'patternProperties' beside"),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 1}}, "uses 'propertyNames' beside"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "uses 'patternProperties' with several patterns"),
    ({"type": "object", "required": ["a"]}, "'required' at # is 'a': must be one of the properties"),
    ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, "uses 'allOf' with more than one schema"),
    ({"type": "integer", "anyOf": [{"minimum": 1}]}, "uses 'type' beside 'anyOf'"),
    ({"$defs": {"a": {}}, "$ref": "#/$defs/a", "minimum": 1}, "uses 'minimum' beside '$ref'"),
    ({"enum": [1, 2], "minimum": 2}, "uses 'minimum' beside 'enum'"),
    ({"const": 1, "type": "string"}, "'const' at # is 1: must have a value of type 'string'"),
    ({"const": 2**60}, "'const' at # is 1152921504606846976: must be from"),
    ({"$ref": "https://example.com/a"}, "'$ref' at # is 'https://example.com/a': must be"),
    ({"$ref": "#/$defs/missing"}, "'$ref' at # is '#/$defs/missing': must be"),
    ({"$defs": {"a": {"$anchor": "b"}}}, "uses '$anchor' at #/$defs/a"),
    ({"$defs": {"a": {"$id": "b"}}}, "uses '$id' at #/$defs/a"),
    ({"type": "string", "pattern": "a+", "maxLength": 3}, "uses 'maxLength' beside 'pattern'"),
    ({"type": "string", "format": "date", "pattern": "a"}, "uses 'format' beside 'pattern'"),
    ({"type": "string", "format": "hostname"}, "'format' at # is 'hostname': must be one of date"),
    ({"type": "string", "pattern": 'say "'}, "uses a character that JSON escapes"),
    ({"type": "string", "pattern": "(?=a)"}, "uses lookaround"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "'minLength' at # is 3: must be at most maxLength (2)"),
    ({"type": "string", "minLength": -1}, "'minLength' at # is -1: must be a whole number"),
    ({"type": "integer", "minimum": 4, "maximum": 5, "multipleOf": 3}, "allows no integer between its bounds"),
    ({"type": "number", "minimum": 1e-9}, "'minimum' at # is 1e-09: must have at most 6 digits"),
    ({"type": "number", "maximum": 1e300}, "'maximum' at # is 1e+300: must be from"),
    ({"type": "integer", "minimum": True}, "'minimum' at # is True: must be a number"),
    ({"type": "integer", "maxLength": 3}, "uses 'maxLength' with type integer"),
    ({"maxLength": 3, "minimum": 3}, "the schema at # must have a 'type'"),
    ({"type": "strnig"}, "'type' at # is 'strnig': must be of string"),
    ({"type": "string", "maxLenght": 3}, "uses 'maxLenght' (did you mean 'maxLength'?) at #"),
    ({"type": "array", "items": [{"type": "null"}]}, "the schema at #/items is [{'type': 'null'}]: must be"),
    ({"properties": {"a": False}}, "the schema at #/properties/a is false"),
    (False, "the schema at # is false"),
    ("[1", "must be JSON"),
    ('{"maximum": NaN}', "has the number nan: must be finite"),
    ("3", "the schema at # is 3: must be an object"),
    ({"const": "\ud800"}, "must be valid Unicode"),
    (_nested(MAX_SCHEMA_DEPTH + 1), f"is nested more than {MAX_SCHEMA_DEPTH} deep"),
]


@pytest.mark.parametrize(("schema", "message"), UNSUPPORTED_SCHEMAS)
def test_a_schema_that_cannot_be_enforced_to_the_letter_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs.json.*" + re.escape(message)):
        check_spec(_spec(json=schema), EngineConfig())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "must be a regular expression: missing )"),
        (r"\bword\b", "uses a word boundary"),
        (r"(?<!a)b", "uses lookaround"),
        (r"(a)\1", "uses a backreference"),
        (r"(?i)a", "uses a flag"),
        (r"(?s:.)", "uses a flag"),
        (r"a++", "uses a possessive repeat"),
        (r"(?>a)", "uses an atomic group"),
        (r"(a)?(?(1)b|c)", "uses a condition"),
        (r"a^b", "uses ^ in the middle"),
        (r"(a|b$)c?", "uses $ in the middle"),
        (r"(^a){2}", "uses ^ in the middle"),
        ("(" * 5_000 + ")" * 5_000, "is nested too deeply"),
    ],
)
def test_an_expression_that_no_grammar_can_express_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.regex.*" + re.escape(message)):
        check_spec(_spec(regex=pattern), EngineConfig())


@pytest.mark.parametrize(
    ("field", "value", "num_bytes"),
    [
        ("json", {"const": "é" * 500}, 1_013),
        ("regex", "é" * 501, 1_002),
        ("choice", ["é" * 250, "é" * 251], 1_002),
        ("grammar", 'root ::= "' + "é" * 500 + '"', 1_011),
    ],
)
def test_a_spec_over_the_limit_of_the_configuration_is_refused(field: str, value: Any, num_bytes: int) -> None:
    message = f"structured_outputs.{field} has {num_bytes} bytes: must be at most 1000 (max_grammar_bytes)"
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        check_spec(_spec(**{field: value}), CONFIG)


def test_the_cases_are_accepted_and_as_many_as_promised() -> None:
    specs = [
        *(_spec(json=schema) for schema in json_schema_cases()),
        *(_spec(regex=pattern) for pattern in regex_cases()),
        *(_spec(grammar=case.grammar) for case in grammar_cases()),
    ]
    for spec in specs:
        check_spec(spec, EngineConfig())
    assert len(specs) == 450


def test_the_deepest_schema_is_accepted() -> None:
    check_spec(_spec(json=_nested(MAX_SCHEMA_DEPTH)), EngineConfig())
