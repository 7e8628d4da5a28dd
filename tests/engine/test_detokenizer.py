"""Streamed text is whole characters, equal to the text decoded at once; stop strings are cut exactly."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_backend.engine.detokenizer import Detokenizer, StopStrings
from deepinfer_backend.models.loader import load_tokenizer, resolve_model


@cache
def bundled_tokenizer() -> Any:
    tokenizer: Any = load_tokenizer(resolve_model(None))
    return tokenizer.backend_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    return bundled_tokenizer()


def pieces(tokenizer: Any, token_ids: list[int], context: list[int] = []) -> list[str]:  # noqa: B006
    detokenizer = Detokenizer(tokenizer, context)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize(
    "text",
    [
        "plain words, and more",
        "  leading spaces",
        "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag",
        "世界上最高的山是珠穆朗玛峰",
        "مرحبا بالعالم",
        "def f(x):\n\treturn {'a': [1, 2]}\n",
        "a\N{REPLACEMENT CHARACTER}b",
    ],
)
def test_pieces_joined_are_the_text_and_no_piece_has_half_a_character(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    streamed = pieces(tokenizer, token_ids, context=tokenizer.encode("The prompt").ids)
    assert "".join(streamed) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in streamed)


@given(text=st.text(max_size=40))
def test_any_text_streams_to_itself(text: str) -> None:
    tokenizer = bundled_tokenizer()
    streamed = "".join(pieces(tokenizer, tokenizer.encode(text).ids))
    assert streamed == tokenizer.decode(tokenizer.encode(text).ids).rstrip("\N{REPLACEMENT CHARACTER}")


def test_character_cut_off_by_the_end_is_dropped(tokenizer: Any) -> None:
    token_ids = tokenizer.encode("ok 👩").ids
    assert "".join(pieces(tokenizer, token_ids[:-1])) == "ok "


def test_bytes_that_are_no_character_come_out_as_replacement(tokenizer: Any) -> None:
    first_byte = tokenizer.encode("👩").ids[:1]
    token_ids = first_byte + tokenizer.encode(" and on").ids
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(
    parts=st.lists(st.text(alphabet="abc", max_size=3), max_size=8),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_string_across_pieces_is_cut_at_its_first_place(parts: list[str], stop: list[str]) -> None:
    text = "".join(parts)
    stop_strings = StopStrings(stop)
    streamed, found = "", None
    for part in parts:
        piece, found = stop_strings.push(part)
        streamed += piece
        assert not any(string in streamed for string in stop)
        if found is not None:
            break
    else:
        streamed += stop_strings.finish()
    if found is None:
        assert streamed == text
        assert not any(string in text for string in stop)
    else:
        assert text.startswith(streamed + found)
        assert not any(string in streamed + found[:-1] for string in stop if len(string) > len(found))
