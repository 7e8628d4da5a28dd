"""What the sampler must remember of the sequences whose requests change their logits, and what it makes of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.worker.bad_words import BadWords
from deepinfer_backend.worker.logit_edits import (
    BITS_PER_WORD,
    AllowedTokens,
    BannedTokens,
    GrammarMask,
    LogitBiases,
    LogitEdits,
    Penalties,
)
from deepinfer_backend.worker.token_penalties import TokenPenalties


class Grammar(Protocol):
    """Where one sequence stands in the form that its text must have."""

    def accept(self, token_id: int) -> bool:
        """Goes on by one token; False, and stays, if the form doesn't allow it."""

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
        if self.penalties is not None:
            self.penalties.append(token_id)
        if self.bad_words is not None:
            self.bad_words.append(token_id)
        grammar = self.masking_grammar()
        if grammar is not None:
            self.grammar_failed = not grammar.accept(token_id)

    def masking_grammar(self) -> Grammar | None:
        """The grammar, if it has a say in the next token."""
        if self.grammar is None or self.grammar_failed or self.grammar.is_terminated:
            return None
        return self.grammar

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


class SequenceStates:
    """The states of the live sequences that have one, by seq_id; of all others it knows nothing and needs nothing.

    Used by the thread that steps the engine.
    """

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: how wide a row of logits is."""
        self._vocab_size = vocab_size
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, seq_id: int, state: SequenceState) -> None:
        self._states[seq_id] = state

    def get(self, seq_id: int) -> SequenceState | None:
        return self._states.get(seq_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child starts where the parent is now; nothing to do for a parent without a state."""
        parent = self._states.get(parent_id)
        if parent is not None:
            self._states[child_id] = parent.fork()

    def remove(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            self._states.pop(int(seq_id), None)

    def append(
        self, seq_ids: NDArray[np.integer[Any]], token_ids: NDArray[np.int32], num_tokens: NDArray[np.int32]
    ) -> list[int]:
        """Output tokens that were taken: of row i the first num_tokens[i] of token_ids[i], [n, width].

        Returns the seq_ids whose grammar has failed.
        """
        failed = []
        for row, seq_id, state in self._rows_with_state(range(len(seq_ids)), seq_ids):
            for token_id in token_ids[row, : num_tokens[row]].tolist():
                state.append(token_id)
            if state.grammar_failed:
                failed.append(seq_id)
        return failed

    def edits(self, rows: NDArray[np.integer[Any]], seq_ids: NDArray[np.integer[Any]]) -> LogitEdits | None:
        """What the sequences [m] change in their rows [m] of a step's logits; None if nothing."""
        states = [(row, state) for row, _, state in self._rows_with_state(rows.tolist(), seq_ids)]
        if not states:
            return None
        edits = LogitEdits(
            grammar=self._grammar_mask(states),
            allowed=self._allowed(states),
            banned=self._banned(states),
            biases=self._biases(states),
            penalties=self._penalties(states),
        )
        return None if edits == LogitEdits() else edits

    def _rows_with_state(
        self, rows: Iterable[int], seq_ids: NDArray[np.integer[Any]]
    ) -> Iterator[tuple[int, int, SequenceState]]:
        if not self._states:
            return
        for row, seq_id in zip(rows, seq_ids.tolist(), strict=True):
            state = self._states.get(seq_id)
            if state is not None:
                yield row, seq_id, state

    def _grammar_mask(self, states: _RowStates) -> GrammarMask | None:
        rows, bitmasks = [], []
        for row, state in states:
            grammar = state.masking_grammar()
            if grammar is None:
                continue
            bitmask = np.empty(-(-self._vocab_size // BITS_PER_WORD), dtype=np.int32)
            try:
                grammar.fill_bitmask(bitmask)
            except InvalidRequestError as error:
                state.grammar_failed = True
                state.failure_reason = error.message
                continue
            rows.append(row)
            bitmasks.append(bitmask)
        return GrammarMask(np.array(rows, dtype=np.int64), np.stack(bitmasks)) if rows else None

    def _allowed(self, states: _RowStates) -> AllowedTokens | None:
        token_ids = [(row, state.allowed) for row, state in states if len(state.allowed)]
        if not token_ids:
            return None
        return AllowedTokens(np.array([row for row, _ in token_ids], dtype=np.int64), self._entries(token_ids))

    def _banned(self, states: _RowStates) -> BannedTokens | None:
        token_ids = [(row, state.bad_words.completions()) for row, state in states if state.bad_words is not None]
        entries = self._entries(token_ids)
        return BannedTokens(entries) if len(entries) else None

    def _biases(self, states: _RowStates) -> LogitBiases | None:
        biased = [(row, state) for row, state in states if len(state.biased)]
        if not biased:
            return None
        return LogitBiases(
            self._entries([(row, state.biased) for row, state in biased]),
            np.concatenate([state.biases for _, state in biased]),
        )

    def _penalties(self, states: _RowStates) -> Penalties | None:
        penalized = [
            (row, state.repetition_penalty, state.penalties)
            for row, state in states
            if state.penalties is not None and len(state.penalties.token_ids)
        ]
        if not penalized:
            return None
        lengths = [len(penalties.token_ids) for _, _, penalties in penalized]
        return Penalties(
            self._entries([(row, penalties.token_ids) for row, _, penalties in penalized]),
            np.repeat(np.array([factor for _, factor, _ in penalized], dtype=np.float32), lengths),
            np.concatenate([penalties.costs for _, _, penalties in penalized]),
        )

    def _entries(self, token_ids: list[tuple[int, NDArray[np.int64]]]) -> NDArray[np.int64]:
        """(row, its token ids) → their places in the whole batch of logits."""
        if not token_ids:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([row * self._vocab_size + ids for row, ids in token_ids])


_RowStates = list[tuple[int, SequenceState]]


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ValueError(f"{name} has token id {largest}: must be less than the vocabulary's size ({vocab_size})")
