"""Streamed text is whole characters, equal to the text decoded at once; stop strings are cut exactly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from deepinfer_backend.engine.detokenizer import Detokenizer, StopStrings, TokenTexts
from tests.support.tokenizers import bundled_tokenizer, sentencepiece_like_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    return bundled_tokenizer().backend_tokenizer


def pieces(tokenizer: Any, token_ids: list[int], context: list[int] = [], **options: bool) -> list[str]:  # noqa: B006
    detokenizer = Detokenizer(tokenizer, context, **options)
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
    tokenizer = bundled_tokenizer().backend_tokenizer
    streamed = "".join(pieces(tokenizer, tokenizer.encode(text).ids))
    assert streamed == tokenizer.decode(tokenizer.encode(text).ids).rstrip("\N{REPLACEMENT CHARACTER}")


def test_character_cut_off_by_the_end_is_dropped(tokenizer: Any) -> None:
    token_ids = tokenizer.encode("ok 👩").ids
    assert "".join(pieces(tokenizer, token_ids[:-1])) == "ok "


def test_bytes_that_are_no_character_come_out_as_replacement(tokenizer: Any) -> None:
    first_byte = tokenizer.encode("👩").ids[:1]
    token_ids = first_byte + tokenizer.encode(" and on").ids
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize(("skip", "text"), [(True, " sea is"), (False, " sea</s> is")])
def test_special_tokens_are_left_out_or_shown(skip: bool, text: str) -> None:
    fast = sentencepiece_like_tokenizer()
    token_ids = fast.convert_tokens_to_ids(["▁sea", "</s>", "▁is"])
    streamed = pieces(fast.backend_tokenizer, token_ids, context=[3], skip_special_tokens=skip)
    assert "".join(streamed) == text


@pytest.mark.parametrize(("spaces", "text"), [(True, " <tool> <tool></s> is"), (False, " <tool><tool></s> is")])
def test_the_space_between_two_special_tokens_can_be_left_out(spaces: bool, text: str) -> None:
    """This tokenizer writes a space before "<tool>"."""
    fast = sentencepiece_like_tokenizer()
    fast.backend_tokenizer.decoder = decoders.Sequence([decoders.Replace("<tool>", " <tool>"), decoders.Metaspace()])
    token_ids = fast.convert_tokens_to_ids(["<tool>", "<tool>", "</s>", "▁is"])
    streamed = pieces(
        fast.backend_tokenizer,
        token_ids,
        context=[3],
        skip_special_tokens=False,
        spaces_between_special_tokens=spaces,
    )
    assert "".join(streamed) == text


def test_a_tokens_own_text_keeps_its_space() -> None:
    """This tokenizer's decoder drops the space before the first word."""
    fast = sentencepiece_like_tokenizer()
    token_ids = fast.convert_tokens_to_ids(["▁sea", "s", "</s>"])
    assert fast.decode(token_ids[:1]) == "sea"
    texts = TokenTexts(fast.backend_tokenizer)
    assert [texts[token_id] for token_id in token_ids] == [" sea", "s", "</s>"]


def test_the_texts_of_an_ascii_texts_tokens_joined_are_the_text(tokenizer: Any) -> None:
    text = "def f(x):\n\treturn {'a': [1, 2]}  # and more"
    texts = TokenTexts(tokenizer)
    assert "".join(texts[token_id] for token_id in tokenizer.encode(text).ids) == text
    assert texts[tokenizer.encode("👩").ids[0]] == "\N{REPLACEMENT CHARACTER}"


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
