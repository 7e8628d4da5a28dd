"""The sequences whose requests change their logits, and what these edits are in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.worker.logit_edits import (
    BITS_PER_WORD,
    AllowedTokens,
    BannedTokens,
    GrammarMask,
    LogitBiases,
    LogitEdits,
    Penalties,
)
from deepinfer_backend.worker.sequence_state import SequenceState


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
        self, seq_ids: NDArray[np.integer[Any]], token_ids: NDArray[np.integer[Any]], num_tokens: NDArray[np.int32]
    ) -> list[int]:
        """Output tokens that were taken: of row i the first num_tokens[i] of token_ids[i], [n, width].

        Returns the seq_ids whose grammar has failed.
        """
        failed = []
        for index, seq_id, state in self._with_state(seq_ids):
            for token_id in token_ids[index, : num_tokens[index]].tolist():
                state.append(token_id)
            if state.grammar_failed:
                failed.append(seq_id)
        return failed

    def edits(
        self,
        rows: NDArray[np.integer[Any]],
        seq_ids: NDArray[np.integer[Any]],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> LogitEdits | None:
        """What the sequences [m] change in a step's logits; None if nothing.

        rows: [m], the first of each sequence's rows of logits. drafts: of each sequence; the row after its first is for
        the token that follows its first draft, and so on.
        """
        step = _StepEdits(self._vocab_size)
        for index, _, state in self._with_state(seq_ids):
            for position in state.follow(drafts[index] if drafts else ()):
                step.add(int(rows[index]) + position, state, is_drafted=position > 0)
        return step.build()

    def _with_state(self, seq_ids: NDArray[np.integer[Any]]) -> Iterator[tuple[int, int, SequenceState]]:
        """Index, seq_id and state of those that have one."""
        if not self._states:
            return
        for index, seq_id in enumerate(seq_ids.tolist()):
            state = self._states.get(seq_id)
            if state is not None:
                yield index, seq_id, state


class _StepEdits:
    """Gathers the edits of one step, row by row."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._masked_rows: list[int] = []
        self._bitmasks: list[NDArray[np.int32]] = []
        self._allowed_rows: list[int] = []
        self._allowed: list[NDArray[np.int64]] = []
        self._banned: list[NDArray[np.int64]] = []
        self._biased: list[NDArray[np.int64]] = []
        self._biases: list[NDArray[np.float32]] = []
        self._penalized: list[NDArray[np.int64]] = []
        self._repetition_penalties: list[NDArray[np.float32]] = []
        self._costs: list[NDArray[np.float32]] = []

    def add(self, row: int, state: SequenceState, *, is_drafted: bool) -> None:
        """is_drafted: the state is ahead of the tokens that its sequence certainly has."""
        self._add_grammar_mask(row, state, is_drafted)
        if len(state.allowed):
            self._allowed_rows.append(row)
            self._allowed.append(self._entries(row, state.allowed))
        if state.bad_words is not None and len(completions := state.bad_words.completions()):
            self._banned.append(self._entries(row, completions))
        if len(state.biased):
            self._biased.append(self._entries(row, state.biased))
            self._biases.append(state.biases)
        penalties = state.penalties
        if penalties is not None and len(penalties.token_ids):
            self._penalized.append(self._entries(row, penalties.token_ids))
            self._repetition_penalties.append(
                np.full(len(penalties.token_ids), state.repetition_penalty, dtype=np.float32)
            )
            self._costs.append(penalties.costs.copy())

    def build(self) -> LogitEdits | None:
        """None if there is no edit."""
        edits = LogitEdits(
            grammar=GrammarMask(_rows(self._masked_rows), np.stack(self._bitmasks)) if self._masked_rows else None,
            allowed=(
                AllowedTokens(_rows(self._allowed_rows), np.concatenate(self._allowed)) if self._allowed_rows else None
            ),
            banned=BannedTokens(np.concatenate(self._banned)) if self._banned else None,
            biases=LogitBiases(np.concatenate(self._biased), np.concatenate(self._biases)) if self._biased else None,
            penalties=(
                Penalties(
                    np.concatenate(self._penalized),
                    np.concatenate(self._repetition_penalties),
                    np.concatenate(self._costs),
                )
                if self._penalized
                else None
            ),
        )
        return None if edits == LogitEdits() else edits

    def _add_grammar_mask(self, row: int, state: SequenceState, is_drafted: bool) -> None:
        grammar = state.masking_grammar()
        if grammar is None:
            return
        bitmask = np.empty(-(-self._vocab_size // BITS_PER_WORD), dtype=np.int32)
        try:
            grammar.fill_bitmask(bitmask)
        except InvalidRequestError as error:
            if not is_drafted:
                state.grammar_failed = True
                state.failure_reason = error.message
                return
            # The draft may not come true. If it does, the next step fails here.
            bitmask.fill(0)
        self._masked_rows.append(row)
        self._bitmasks.append(bitmask)

    def _entries(self, row: int, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their places in the whole batch of logits."""
        return row * self._vocab_size + token_ids


def _rows(rows: list[int]) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)
