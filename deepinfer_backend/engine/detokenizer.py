"""Token ids → text, as it grows: only whole UTF-8 characters, stop strings held back and cut; and one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Enough of the prompt that a decoder which treats the first word of a text specially sees that ours is not the first.
_NUM_CONTEXT_TOKENS = 6


class Detokenizer:
    """The growing text of one sequence.

    `push` returns what is new; a character whose bytes are not all there yet is held back until they are. `finish`
    returns what was still held, less an incomplete character at the very end. Without `spaces_between_special_tokens`
    the second of two added tokens in a row is its bare text, where the tokenizer would put a space between them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bare_tokens: dict[int, str] = {}
        if not skip_special_tokens and not spaces_between_special_tokens:
            self._bare_tokens = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
        self._told = [int(token_id) for token_id in prompt_token_ids[-_NUM_CONTEXT_TOKENS:]]
        if self._decode(self._told).endswith(_REPLACEMENT):
            self._told = []  # A prompt that ends inside a character is no context to tell text apart from.
        self._held: list[int] = []
        self._stream = self._new_stream()

    @property
    def num_held_tokens(self) -> int:
        """How many of the last tokens have given no text yet: part of a character, or shown later with what follows."""
        return len(self._held)

    def push(self, token_id: int) -> str:
        follows_added = not self._held and bool(self._told) and self._told[-1] in self._bare_tokens
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # The library's word for "the text so far changed under a later token": start afresh.
            self._told = []
            self._stream = self._new_stream()
            text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._told = (self._told + self._held)[-_NUM_CONTEXT_TOKENS:]
        self._held = []
        return self._bare_tokens[token_id] if follows_added and token_id in self._bare_tokens else str(text)

    def finish(self) -> str:
        told, everything = self._decode(self._told), self._decode(self._told + self._held)
        return everything.removeprefix(told).rstrip(_REPLACEMENT)

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._told, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))


class StopStrings:
    """Cuts a growing text at the first of several strings.

    What `push` lets out is never part of a stop string: the longest end of the text that could still become one is
    held back. `include` leaves the string that was found in the text.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = stop
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """→ (text that is certain, the stop string that was found or None)."""
        if not self._stop:
            return text, None
        text = self._held + text
        found = [(position, string) for string in self._stop if (position := text.find(string)) >= 0]
        if found:
            position, string = min(found)
            self._held = ""
            return text[: position + len(string) if self._include else position], string
        num_held = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without being all of it."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)


class TokenTexts:
    """The text of single tokens, as they stand inside a text: a space that a token begins with is part of it.

    A token that is part of a character only is shown as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop the space before the first word of a text; after this one nothing is first.
        self._before = tokenizer.encode("a", add_special_tokens=False).ids
        self._text_before = tokenizer.decode(self._before)
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        if token_id not in self._texts:
            text = self._tokenizer.decode([*self._before, token_id], skip_special_tokens=False)
            self._texts[token_id] = text.removeprefix(self._text_before)
        return self._texts[token_id]
