"""From a JSON schema to one that xgrammar enforces to the letter, or a reason why it can not.

xgrammar passes over many keywords without a word (`uniqueItems`, `not`, `required` of an unlisted property, a second
`allOf`, `maxLength` beside `pattern`, …), so only what it is known to enforce goes through. Everything else is refused:
each finished text is valid. A text may be narrower than the schema: an object with `properties` has no others, in
their order; `pattern` matches the whole string; a keyword without a `type` means the type that it is about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from deepinfer_backend.engine.grammar_regex import to_json_string_regex
from deepinfer_backend.errors import InvalidRequestError, nearest_name, shown

FIELD = "structured_outputs.json"

# xgrammar's integers, and the exact ones among JSON's numbers elsewhere.
_MAX_INTEGER = 2**53
_MAX_MULTIPLE_OF = 1_000
# Digits after the point that xgrammar keeps of a number's bound.
_MAX_BOUND_DIGITS = 6

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "discriminator")
)
_ROOT_ANNOTATIONS = frozenset(("$schema", "$id"))
_DEFINITIONS = ("$defs", "definitions")
_APPLICATORS = ("anyOf", "oneOf", "allOf")
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "object": frozenset(
        (
            *("properties", "required", "minProperties", "maxProperties"),
            *("additionalProperties", "patternProperties", "propertyNames"),
        )
    ),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    "boolean": frozenset(),
    "null": frozenset(),
}
_KNOWN = frozenset().union(*_OF_TYPE.values(), _ANNOTATIONS, _APPLICATORS, ("type", "enum", "const", "$ref", "$defs"))

_DAY = r"(?:0[1-9]|1[0-9]|2[0-8])"
# No 29th of February: whether there is one depends on the year.
_DATE = rf"(?:[1-9][0-9]{{3}}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31))"
_TIME = r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}",
    "email": r"[a-z0-9]+(?:[._+-][a-z0-9]+)*@[a-z0-9]+(?:-[a-z0-9]+)*(?:\.[a-z0-9]+)+",
}


def to_xgrammar_schema(schema: Any) -> Any:
    """The schema as xgrammar shall have it, for a `schema` that was read from JSON.

    Raises:
        InvalidRequestError: it is not a schema, allows nothing, or uses what cannot be enforced; the message has the
            keyword and where it stands.
    """
    walk = _Walk()
    result = walk.visit(schema, "#")
    walk.check_references()
    return result


class _Walk:
    """One pass over a schema. Schemas stay where they were, so that references lead to the rewritten ones."""

    def __init__(self) -> None:
        self._schemas: set[str] = set()
        self._references: dict[str, str] = {}

    def check_references(self) -> None:
        for where, target in self._references.items():
            if target not in self._schemas:
                raise _wrong(where, "$ref", target, "must be # or the path of a schema in the same schema (#/…)")

    def visit(self, schema: Any, where: str) -> Any:
        self._schemas.add(where)
        if schema is True:
            return {}
        if schema is False:
            raise InvalidRequestError(f"{FIELD}: the schema at {where} is false: it allows nothing")
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"{FIELD}: the schema at {where} is {shown(schema)}: must be an object or true")
        ignored = _ANNOTATIONS | _ROOT_ANNOTATIONS if where == "#" else _ANNOTATIONS
        rules = {
            name: value
            for name, value in schema.items()
            if name not in ignored and name not in _DEFINITIONS and not name.startswith("x-")
        }
        for name in rules:
            if name not in _KNOWN:
                raise _unsupported(where, name, nearest_name(name, _KNOWN))
        result = self._visit_rules(rules, where)
        for name in _DEFINITIONS:
            if name in schema:
                result[name] = self._visit_named(schema[name], name, where)
        return result

    def _visit_rules(self, rules: dict[str, Any], where: str) -> dict[str, Any]:
        for name in ("$ref", *_APPLICATORS):
            if name in rules:
                if others := sorted(rules.keys() - {name}):
                    raise _unsupported(where, others[0], f" beside {name!r}")
                inner = self._visit_applicator(name, rules[name], where)
                # Where no value can be of two of the schemas, one of them is any of them.
                return {"anyOf" if name == "oneOf" and _are_disjoint(inner) else name: inner}
        if "const" in rules or "enum" in rules:
            return self._visit_values(rules, where)
        types = self._types(rules, where)
        if not types:
            return {}
        result: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
        for name in rules.keys() - {"type"}:
            if not any(name in _OF_TYPE[type_name] for type_name in types):
                raise _unsupported(where, name, f" with type {' or '.join(types)}")
        visitors = {
            "string": self._visit_string,
            "integer": self._visit_number,
            "number": self._visit_number,
            "object": self._visit_object,
            "array": self._visit_array,
        }
        for type_name in types:
            if type_name in visitors:
                visitors[type_name](rules, result, where)
        return result

    def _visit_applicator(self, name: str, value: Any, where: str) -> Any:
        if name == "$ref":
            if not isinstance(value, str):
                raise _wrong(where, name, value, "must be a string")
            self._references[where] = unquote(value)
            return value
        if not isinstance(value, list) or not value:
            raise _wrong(where, name, value, "must be a list of schemas")
        if name == "allOf" and len(value) > 1:
            raise _unsupported(where, name, " with more than one schema")
        return [self.visit(schema, f"{where}/{name}/{index}") for index, schema in enumerate(value)]

    def _visit_named(self, value: Any, name: str, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(where, name, value, "must be an object of schemas")
        return {key: self.visit(schema, f"{where}/{name}/{_escape(key)}") for key, schema in value.items()}

    def _visit_values(self, rules: dict[str, Any], where: str) -> dict[str, Any]:
        name = "const" if "const" in rules else "enum"
        if others := sorted(rules.keys() - {name, "type"}):
            raise _unsupported(where, others[0], f" beside {name!r}")
        values = [rules["const"]] if name == "const" else rules["enum"]
        if not isinstance(values, list) or not values:
            raise _wrong(where, name, values, "must be a list of at least one value")
        if "type" in rules:
            types = self._types(rules, where)
            values = [value for value in values if any(_is_of_type(value, type_name) for type_name in types)]
        if not values:
            raise _wrong(where, name, rules[name], f"must have a value of type {shown(rules['type'])}")
        for value in values:
            _check_exact(value, name, where)
        return {"enum": values}

    def _types(self, rules: dict[str, Any], where: str) -> list[str]:
        if "type" not in rules:
            # The keywords tell: the others' types would be free of them.
            meant = [name for name in ("string", "number", "object", "array") if _OF_TYPE[name] & rules.keys()]
            if len(meant) > 1:
                raise InvalidRequestError(f"{FIELD}: the schema at {where} must have a 'type'")
            return meant
        types = rules["type"] if isinstance(rules["type"], list) else [rules["type"]]
        if not types or any(not isinstance(name, str) or name not in _OF_TYPE for name in types):
            raise _wrong(where, "type", rules["type"], f"must be of {', '.join(_OF_TYPE)}")
        return [name for name in dict.fromkeys(types) if name != "integer" or "number" not in types]

    def _visit_string(self, rules: dict[str, Any], result: dict[str, Any], where: str) -> None:
        lengths = rules.keys() & {"minLength", "maxLength"}
        given = [*(name for name in ("pattern", "format") if name in rules), *sorted(lengths)]
        if "pattern" in rules or "format" in rules:
            if len(given) > 1:
                raise _unsupported(where, given[1], f" beside {given[0]!r}")
            pattern = rules[given[0]]
            if given[0] == "format":
                if not isinstance(pattern, str) or pattern not in _FORMATS:
                    raise _wrong(where, "format", pattern, f"must be one of {', '.join(sorted(_FORMATS))}")
                pattern = _FORMATS[pattern]
            elif not isinstance(pattern, str):
                raise _wrong(where, "pattern", pattern, "must be a string")
            result["pattern"] = to_json_string_regex(pattern, f"{FIELD}: 'pattern' at {where}")
        elif lengths:
            # xgrammar's own lengths let raw control characters through, which is not JSON.
            low, high = _count(rules, "minLength", where) or 0, _count(rules, "maxLength", where)
            if high is not None and low > high:
                raise _wrong(where, "minLength", low, f"must be at most maxLength ({high})")
            bounds = f"{{{low},{'' if high is None else high}}}"
            result["pattern"] = to_json_string_regex(rf"[\s\S]{bounds}", f"{FIELD}: lengths at {where}")

    def _visit_number(self, rules: dict[str, Any], result: dict[str, Any], where: str) -> None:
        for name in rules.keys() & _OF_TYPE["number"]:
            value = rules[name]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _wrong(where, name, value, "must be a number")
            if abs(value) > _MAX_INTEGER:
                raise _wrong(where, name, value, f"must be from -{_MAX_INTEGER} to {_MAX_INTEGER}")
        if result["type"] == "integer" or "integer" in result["type"]:
            self._visit_integer(rules, result, where)
            return
        if "multipleOf" in rules:
            raise _unsupported(where, "multipleOf", " with type number")
        for name in rules.keys() & _OF_TYPE["number"]:
            if round(rules[name], _MAX_BOUND_DIGITS) != rules[name]:
                raise _wrong(where, name, rules[name], f"must have at most {_MAX_BOUND_DIGITS} digits after the point")
            result[name] = rules[name]

    def _visit_integer(self, rules: dict[str, Any], result: dict[str, Any], where: str) -> None:
        low, high = -math.inf, math.inf
        if "minimum" in rules:
            low = math.ceil(rules["minimum"])
        if "exclusiveMinimum" in rules:
            low = max(low, math.floor(rules["exclusiveMinimum"]) + 1)
        if "maximum" in rules:
            high = math.floor(rules["maximum"])
        if "exclusiveMaximum" in rules:
            high = min(high, math.ceil(rules["exclusiveMaximum"]) - 1)
        step = rules.get("multipleOf", 1)
        if not 1 <= step <= _MAX_MULTIPLE_OF or step != int(step):
            raise _wrong(where, "multipleOf", step, f"must be a whole number from 1 to {_MAX_MULTIPLE_OF}")
        if low > -math.inf:
            result["minimum"] = low = -(-int(low) // int(step)) * int(step)
        if high < math.inf:
            result["maximum"] = high = int(high) // int(step) * int(step)
        if low > high:
            raise InvalidRequestError(f"{FIELD}: the schema at {where} allows no integer between its bounds")
        if step > 1:
            result["multipleOf"] = int(step)

    def _visit_object(self, rules: dict[str, Any], result: dict[str, Any], where: str) -> None:
        properties = self._visit_named(rules.get("properties", {}), "properties", where)
        required = rules.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _wrong(where, "required", required, "must be a list of strings")
        if missing := [name for name in required if name not in properties]:
            raise _wrong(where, "required", missing[0], "must be one of the properties")
        extra = rules.get("additionalProperties", True)
        if not isinstance(extra, bool):
            extra = self.visit(extra, f"{where}/additionalProperties")
        if properties:
            result["properties"] = properties
            result["required"] = required
            for name in ("patternProperties", "propertyNames"):
                if name in rules:
                    raise _unsupported(where, name, " beside 'properties'")
            if isinstance(extra, dict) and extra:
                raise _unsupported(where, "additionalProperties", " beside 'properties', unless it is true or false")
            # xgrammar would take a property's name, written with an escape, for an additional one.
            result["additionalProperties"] = False
        else:
            self._visit_free_names(rules, extra, result, where)
        for name in ("minProperties", "maxProperties"):
            if (count := _count(rules, name, where)) is not None:
                if name == "minProperties" and count and not properties:
                    # A name that comes twice would be counted twice.
                    raise _unsupported(where, name, " without 'properties'")
                result[name] = count

    def _visit_free_names(self, rules: dict[str, Any], extra: Any, result: dict[str, Any], where: str) -> None:
        """An object without `properties`: its values have one schema, and its names may have a pattern."""
        patterns = rules.get("patternProperties", {})
        if patterns:
            if not isinstance(patterns, dict) or len(patterns) > 1 or "propertyNames" in rules:
                raise _unsupported(where, "patternProperties", " with several patterns or beside 'propertyNames'")
            [(pattern, schema)] = patterns.items()
            path = f"{where}/patternProperties/{_escape(pattern)}"
            regex = to_json_string_regex(pattern, f"{FIELD}: 'patternProperties' at {where}")
            # The rewritten pattern is another name: nothing can refer to what is under it.
            result["patternProperties"] = {regex: _Walk.visit_apart(schema, path)}
            result["additionalProperties"] = False
            return
        result["additionalProperties"] = extra
        if "propertyNames" in rules:
            names = self.visit(rules["propertyNames"], f"{where}/propertyNames")
            if not ("pattern" in names or ("enum" in names and all(isinstance(name, str) for name in names["enum"]))):
                raise _unsupported(where, "propertyNames", " unless it has a pattern, a length or an enum of strings")
            result["propertyNames"] = names

    @staticmethod
    def visit_apart(schema: Any, where: str) -> Any:
        walk = _Walk()
        result = walk.visit(schema, where)
        if walk._references:
            raise _unsupported(where, "$ref", " inside 'patternProperties'")
        return result

    def _visit_array(self, rules: dict[str, Any], result: dict[str, Any], where: str) -> None:
        if rules.get("uniqueItems", False) is not False:
            raise _unsupported(where, "uniqueItems", "")
        if "prefixItems" in rules:
            prefix = self._visit_applicator("prefixItems", rules["prefixItems"], where)
            result["prefixItems"] = prefix
        if "items" in rules:
            items = rules["items"]
            result["items"] = False if items is False else self.visit(items, f"{where}/items")
        for name in ("minItems", "maxItems"):
            if (count := _count(rules, name, where)) is not None:
                result[name] = count


def _count(rules: Mapping[str, Any], name: str, where: str) -> int | None:
    value = rules.get(name)
    if value is None and name not in rules:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise _wrong(where, name, value, "must be a whole number, at least 0")
    return int(value)


def _is_of_type(value: Any, type_name: str) -> bool:
    match type_name:
        case "string":
            return isinstance(value, str)
        case "integer":
            return not isinstance(value, bool) and isinstance(value, int | float) and value == int(value)
        case "number":
            return not isinstance(value, bool) and isinstance(value, int | float)
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "boolean":
            return isinstance(value, bool)
    return value is None


def _are_disjoint(schemas: list[dict[str, Any]]) -> bool:
    """Whether the types of the (rewritten) schemas tell them apart; they may be disjoint though they do not."""
    types: list[set[str]] = []
    for schema in schemas:
        if "enum" in schema:
            types.append({name for name in _OF_TYPE for value in schema["enum"] if _is_of_type(value, name)})
        elif "type" in schema:
            types.append({schema["type"]} if isinstance(schema["type"], str) else set(schema["type"]))
        else:
            return False
    types = [names | {"number"} if "integer" in names else names for names in types]
    return sum(map(len, types)) == len(set().union(*types))


def _check_exact(value: Any, name: str, where: str) -> None:
    """xgrammar writes larger integers as rounded floats."""
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise _wrong(where, name, value, f"must be from -{_MAX_INTEGER} to {_MAX_INTEGER}")
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_exact(child, name, where)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _wrong(where: str, name: str, value: Any, limit: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD}: {name!r} at {where} is {shown(value)}: {limit}")


def _unsupported(where: str, name: str, context: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD} uses {name!r}{context} at {where}, which is not supported")
