"""Beam searches on the scheduler's forks: what `BeamSearch` decides, done to the sequences it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import FinishReason, RequestOutputPool, Scheduler, WrittenSequence
from deepinfer_backend.engine.beam_search import BeamHypothesis, BeamSearch, BeamStep
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.worker.sequence_states import SequenceStates

Handles = NDArray[np.uint64]


class BeamSearches:
    """The searches of all live requests. Owned by the engine's thread.

    A beam is a sequence that the scheduler holds after each step until its search has chosen its next token; a beam
    that goes on in several ways is forked. No output comes of a beam: those of the best texts are made when the search
    is over.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: RequestOutputPool,
        states: SequenceStates,
        on_fork: Callable[[int, int], None],
        on_dead_end: Callable[[int], None],
    ) -> None:
        """on_fork: told of each fork, (parent, child), before its token is appended. on_dead_end: told of a sequence
        whose search is over without any text, because no token was left to go on with; no output follows.
        """
        self._scheduler = scheduler
        self._pool = pool
        self._states = states
        self._on_fork = on_fork
        self._on_dead_end = on_dead_end
        self._search_of: dict[int, BeamSearch] = {}  # by live sequence

    def __len__(self) -> int:
        return len(self._search_of)

    def add(self, seq_id: int, params: SamplingParams, *, max_tokens: int, eos_token_ids: Sequence[int]) -> None:
        """max_tokens: the most new tokens, the room after the prompt considered."""
        self._search_of[seq_id] = BeamSearch(params, seq_id, max_tokens=max_tokens, eos_token_ids=eos_token_ids)

    def num_candidates(self, seq_id: int) -> int:
        """How many of its likeliest next tokens a sequence must offer; 0 if it is no beam."""
        search = self._search_of.get(seq_id)
        return 0 if search is None else search.num_candidates

    def offer(self, seq_id: int, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Handles:
        """Takes a beam's candidates, [num_candidates]; the outputs of its search, if this was the last it waited for.

        A beam that has ended meanwhile, as those of an aborted request, offers nothing.
        """
        if not self._scheduler.is_held(seq_id):
            return np.empty(0, np.uint64)
        search = self._search_of[seq_id]
        search.offer(seq_id, token_ids, logprobs)
        if not search.is_complete:
            return np.empty(0, np.uint64)
        step = search.advance()
        return self._finish(search, step) if step.is_over else self._go_on(search, step)

    def remove(self, seq_ids: Sequence[int]) -> None:
        """Forgets sequences that have ended otherwise: their request was aborted."""
        for seq_id in seq_ids:
            self._search_of.pop(seq_id, None)

    def _go_on(self, search: BeamSearch, step: BeamStep) -> Handles:
        for seq_id in step.ended_seq_ids:
            self._scheduler.abort_seq(seq_id)
            del self._search_of[seq_id]
        for branch in step.branches:
            forks = [self._scheduler.fork_seq(branch.seq_id, seed=0) for _ in branch.token_ids[1:]]
            for fork in forks:
                self._search_of[fork] = search
                self._on_fork(branch.seq_id, fork)
            search.adopt(branch.seq_id, forks)
            for seq_id, token_id in zip([branch.seq_id, *forks], branch.token_ids, strict=True):
                self._scheduler.append_token(seq_id, token_id)
                state = self._states.get(seq_id)
                if state is not None:
                    state.append(token_id)
        return np.empty(0, np.uint64)

    def _finish(self, search: BeamSearch, step: BeamStep) -> Handles:
        written = [np.empty(0, np.uint64)]
        written += [
            self._scheduler.build_sequence_outputs(step.ended_seq_ids[0], self._pool, _written(index, hypothesis))
            for index, hypothesis in enumerate(search.hypotheses)
        ]
        if not search.hypotheses:
            self._on_dead_end(step.ended_seq_ids[0])
        for seq_id in step.ended_seq_ids:
            self._scheduler.abort_seq(seq_id)
            del self._search_of[seq_id]
        return np.concatenate(written)


def _written(index: int, hypothesis: BeamHypothesis) -> WrittenSequence:
    return WrittenSequence(
        sequence_index=index,
        token_ids=hypothesis.token_ids,
        logprobs=hypothesis.token_logprobs,
        finish_reason=FinishReason.STOP if hypothesis.finish_reason == "stop" else FinishReason.LENGTH,
        stop_token_id=-1 if hypothesis.stop_token_id is None else hypothesis.stop_token_id,
    )
