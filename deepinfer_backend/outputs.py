"""What callers receive: pieces of text with their token ids, and how each sequence ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TextDelta:
    """What is new of one sequence since its last delta.

    The texts of all deltas joined are the sequence's text; `finish_reason` is set on the last one only: "stop"
    or "length". `stop_reason` is the token id or the string that stopped it, if one did.
    """

    sequence_index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
