"""Beam search of one request: which sequences go on, with which tokens, and which finished texts are the best.

Equal to transformers' `GenerationMixin._beam_search` without sampling, to the float32 rounding of its scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class BeamBranch:
    """A sequence that goes on with these tokens, at least one.

    The first token continues the sequence itself; each other one continues a fork of it that is taken before the
    first is appended.
    """

    seq_id: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What becomes of the live sequences: each is in exactly one of the two lists, and all have ended when `is_over`.

    To end sequences first makes room for the forks.
    """

    ended_seq_ids: list[int]
    branches: list[BeamBranch]
    is_over: bool


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A finished text. `cumulative_logprob` over its length to the power of the length penalty is its `score`.

    The end token that stopped it is the last of `token_ids` and is `stop_token_id`, which is None after "length".
    `token_logprobs`: one for each token; their sum is `cumulative_logprob`, to rounding.
    """

    token_ids: list[int]
    token_logprobs: list[float]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]
    stop_token_id: int | None


@dataclass(slots=True, eq=False)
class _Beam:
    """The prompt (without parent) or one token after its parent; `logprob` is the sum from the prompt on.

    Until the engine has told it by `adopt`, the sequence of a beam that goes on in a fork is that of its parent.
    """

    parent: _Beam | None
    token_id: int
    logprob: np.float32
    seq_id: int

    def tokens(self) -> list[tuple[int, float]]:
        """Token ids with their log-probabilities."""
        tokens: list[tuple[int, float]] = []
        beam = self
        while beam.parent is not None:
            tokens.append((beam.token_id, float(beam.logprob - beam.parent.logprob)))
            beam = beam.parent
        return tokens[::-1]


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Every continuation that a round has to choose from, best first; parents: indices into `live`. All [number]."""

    live: list[_Beam]
    parents: NDArray[np.intp]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def beam(self, index: int | np.intp) -> _Beam:
        parent = self.live[self.parents[index]]
        return _Beam(parent, int(self.token_ids[index]), self.logprobs[index], parent.seq_id)


@dataclass(frozen=True, slots=True)
class _Finished:
    beam: _Beam
    score: np.float32


class BeamSearch:
    """The live beams of one request and the best ones that have finished. Only the engine's thread may call it.

    1. All live beams have the same number of tokens; there are at most `beam_width`, and no two have the same tokens.
    2. A round: `offer` for every live beam, then `advance`, then `adopt` for every branch with forks.
    3. Finished beams never come back, and `advance` is over after at most `max_tokens` rounds.

    Where transformers writes -1e9 to mean "none", there is none here. It differs where transformers takes that number
    for a score: when fewer tokens than beams are allowed, and for length penalties so low that scores fall below it.

    Args:
        params: `beam_width`, `n`, `length_penalty`, `early_stopping`, `ignore_eos` and `stop_token_ids` count.
        seq_id: the sequence of the prompt, the only live beam of the first round.
        max_tokens: the most new tokens, the room that the model leaves after the prompt considered; at least 1.
        eos_token_ids: the model's own end tokens.
    """

    def __init__(self, params: SamplingParams, seq_id: int, *, max_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._end_token_ids = np.array(sorted(ends), np.int32)
        self._num_tokens = 0
        self._live = [_Beam(parent=None, token_id=-1, logprob=np.float32(0), seq_id=seq_id)]
        self._finished: list[_Finished] = []  # best first, at most beam_width
        self._offers: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}

    @property
    def num_candidates(self) -> int:
        """How many tokens to offer for each beam (all of them if the vocabulary is smaller).

        A beam contributes at most `beam_width` of its likeliest tokens to those that may finish, and as many to those
        that go on, which are the likeliest without the end tokens.
        """
        return self._params.beam_width + len(self._end_token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether every live beam has its offer."""
        return len(self._offers) == len(self._live)

    def offer(self, seq_id: int, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Takes the best next tokens of a live beam, best first, in place of what it has offered in this round before.

        As in transformers, log-probabilities are the log-softmax of the model's own logits, in float32; what the
        request asks for (penalties, biases, bans) is applied to them, and they are not normalized again. A token with
        -inf is banned and never chosen. The arrays are copied.

        Args:
            token_ids, logprobs: [num_candidates]

        Raises:
            LookupError: the sequence is no live beam.
            ValueError: the arrays have different lengths.
        """
        if all(beam.seq_id != seq_id for beam in self._live):
            raise LookupError(f"sequence {seq_id} is no live beam")
        if token_ids.shape != logprobs.shape:
            raise ValueError(f"{token_ids.shape} token ids with {logprobs.shape} log-probabilities: must be as many")
        self._offers[seq_id] = (token_ids.astype(np.int32), logprobs.astype(np.float32))

    def advance(self) -> BeamStep:
        """Chooses among all that was offered; the round's offers are used up.

        Raises:
            RuntimeError: the search is over, or a live beam has not offered.
        """
        if not self._live or not self.is_complete:
            raise RuntimeError(f"{len(self._offers)} offers for {len(self._live)} live beams: must be one for each")
        beam_width = self._params.beam_width
        parents, candidates = self._live, self._candidates()
        self._offers.clear()
        self._num_tokens += 1
        is_last = self._num_tokens == self._max_tokens
        ends = is_last | np.isin(candidates.token_ids, self._end_token_ids)
        # A beam that ends counts only if it is among the best; those behind them are there to go on in its place.
        self._finish([candidates.beam(i) for i in range(min(beam_width, len(ends))) if ends[i]])
        self._live = [candidates.beam(i) for i in np.flatnonzero(~ends)[:beam_width]]
        if not self._can_improve():
            self._live = []
        return self._step(parents)

    def adopt(self, seq_id: int, fork_seq_ids: Sequence[int]) -> None:
        """Takes the ids of the forks of a branch's sequence, one for each of its tokens but the first, in order.

        Raises:
            ValueError: they are not as many as the branch needs.
        """
        branch = [beam for beam in self._live if beam.seq_id == seq_id]
        if len(fork_seq_ids) != len(branch) - 1:
            raise ValueError(f"sequence {seq_id} has {len(fork_seq_ids)} forks: must be {len(branch) - 1}")
        for beam, fork_seq_id in zip(branch[1:], fork_seq_ids, strict=True):
            beam.seq_id = fork_seq_id

    @property
    def hypotheses(self) -> list[BeamHypothesis]:
        """The `n` best that have finished, best first; for when the search is over.

        If fewer than `n` different ones were possible the last is repeated, as in transformers. Empty only if every
        token was banned before any beam finished.
        """
        best = [self._hypothesis(finished) for finished in self._finished[: self._params.n]]
        return best + best[-1:] * (self._params.n - len(best))

    def _candidates(self) -> _Candidates:
        offers = [self._offers[beam.seq_id] for beam in self._live]
        token_ids = np.concatenate([tokens for tokens, _ in offers])
        sums = np.concatenate([beam.logprob + logprobs for beam, (_, logprobs) in zip(self._live, offers, strict=True)])
        parents = np.repeat(np.arange(len(offers)), [len(tokens) for tokens, _ in offers])
        order = np.argsort(-sums, kind="stable")
        order = order[sums[order] > -np.inf]
        return _Candidates(self._live, parents[order], token_ids[order], sums[order])

    def _finish(self, beams: list[_Beam]) -> None:
        merged = self._finished + [_Finished(beam, self._score(beam, self._num_tokens)) for beam in beams]
        self._finished = sorted(merged, key=lambda finished: -finished.score)[: self._params.beam_width]

    def _can_improve(self) -> bool:
        """Whether a live beam may still get among the best finished ones, by the rule that `early_stopping` names."""
        if not self._live:
            return False
        if len(self._finished) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        # Log-probabilities only fall. Over more tokens the score may rise all the same: "never" considers that.
        is_longer_better = self._params.early_stopping == "never" and self._params.length_penalty > 0
        num_tokens = self._max_tokens if is_longer_better else self._num_tokens
        return bool(self._score(self._live[0], num_tokens) > self._finished[-1].score)

    def _score(self, beam: _Beam, num_tokens: int) -> np.float32:
        # The power in double, the division in single precision, as torch divides a float32 tensor by a number.
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return beam.logprob / np.float32(np.float64(num_tokens) ** self._params.length_penalty)

    def _step(self, parents: list[_Beam]) -> BeamStep:
        branches: dict[int, list[int]] = {}
        for beam in self._live:
            branches.setdefault(beam.seq_id, []).append(beam.token_id)
        return BeamStep(
            ended_seq_ids=[parent.seq_id for parent in parents if parent.seq_id not in branches],
            branches=[BeamBranch(seq_id, token_ids) for seq_id, token_ids in branches.items()],
            is_over=not self._live,
        )

    def _hypothesis(self, finished: _Finished) -> BeamHypothesis:
        beam = finished.beam
        is_stopped = bool(np.isin(beam.token_id, self._end_token_ids))
        return BeamHypothesis(
            token_ids=[token_id for token_id, _ in beam.tokens()],
            token_logprobs=[logprob for _, logprob in beam.tokens()],
            cumulative_logprob=float(beam.logprob),
            score=float(finished.score),
            finish_reason="stop" if is_stopped else "length",
            stop_token_id=beam.token_id if is_stopped else None,
        )
