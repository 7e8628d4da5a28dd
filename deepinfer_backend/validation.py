"""pydantic's verdicts in our words: one sentence that names the field, the value and the limit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deepinfer_backend.errors import nearest_name, shown

# By pydantic's error type; the braces are filled from the error's context.
_REASONS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "too_short": "must have at least {min_length} entries, not {actual_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "too_long": "must have at most {max_length} entries, not {actual_length}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",  # JSON's \\ud800 is half a character; no text ever contains it
    "list_type": "must be a list",
}
# How pydantic names the branch of a union, and the key of an entry.
_PYDANTICS_OWN_PARTS = frozenset({"[key]", "bool", "str", "dict[str,any]", "literal['never']"})


def object_from_text(value: Any) -> Any:
    """An object may also come as JSON: the command line and Triton's request parameters have no objects.

    Raises:
        ValueError: it is a string, and not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON object") from None


def describe_validation_error(error: ValidationError, known_fields: Iterable[str]) -> str:
    """What is wrong with the first offending field, for example "temperature is -1: must be at least 0"."""
    first = error.errors(include_url=False)[0]
    # A part may be a key that the client chose: no line breaks, no megabytes.
    field = ".".join(shown(str(part))[1:-1] for part in first["loc"] if part not in _PYDANTICS_OWN_PARTS)
    if not field and first["type"] == "string_unicode":
        return f"unknown field {shown(first['input'])}: {_reason(first)}"
    if first["type"] == "extra_forbidden":
        return f"unknown field '{field}'{nearest_name(field, known_fields)}"
    # What a validator of ours says about several fields names them itself.
    return f"{field} is {shown(first['input'])}: {_reason(first)}" if field else _reason(first)


def _reason(details: ErrorDetails) -> str:
    if details["type"] in _REASONS:
        return _REASONS[details["type"]].format(**details.get("ctx", {}))
    return details["msg"].removeprefix("Value error, ")
