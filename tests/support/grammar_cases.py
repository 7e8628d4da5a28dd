"""Schemas, expressions and grammars of many kinds, each with a judge of its own: what structured output must obey.

All are the same at every run, and a text that obeys one can be short.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

NUM_SCHEMAS = 300
NUM_REGEXES = 100
NUM_GRAMMARS = 50

_KEYS = (
    "name",
    "age",
    "id",
    "ok",
    "größe",
    "名前",
    "ключ",
    "a b",
    'quo"te',
    "back\\slash",
    "emoji 😀",
    "x/y",
    "t~z",
    "ß",
)
_WORDS = (
    "red",
    "green",
    "blau",
    "赤い",
    "зелёный",
    "naïve",
    'say "hi"',
    "a\\b",
    "line\nbreak",
    "tab\tbed",
    "😀👍",
    "",
    " ",
)
_PATTERNS = (
    "^[a-z]{1,6}$",
    "^[A-Z]{2}-[0-9]{3}$",
    r"^\d{1,4}$",
    "^(yes|no|maybe)$",
    "^[äöü]{1,3}$",
    r"^\w{1,5}\.\w{2}$",
    "^.{1,6}$",
)
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


@dataclass(frozen=True, slots=True)
class GrammarCase:
    """An EBNF grammar, and whether a text belongs to it by other means than a grammar."""

    grammar: str
    is_valid: Callable[[str], bool]


def json_schema_cases() -> list[dict[str, Any]]:
    """Schemas that `jsonschema.Draft202012Validator` judges."""
    generator = random.Random(20_261_129)
    kinds: list[Callable[[random.Random], dict[str, Any]]] = [
        lambda draw: _object(draw, depth=2),
        lambda draw: _array(draw, depth=2),
        _tuple,
        _enum,
        _integer,
        _number,
        _string,
        _any_of,
        _definitions,
        _tree,
        _map,
        _counted_object,
        _typed_list,
        _one_of,
        lambda draw: _object(draw, depth=3),
    ]
    return [kinds[index % len(kinds)](generator) for index in range(NUM_SCHEMAS)]


def regex_cases() -> list[str]:
    """Expressions of Python's `re` that the whole text matches."""
    generator = random.Random(4_711)
    written = [
        r"[a-z]{3,8}",
        r"\d{3}-\d{4}",
        r"(?:red|green|blue)( (?:red|green|blue)){0,3}",
        r"[A-Z][a-z]{1,9}, [A-Z]\.",
        r"(?P<year>\d{4})-(?P<month>0[1-9]|1[0-2])",
        r"^#[0-9a-fA-F]{6}$",
        r"(a|b)*?c",
        r"[^\W\d_]{1,8}",
        r"\S{1,10}\s\S{1,10}",
        r"\D{1,12}",
        r"\W{1,4}",
        r"[^a-z\n]{1,10}",
        r".{0,12}",
        r"[äöüß]+|[а-я]{1,6}|[一-龥]{1,3}",
        r"(😀|👍){1,3}",
        r"\"[^\"\\\n]{0,10}\"",
        r"\\\{\}\[\]\(\)\.\*\+\?\^\$\|",
        r"\x41\u00e9\U0001F600\t\n",
        r"(x(y(z)?)?)?",
        r"\Ayes\Z|\Ano\Z",
        r"[\]\-\\^]{1,4}",
        r"-?(0|[1-9]\d{0,4})(\.\d{1,3})?([eE][+-]?\d{1,2})?",
        r"(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}",
        r"(a{2,3}){1,2}",
        r"|a|bb",
    ]
    return written + [_regex(generator, depth=3) for _ in range(NUM_REGEXES - len(written))]


def grammar_cases() -> list[GrammarCase]:
    """EBNF grammars: regular ones judged by `re`, others by a few lines of Python."""
    generator = random.Random(1_918)
    cases = [
        GrammarCase('root ::= "(" root ")" | "x"', _nested_x),
        GrammarCase('root ::= pair*\npair ::= "(" pair* ")" | "[" pair* "]"', _is_balanced),
        GrammarCase('root ::= "a" root "a" | "b" root "b" | "c"', _is_palindrome),
        GrammarCase('root ::= "a" root "b" | ""', lambda text: text == "a" * (n := len(text) // 2) + "b" * n),
        GrammarCase(
            'root ::= term (" + " term)*\nterm ::= [0-9] | "(" root ")"',
            lambda text: re.fullmatch(r"[0-9+() ]+", text) is not None and _is_sum(text),
        ),
        GrammarCase(
            'root ::= list\nlist ::= "[" (item (", " item)*)? "]"\nitem ::= list | [0-9]{1,2}',
            lambda text: re.fullmatch(r"[\[\]0-9, ]+", text) is not None and _is_list(text),
        ),
    ]
    return cases + [_regular_grammar(generator) for _ in range(NUM_GRAMMARS - len(cases))]


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    keys = draw.sample(_KEYS, draw.randint(1, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: _value(draw, depth - 1) for key in keys},
        "required": [key for key in keys if draw.random() < 0.7],
    }
    if draw.random() < 0.6:
        schema["additionalProperties"] = False
    if draw.random() < 0.3:
        schema["title"], schema["description"] = "T", "An annotation."
    return schema


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(0, 2)
    return {"type": "array", "items": _value(draw, depth - 1), "minItems": low, "maxItems": low + draw.randint(0, 2)}


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_enum, _integer, _number, _string, _boolean, _null, _constant)
    if depth > 0 and draw.random() < 0.4:
        return draw.choice((_object, _array))(draw, depth)
    return draw.choice(leaves)(draw)


def _boolean(draw: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(draw: random.Random) -> dict[str, Any]:
    return {"type": "null"}


def _constant(draw: random.Random) -> dict[str, Any]:
    return {"const": draw.choice((*_WORDS, 0, -7, 2.5, True, None, [1, "zwei"], {"ß": []}))}


def _enum(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.3:
        return {"type": "string", "enum": draw.sample(_WORDS, 3)}
    return {"enum": draw.sample((*_WORDS, 1, -20, 0.125, True, None, {"k": "v"}, [1, 2]), draw.randint(1, 5))}


def _integer(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    low = draw.randint(-1000, 1000)
    schema[draw.choice(("minimum", "exclusiveMinimum"))] = low
    schema[draw.choice(("maximum", "exclusiveMaximum"))] = low + draw.randint(20, 5000)
    if draw.random() < 0.3:
        schema["multipleOf"] = draw.choice((2, 3, 5, 7, 10))
    return schema


def _number(draw: random.Random) -> dict[str, Any]:
    low = round(draw.uniform(-100, 100), draw.randint(0, 3))
    high = round(low + draw.uniform(1, 50), 2)
    return {
        "type": "number",
        draw.choice(("minimum", "exclusiveMinimum")): low,
        draw.choice(("maximum", "exclusiveMaximum")): high,
    }


def _string(draw: random.Random) -> dict[str, Any]:
    match draw.randrange(3):
        case 0:
            low = draw.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 6)}
        case 1:
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    return {"type": "string", "format": draw.choice(_FORMATS)}


def _any_of(draw: random.Random) -> dict[str, Any]:
    return {"anyOf": [_value(draw, 1) for _ in range(draw.randint(2, 4))]}


def _one_of(draw: random.Random) -> dict[str, Any]:
    return {"oneOf": [_string(draw), _integer(draw), {"type": "null"}]}


def _typed_list(draw: random.Random) -> dict[str, Any]:
    schema = {**_integer(draw), **_string(draw)}
    schema["type"] = draw.sample(["integer", "string", "null", "boolean"], 3)
    if "integer" not in schema["type"]:
        schema = {name: value for name, value in schema.items() if name in ("type", *_string_keywords())}
    elif "string" not in schema["type"]:
        schema = {name: value for name, value in schema.items() if name not in _string_keywords()}
    return schema


def _string_keywords() -> tuple[str, ...]:
    return ("minLength", "maxLength", "pattern", "format")


def _tuple(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "prefixItems": [_value(draw, 0) for _ in range(draw.randint(1, 3))]}
    schema["minItems"] = draw.randint(0, len(schema["prefixItems"]))
    if draw.random() < 0.5:
        schema["items"] = False
    return schema


def _definitions(draw: random.Random) -> dict[str, Any]:
    name, where = draw.choice(("point", "ключ", "a/b")), draw.choice(("$defs", "definitions"))
    reference = {"$ref": f"#/{where}/{name.replace('/', '~1')}"}
    return {
        where: {name: _value(draw, 1)},
        "type": "object",
        "properties": {"first": reference, "rest": {"type": "array", "items": reference, "maxItems": 2}},
        "required": ["first"],
    }


def _tree(draw: random.Random) -> dict[str, Any]:
    child = {"$ref": "#/$defs/node"}
    node = {
        "type": "object",
        "properties": {"v": _integer(draw), "next": {"anyOf": [{"type": "null"}, child]}},
        "required": draw.choice((["v"], ["v", "next"])),
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _map(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "maxProperties": 2}
    match draw.randrange(3):
        case 0:
            schema |= {"additionalProperties": _value(draw, 0), "propertyNames": {"pattern": "^[a-z]{1,4}$"}}
        case 1:
            schema |= {"patternProperties": {"^x[0-9]{1,2}$": _value(draw, 0)}, "additionalProperties": False}
        case _:
            schema |= {"additionalProperties": _value(draw, 0), "propertyNames": {"maxLength": 5}}
    return schema


def _counted_object(draw: random.Random) -> dict[str, Any]:
    keys = draw.sample(_KEYS, 4)
    return {
        "type": "object",
        "properties": {key: _value(draw, 0) for key in keys},
        "required": keys[: draw.randint(0, 1)],
        "minProperties": draw.randint(0, 2),
        "maxProperties": draw.randint(2, 3),
        "additionalProperties": False,
    }


def _regex(draw: random.Random, depth: int) -> str:
    if depth == 0:
        atoms = ("a", "ß", r"\d", r"\w", "[a-f]", "[^x\n]", "ok", r"\.", "日本", "[0-9a-z_]", "-", r"\s")
        return draw.choice(atoms)
    match draw.randrange(4):
        case 0:
            return "".join(_regex(draw, depth - 1) for _ in range(draw.randint(1, 3)))
        case 1:
            return f"({'|'.join(_regex(draw, depth - 1) for _ in range(draw.randint(2, 3)))})"
        case 2:
            low = draw.randint(0, 2)
            return f"(?:{_regex(draw, depth - 1)}){{{low},{low + draw.randint(0, 2)}}}"
    return f"({_regex(draw, depth - 1)}){draw.choice(('?', '??', ''))}"


def _regular_grammar(draw: random.Random) -> GrammarCase:
    """The same language written twice: rules that only refer to later ones, and the expression for `re`."""
    rules: list[str] = []
    grammar, expression = _element(draw, 3, rules)
    return GrammarCase("\n".join([f"root ::= {grammar}", *rules]), lambda text: bool(re.fullmatch(expression, text)))


def _element(draw: random.Random, depth: int, rules: list[str]) -> tuple[str, str]:
    if depth == 0:
        return draw.choice(
            (
                ('"a"', "a"),
                ('"yes" | "no"', "yes|no"),
                ("[a-f]", "[a-f]"),
                ("[^a-z\\n]", "[^a-z\n]"),
                ('"\\u00e9\\""', 'é"'),
                ('"\\\\ \\n"', "\\\\ \n"),
                ("[0-9]{2}", "[0-9]{2}"),
                ('"日本"', "日本"),
                ("[α-ω]", "[α-ω]"),
                ('"😀"', "😀"),
            )
        )
    match draw.randrange(5):
        case 0:
            parts = [_element(draw, depth - 1, rules) for _ in range(draw.randint(2, 3))]
            return " ".join(f"({left})" for left, _ in parts), "".join(f"(?:{right})" for _, right in parts)
        case 1:
            parts = [_element(draw, depth - 1, rules) for _ in range(draw.randint(2, 3))]
            return " | ".join(f"({left})" for left, _ in parts), "|".join(f"(?:{right})" for _, right in parts)
        case 2:
            left, right = _element(draw, depth - 1, rules)
            low = draw.randint(0, 1)
            counted = f"{{{low},{low + draw.randint(1, 2)}}}"
            return f"({left}){counted}", f"(?:{right}){counted}"
        case 3:
            left, right = _element(draw, depth - 1, rules)
            return f"({left})?", f"(?:{right})?"
    left, right = _element(draw, depth - 1, rules)
    rules.append(f"rule{len(rules)} ::= {left}")
    return f"rule{len(rules) - 1}", f"(?:{right})"


def _nested_x(text: str) -> bool:
    depth = len(text) // 2
    return text == "(" * depth + "x" + ")" * depth


def _is_palindrome(text: str) -> bool:
    return text == text[::-1] and len(text) % 2 == 1 and text[len(text) // 2] == "c" and text.count("c") == 1


def _is_balanced(text: str) -> bool:
    return _reduces_to(text, "", (("()", ""), ("[]", "")))


def _is_sum(text: str) -> bool:
    text = re.sub("[0-9]", "n", text)
    return _reduces_to(text, "n", (("n + n", "n"), ("(n)", "n"))) and re.search("[0-9]{2}", text) is None


def _is_list(text: str) -> bool:
    text = re.sub("(?<![0-9])[0-9]{1,2}(?![0-9])", "n", text)
    return text.startswith("[") and _reduces_to(text, "n", (("n, n", "n"), ("[n]", "n"), ("[]", "n")))


def _reduces_to(text: str, end: str, rewrites: Iterable[tuple[str, str]]) -> bool:
    before = None
    while text != before:
        before = text
        for old, new in rewrites:
            text = text.replace(old, new)
    return text == end
