"""From a regular expression of Python's `re` to one that means the same to xgrammar.

xgrammar reads its own dialect: it takes `.` for any character, `\\Z` for the letter Z, and ignores a `$` in the
middle. So the expression is read by Python's own parser and written anew, with nothing but groups, alternatives,
counted repeats and explicit sets of characters. What cannot be written so (lookaround, backreferences, word
boundaries, flags, possessive repeats) is refused.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any

from deepinfer_backend.errors import InvalidRequestError, shown

# Python's own reading of an expression. It has no public name since `sre_parse` was retired.
_parser: Any = importlib.import_module("re._parser")
_constants: Any = importlib.import_module("re._constants")

Ranges = list[tuple[int, int]]
"""A set of code points: first and last of each range, in order, apart from each other."""

_ALL: Ranges = [(0, 0xD7FF), (0xE000, sys.maxunicode)]
_JSON_ESCAPED: Ranges = [(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]

# Only ASCII where a class is asked for: a subset of what Python takes, and what people mean by it. Where a class is
# excluded, all that Python counts to it is.
_ASCII_CLASSES: dict[str, Ranges] = {
    "DIGIT": [(0x30, 0x39)],
    "WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "SPACE": [(0x09, 0x0D), (0x20, 0x20)],
}
_UNICODE_CLASSES = {"DIGIT": r"\d+", "WORD": r"\w+", "SPACE": r"\s+"}
_CARET = ord("^")
# A range across characters of several lengths in UTF-8, inside a JSON string, lets xgrammar take what is not UTF-8
# (F0 80 80 80), so each length has a set of its own.
_BY_LENGTH: list[Ranges] = [
    [(0, _CARET - 1), (_CARET, _CARET), (_CARET + 1, 0x7F)],
    [(0x80, 0x7FF)],
    [(0x800, 0xFFFF)],
    [(0x10000, sys.maxunicode)],
]
_JSON_CHARACTER = "a character that JSON escapes"


def to_xgrammar_regex(pattern: str, field: str) -> str:
    """The expression in xgrammar's dialect whose texts are among those that `re.fullmatch(pattern, text)` takes.

    Raises:
        InvalidRequestError: `re` refuses it, or it uses what no grammar can express; the message names `field`.
    """
    return _Writer(field, pattern, _ALL).write()


def to_json_string_regex(pattern: str, field: str) -> str:
    """The same for what stands between the quotes of a JSON string, without the characters that JSON escapes.

    The whole string matches, which is more than the `re.search` that a JSON schema's `pattern` asks for.

    Raises:
        InvalidRequestError: as `to_xgrammar_regex`, or it needs one of the characters that JSON escapes.
    """
    return _Writer(field, pattern, _minus(_ALL, _JSON_ESCAPED)).write()


class _Writer:
    """Writes one expression; `alphabet` is what may stand in the text."""

    def __init__(self, field: str, pattern: str, alphabet: Ranges) -> None:
        self._field = field
        self._pattern = pattern
        self._alphabet = alphabet

    def write(self) -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = _parser.parse(self._pattern)
            if tree.state.flags & ~re.UNICODE:
                raise self._unsupported("a flag")
            return self._sequence(list(tree), at_start=True, at_end=True)
        except (re.error, OverflowError) as error:
            raise InvalidRequestError(
                f"{self._field} is {shown(self._pattern)}: must be a regular expression: {error}"
            ) from None
        except RecursionError:
            raise InvalidRequestError(f"{self._field} is {shown(self._pattern)}: is nested too deeply") from None

    def _sequence(self, items: list[tuple[Any, Any]], *, at_start: bool, at_end: bool) -> str:
        """`at_start`, `at_end`: nothing of the text stands before the first item, after the last one."""
        kinds = [kind for kind, _ in items]
        anchors = [index for index, kind in enumerate(kinds) if kind is _constants.AT]
        first = next((index for index in range(len(items)) if index not in anchors), len(items))
        last = next((index for index in reversed(range(len(items))) if index not in anchors), -1)
        parts = []
        for index, (kind, value) in enumerate(items):
            starts, ends = at_start and index <= first, at_end and index >= last
            if kind is _constants.AT:
                self._check_anchor(value, starts=starts, ends=ends)
            else:
                parts.append(self._item(kind, value, at_start=starts, at_end=ends))
        return "".join(parts)

    def _check_anchor(self, where: Any, *, starts: bool, ends: bool) -> None:
        if where in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
            if not starts:
                raise self._unsupported("^ in the middle")
        elif where in (_constants.AT_END, _constants.AT_END_STRING):
            if not ends:
                raise self._unsupported("$ in the middle")
        else:
            raise self._unsupported("a word boundary")

    def _item(self, kind: Any, value: Any, *, at_start: bool, at_end: bool) -> str:
        if kind is _constants.SUBPATTERN:
            _, added_flags, removed_flags, inner = value
            if added_flags or removed_flags:
                raise self._unsupported("a flag")
            return f"(?:{self._sequence(list(inner), at_start=at_start, at_end=at_end)})"
        if kind is _constants.BRANCH:
            branches = [self._sequence(list(branch), at_start=at_start, at_end=at_end) for branch in value[1]]
            return f"(?:{'|'.join(branches)})"
        # A lazy repeat takes the same texts as a greedy one when the whole text must match.
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            low, high, inner = value
            # Over one repeat, the first is not at the end and the last is not at the start.
            once = high == 1
            body = self._sequence(list(inner), at_start=at_start and once, at_end=at_end and once)
            return f"(?:{body}){{{low},{'' if high is _constants.MAXREPEAT else high}}}"
        return _write_class(self._characters(kind, value))

    def _characters(self, kind: Any, value: Any) -> Ranges:
        if kind is _constants.LITERAL:
            asked: Ranges = [(value, value)]
        elif kind is _constants.NOT_LITERAL:
            asked = _minus(_ALL, [(value, value)])
        elif kind is _constants.ANY:
            asked = _minus(_ALL, [(0x0A, 0x0A)])
        elif kind is _constants.IN:
            negated = value[0][0] is _constants.NEGATE
            members = value[1:] if negated else value
            asked = _union(piece for member in members for piece in self._member(*member, exact=negated))
            if negated:
                asked = _minus(_ALL, asked)
        else:
            raise self._unsupported(_NAMES.get(str(kind), str(kind).lower().replace("_", " ")))
        allowed = _intersection(asked, self._alphabet)
        if not allowed:
            raise self._unsupported(_JSON_CHARACTER if _intersection(asked, _JSON_ESCAPED) else "a surrogate")
        return allowed

    def _member(self, kind: Any, value: Any, *, exact: bool) -> Ranges:
        if kind is _constants.LITERAL:
            return [(value, value)]
        if kind is _constants.RANGE:
            return [value]
        name = str(value).removeprefix("CATEGORY_")
        if name.startswith("NOT_"):
            return _minus(_ALL, _ASCII_CLASSES[name[4:]] if exact else _unicode_class(name[4:]))
        return _unicode_class(name) if exact else _ASCII_CLASSES[name]

    def _unsupported(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._field} is {shown(self._pattern)}: uses {what}, which is not supported")


_NAMES = {
    "ASSERT": "lookaround",
    "ASSERT_NOT": "lookaround",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a condition",
    "POSSESSIVE_REPEAT": "a possessive repeat",
    "ATOMIC_GROUP": "an atomic group",
}


@cache
def _unicode_class(name: str) -> Ranges:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    return [(match.start(), match.end() - 1) for match in re.finditer(_UNICODE_CLASSES[name], everything)]


def _union(pieces: Iterable[tuple[int, int]]) -> Ranges:
    merged: Ranges = []
    for first, last in sorted(pieces):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _minus(ranges: Ranges, removed: Ranges) -> Ranges:
    kept, start = [], 0
    for first, last in removed:
        kept.append((start, first - 1))
        start = last + 1
    kept.append((start, sys.maxunicode))
    return _intersection(ranges, kept)


def _intersection(ranges: Ranges, kept: Ranges) -> Ranges:
    return [
        (max(first, kept_first), min(last, kept_last))
        for first, last in ranges
        for kept_first, kept_last in kept
        if max(first, kept_first) <= min(last, kept_last)
    ]


def _write_class(ranges: Ranges) -> str:
    sets = [
        _write_set([piece for part in parts for piece in _intersection(ranges, [part])])
        for parts in _BY_LENGTH
        if _intersection(ranges, parts)
    ]
    return sets[0] if len(sets) == 1 else f"(?:{'|'.join(sets)})"


def _write_set(pieces: Ranges) -> str:
    first, last = pieces[0]
    if len(pieces) == 1 and first == last:
        char = chr(first)
        return char if char.isascii() and char.isalnum() else _write_char(first)
    if first == _CARET:
        # In the first place even an escaped ^ would mean: all but these.
        pieces = [*pieces[1:], pieces[0]]
    return "[" + "".join(f"{_write_char(first)}-{_write_char(last)}" for first, last in pieces) + "]"


def _write_char(code: int) -> str:
    return rf"\u{{{code:x}}}"
