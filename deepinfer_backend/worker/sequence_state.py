"""What the sampler must remember of one sequence whose request changes its logits."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.worker.bad_words import BadWords
from deepinfer_backend.worker.token_penalties import TokenPenalties


class Grammar(Protocol):
    """Where one sequence stands in the form that its text must have."""

    def accept(self, token_id: int) -> bool:
        """Goes on by one token; False, and stays, if the form doesn't allow it."""

    def take_back(self, num_tokens: int) -> None:
        """Undoes the last accepts."""

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Writes all of row, [ceil(vocab_size / 32)]: a set bit for each token that may come next.

        Raises:
            InvalidRequestError: none may.
        """

    @property
    def is_terminated(self) -> bool:
        """Whether the text is whole: it accepted an end token."""

    def fork(self) -> Grammar:
        """Another one at the same place that goes its own way."""


def needs_state(params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]] = ()) -> bool:
    """Whether a request changes its logits; the sequences of one that doesn't need no SequenceState."""
    return bool(
        _has_penalties(params)
        or params.logit_bias
        or params.allowed_token_ids
        or params.structured_outputs is not None
        or bad_words_token_ids
    )


class SequenceState:
    """One sequence's part of what the sampler remembers: it is as far as the tokens that were appended.

    Owns its grammar. `grammar_failed`: the grammar has no way on, or refused a token: the request can't go on, and its
    rows are no longer masked; `failure_reason`, if the grammar gave one. Used by the thread that steps the engine.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: NDArray[np.int32],
        vocab_size: int,
        *,
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """bad_words_token_ids: token sequences of at least one token that the output must not contain.

        Raises:
            ValueError: a token id is vocab_size or more.
        """
        allowed = sorted(set(params.allowed_token_ids or ()))
        for name, token_ids in (
            ("allowed_token_ids", allowed),
            ("logit_bias", params.logit_bias),
            ("bad_words", [token_id for word in bad_words_token_ids for token_id in word]),
        ):
            _check_token_ids(name, token_ids, vocab_size)
        self.grammar = grammar
        self.grammar_failed = False
        self.failure_reason = ""
        self.allowed = np.array(allowed, dtype=np.int64)
        self.biased = np.array(list(params.logit_bias), dtype=np.int64)
        self.biases = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.repetition_penalty = params.repetition_penalty
        self.bad_words = BadWords(bad_words_token_ids) if bad_words_token_ids else None
        self.penalties: TokenPenalties | None = None
        if _has_penalties(params):
            self.penalties = TokenPenalties(
                prompt_token_ids if params.repetition_penalty != 1.0 else prompt_token_ids[:0],
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
            )

    def append(self, token_id: int) -> None:
        """The sequence's next output token."""
        self._append_outside_of_grammar(token_id)
        grammar = self.masking_grammar()
        if grammar is not None:
            self.grammar_failed = not grammar.accept(token_id)

    def follow(self, drafts: Iterable[int]) -> Iterator[int]:
        """Yields 0, 1, 2, … while the state is as if so many drafts had been appended; at the end it is as before.

        Ends before a draft that the grammar does not allow. To be used up.
        """
        taken: list[int] = []
        num_accepted = 0
        yield 0
        for token_id in drafts:
            grammar = self.masking_grammar()
            if grammar is not None:
                if not grammar.accept(token_id):
                    break
                num_accepted += 1
            self._append_outside_of_grammar(token_id)
            taken.append(token_id)
            yield len(taken)
        if self.grammar is not None and num_accepted:
            self.grammar.take_back(num_accepted)
        for token_id in reversed(taken):
            if self.penalties is not None:
                self.penalties.take_back(token_id)
            if self.bad_words is not None:
                self.bad_words.take_back()

    def masking_grammar(self) -> Grammar | None:
        """The grammar, if it has a say in the next token."""
        if self.grammar is None or self.grammar_failed or self.grammar.is_terminated:
            return None
        return self.grammar

    def _append_outside_of_grammar(self, token_id: int) -> None:
        if self.penalties is not None:
            self.penalties.append(token_id)
        if self.bad_words is not None:
            self.bad_words.append(token_id)

    def fork(self) -> SequenceState:
        """The state of another sequence with the same past; what never changes is shared."""
        other = copy.copy(self)
        if self.penalties is not None:
            other.penalties = self.penalties.fork()
        if self.bad_words is not None:
            other.bad_words = self.bad_words.fork()
        if self.grammar is not None:
            other.grammar = self.grammar.fork()
        return other


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ValueError(f"{name} has token id {largest}: must be less than the vocabulary's size ({vocab_size})")
