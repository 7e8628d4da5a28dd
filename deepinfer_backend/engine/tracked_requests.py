"""Requests that ask for more than tokens of the model's own distribution: what is known of each of their sequences.

The scheduler marks their rows; a step in which there is none never comes here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sized

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import RequestOutputPool, Scheduler, SchedulerOutputs, StepLogprobs
from deepinfer_backend.engine.beam_searches import BeamSearches
from deepinfer_backend.engine.messages import Embedding, EngineRequest, RequestResult, request_failed
from deepinfer_backend.engine.prompt_logprobs import PromptLogprobsTables
from deepinfer_backend.errors import DeepInferError, InvalidRequestError, step_failed_error
from deepinfer_backend.ops.verify_drafts import NO_TOKEN
from deepinfer_backend.worker.sampling_plan import PromptTargets, SamplingPlan, StepResult
from deepinfer_backend.worker.sequence_state import Grammar, SequenceState, needs_state
from deepinfer_backend.worker.sequence_states import SequenceStates

Handles = NDArray[np.uint64]


def is_tracked(request: EngineRequest) -> bool:
    params = request.sampling_params
    return (
        needs_state(params, request.bad_words_token_ids)
        or request.embedding is not None
        or params.beam_width > 1
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.lora_name is not None
        or request.processed is not None
    )


class TrackedRequests:
    """Owns what is remembered of tracked sequences, from `add` until the scheduler has freed them.

    A step passes twice: `plan` before it samples, `after_step` when its tokens are known. Owned by the engine's thread.
    """

    def __init__(
        self, scheduler: Scheduler, pool: RequestOutputPool, *, vocab_size: int, eos_token_ids: list[int]
    ) -> None:
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._requests: dict[int, EngineRequest] = {}  # by sequence
        self._num_seqs: Counter[str] = Counter()  # by request id
        self._drafts: dict[int, list[int]] = {}  # by sequence, for the tokens after those that are known
        self._failed_ids: set[str] = set()
        self._states = SequenceStates(vocab_size)
        self._beams = BeamSearches(scheduler, pool, self._states, self._add_fork, self._fail_without_token)
        self._prompt_logprobs = PromptLogprobsTables()
        self._results: list[RequestResult] = []

    @property
    def num_entries(self) -> int:
        """Of all tables together: 0 when there is no tracked sequence."""
        tables: tuple[Sized, ...] = (
            self._requests,
            self._num_seqs,
            self._states,
            self._beams,
            self._prompt_logprobs,
            self._results,
        )
        return sum(map(len, tables))

    def add(self, seq_id: int, request: EngineRequest, grammar: Grammar | None, max_tokens: int) -> None:
        """max_tokens: the most new tokens, the room after the prompt considered."""
        params = request.sampling_params
        self._requests[seq_id] = request
        self._num_seqs[request.request_id] += 1
        if request.prompted is None:
            self._prompt_logprobs.add(seq_id, request)
        if needs_state(params, request.bad_words_token_ids):
            state = SequenceState(
                params,
                request.prompt_token_ids,
                self._vocab_size,
                bad_words_token_ids=request.bad_words_token_ids,
                grammar=grammar,
            )
            if request.prompted is not None:
                state.append(request.prompted.first_token_id)
            self._states.add(seq_id, state)
        if params.beam_width > 1:
            self._beams.add(seq_id, params, max_tokens=max_tokens, eos_token_ids=self._eos_token_ids)

    def take_results(self) -> list[RequestResult]:
        """What came to be known of requests since the last call."""
        results, self._results = self._results, []
        return results

    def take_freed(self) -> list[EngineRequest]:
        """Forgets the sequences that the scheduler has freed since the last call; the requests that have none left."""
        seq_ids = self._scheduler.take_freed_seq_ids()
        self._states.remove(seq_ids)
        self._beams.remove(seq_ids)
        self._prompt_logprobs.remove(seq_ids)
        freed = []
        for seq_id in seq_ids:
            request = self._requests.pop(seq_id)
            self._drafts.pop(seq_id, None)
            self._num_seqs[request.request_id] -= 1
            if not self._num_seqs[request.request_id]:
                del self._num_seqs[request.request_id]
                self._failed_ids.discard(request.request_id)
                freed.append(request)
        return freed

    def plan(self, batch: SchedulerOutputs, sample_start_loc: NDArray[np.int32]) -> SamplingPlan:
        """What the step's rows of logits ask for, all tokens up to the step before being known.

        sample_start_loc: [num_sampled + 1], where the rows of each sequence begin.
        """
        seq_ids = batch.tracked_seq_ids
        first_rows, ends = sample_start_loc[batch.tracked_rows], sample_start_loc[batch.tracked_rows + 1]
        spans = list(zip(first_rows.tolist(), ends.tolist(), seq_ids.tolist(), strict=True))
        logprobs = [
            (range(row, end), params.logprobs)
            for row, end, seq_id in spans
            if (params := self._requests[seq_id].sampling_params).logprobs is not None
        ]
        beams = [(row, num, seq_id) for row, _, seq_id in spans if (num := self._beams.num_candidates(seq_id))]
        embeddings = [(row, seq_id) for row, _, seq_id in spans if self._requests[seq_id].embedding is not None]
        drafts = [self._drafts.get(seq_id, [])[: end - row - 1] for row, end, seq_id in spans]
        return SamplingPlan(
            edits=self._states.edits(first_rows, seq_ids, drafts),
            logprob_rows=[row for rows, _ in logprobs for row in rows],
            num_top_logprobs=max((num or 0 for _, num in logprobs), default=0),
            candidate_rows=[row for row, _, _ in beams],
            candidate_seq_ids=[seq_id for _, _, seq_id in beams],
            num_candidates=max((num for _, num, _ in beams), default=0),
            embedding_rows=[row for row, _ in embeddings],
            embedding_seq_ids=[seq_id for _, seq_id in embeddings],
            prompt_targets=[self._prompt_targets(*span) for span in batch.prompt_logits.tolist()],
        )

    def after_step(self, batch: SchedulerOutputs, plan: SamplingPlan, result: StepResult) -> list[Handles]:
        """Takes a step that the scheduler has processed; the handles of outputs that it brought besides its tokens."""
        for parent_id, child_id in self._scheduler.take_forks():
            self._add_fork(parent_id, child_id)
        self._take_prompt_logprobs(batch, result)
        self._take_embeddings(plan, result)
        self._take_tokens(batch, result)
        return self._take_candidates(plan, result)

    def fail_step(self, batch: SchedulerOutputs) -> list[str]:
        """Ends the tracked requests of a step that `after_step` could not take; returns their ids."""
        for parent_id, child_id in self._scheduler.take_forks():
            self._add_fork(parent_id, child_id)
        seq_ids = [*batch.tracked_seq_ids.tolist(), *(seq_id for seq_id, _, _ in batch.prompt_logits.tolist())]
        request_ids = {request.request_id for seq_id in seq_ids if (request := self._requests.get(seq_id))}
        return self.fail_requests(request_ids, step_failed_error)

    def fail_requests(self, request_ids: Collection[str], error_of: Callable[[str], DeepInferError]) -> list[str]:
        """Ends tracked requests, each with its error; returns the ids of those that were not told of one already."""
        requests = {request.request_id: request for request in self._requests.values()}
        failed = [requests[each] for each in request_ids if each in requests and each not in self._failed_ids]
        for request in failed:
            self._failed_ids.add(request.request_id)
            self._scheduler.abort_request(request.request_id)
            self._results.append(request_failed(request, error_of(request.request_id)))
        return [request.request_id for request in failed]

    def _add_fork(self, parent_id: int, child_id: int) -> None:
        request = self._requests[child_id] = self._requests[parent_id]
        self._num_seqs[request.request_id] += 1
        self._states.fork(parent_id, child_id)

    def _prompt_targets(self, seq_id: int, begin: int, num_tokens: int) -> PromptTargets:
        request = self._requests[seq_id]
        # The logits of a token are about the one after it.
        token_ids = request.prompt_token_ids[begin + 1 : begin + 1 + num_tokens]
        return PromptTargets(token_ids.copy(), request.sampling_params.prompt_logprobs or 0)

    def _take_prompt_logprobs(self, batch: SchedulerOutputs, result: StepResult) -> None:
        for (seq_id, begin, _), logprobs in zip(batch.prompt_logits.tolist(), result.prompt_logprobs, strict=True):
            self._prompt_logprobs.fill(
                seq_id,
                begin,
                logprobs.logprobs.numpy(),
                logprobs.ranks.numpy(),
                logprobs.top_token_ids.numpy(),
                logprobs.top_logprobs.numpy(),
            )
        if not batch.is_prefill:
            return
        for seq_id in batch.tracked_seq_ids.tolist():
            table = self._prompt_logprobs.take(seq_id)
            if table is not None:
                self._results.append(table)

    def _take_embeddings(self, plan: SamplingPlan, result: StepResult) -> None:
        if result.embeddings is None:
            return
        for seq_id, values in zip(plan.embedding_seq_ids, result.embeddings.numpy(), strict=True):
            request = self._requests[seq_id]
            self._results.append(Embedding(request.request_id, values.tobytes(), client_index=request.client_index))

    def _take_tokens(self, batch: SchedulerOutputs, result: StepResult) -> None:
        rows, seq_ids = batch.tracked_rows, batch.tracked_seq_ids
        token_ids, num_tokens = result.token_ids.numpy()[rows], result.num_tokens.numpy()[rows]
        is_sampled = np.array([self._beams.num_candidates(seq_id) == 0 for seq_id in seq_ids.tolist()], bool)
        has_token = token_ids[:, 0] != NO_TOKEN
        without_token = seq_ids[is_sampled & ~has_token].tolist()
        failed = self._states.append(seq_ids, token_ids, np.where(is_sampled & has_token, num_tokens, 0))
        if result.drafts is not None:
            for seq_id, drafts in zip(seq_ids.tolist(), result.drafts.numpy()[rows].tolist(), strict=True):
                self._drafts[seq_id] = drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts
        for seq_id in [*failed, *without_token]:
            self._fail_without_token(seq_id)

    def _fail_without_token(self, seq_id: int) -> None:
        request = self._requests[seq_id]
        request_id = request.request_id
        if request_id in self._failed_ids:
            return
        self._failed_ids.add(request_id)
        # The outputs of this step are not built yet: what was sampled does not come out.
        self._scheduler.abort_request(request_id)
        state = self._states.get(seq_id)
        error = InvalidRequestError((state and state.failure_reason) or _no_token_left(request))
        self._results.append(request_failed(request, error))

    def _take_candidates(self, plan: SamplingPlan, result: StepResult) -> list[Handles]:
        candidates = result.candidates
        if candidates is None:
            return []
        columns = zip(plan.candidate_seq_ids, candidates.token_ids.numpy(), candidates.logprobs.numpy(), strict=True)
        return [self._beams.offer(seq_id, token_ids, logprobs) for seq_id, token_ids, logprobs in columns]


def step_logprobs(result: StepResult) -> StepLogprobs | None:
    """The sampled tokens' log-probabilities as the scheduler takes them."""
    logprobs = result.logprobs
    if logprobs is None:
        return None
    return StepLogprobs(
        rows=logprobs.rows.int().numpy(),
        logprobs=logprobs.logprobs.numpy(),
        ranks=logprobs.ranks.numpy(),
        top_token_ids=logprobs.top_token_ids.numpy(),
        top_logprobs=logprobs.top_logprobs.numpy(),
    )


def _no_token_left(request: EngineRequest) -> str:
    params = request.sampling_params
    fields = [
        name
        for name, is_given in (
            ("structured_outputs", params.structured_outputs is not None),
            ("allowed_token_ids", params.allowed_token_ids is not None),
            ("bad_words", bool(request.bad_words_token_ids)),
            ("logit_bias", bool(params.logit_bias)),
            ("min_tokens", params.min_tokens > 0),
        )
        if is_given
    ]
    return f"{' and '.join(fields)}: together they leave no token to go on with"
