"""LLMEngine: the step. Schedules a batch, has the Worker run it, and turns its tokens into outputs.

A driver of this class keeps three rules: copy a step's outputs before the next step; when nothing is unfinished,
flush once; keep all ranks in the same number of steps.
"""

from __future__ import annotations

import logging
import random
import time
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend._core import (
    RequestOutputPool,
    Scheduler,
    SchedulerOutputs,
    SequenceMetadataPool,
)
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.deferred_release import DeferredRelease
from deepinfer_backend.engine.draft_policy import ALL_DRAFTS, DraftPolicy
from deepinfer_backend.engine.engine_model import set_up_model
from deepinfer_backend.engine.grammars import Grammar, GrammarQueue
from deepinfer_backend.engine.media_requests import MediaRequests
from deepinfer_backend.engine.messages import BlockSource, EngineInfo, EngineRequest, EngineStats, RequestResult
from deepinfer_backend.engine.prompted import prompted_among, prompted_sequence
from deepinfer_backend.engine.queue_deadlines import QueueDeadlines
from deepinfer_backend.engine.rank_group import RankGroup, StepKind, step_kind
from deepinfer_backend.engine.request_limits import check_prompt_length
from deepinfer_backend.engine.sampling_options import sampling_options
from deepinfer_backend.engine.stats import scheduler_stats
from deepinfer_backend.engine.tracked_requests import TrackedRequests, is_tracked, step_logprobs
from deepinfer_backend.engine.waiting_requests import WaitingRequests
from deepinfer_backend.errors import EngineDeadError, EngineError, InvalidRequestError, media_failed_error, shown_ids
from deepinfer_backend.media.pool import MultiModalProcessor
from deepinfer_backend.models.adapter_cache import AdapterCache
from deepinfer_backend.models.loader import load_generation_config, resolve_tokenizer
from deepinfer_backend.ops.rank_world import RankWorld
from deepinfer_backend.worker.device import open_stream
from deepinfer_backend.worker.limits import resolve_device
from deepinfer_backend.worker.model_runner import ModelRunner
from deepinfer_backend.worker.slot_state import SlotState
from deepinfer_backend.worker.timers import StepTimers
from deepinfer_backend.worker.worker import StepState, Worker

logger = logging.getLogger(__name__)

Handles = NDArray[np.uint64]


class LLMEngine:
    """Owns the scheduler, the Worker with the model, and the pools between them.

    1. Only the thread that steps it touches it.
    2. The handles that `step` and `flush_inflight_reqs` return stay valid until the next step's `pre_sampler_sync`.
    3. A fault in a step ends the requests of that step with finish reason `error` and nobody else's.

    Raises (constructor):
        ConfigError, UnsupportedModelError: the model cannot run with this configuration.
    """

    def __init__(
        self, config: EngineConfig, world: RankWorld | None = None, prompts_at: BlockSource | None = None
    ) -> None:
        """world: of the ranks with which it makes its steps. If there are other engines among them, `step` must be
        called also when there is no work. prompts_at: it only prefills, and there others get the blocks.
        """
        self._group = None if world is None or world.engines is None else RankGroup(world.engines)
        self.stream = open_stream(resolve_device(config.device))
        parts = set_up_model(config, self.stream, world)
        model, kv_cache, num_speculative_tokens = parts.model, parts.kv_cache, parts.num_speculative_tokens
        self.kv_cache = kv_cache
        self._prompts_at = prompts_at
        generation_defaults = load_generation_config(parts.path)
        tokenizer_path = resolve_tokenizer(config.tokenizer, parts.path)
        self._eos_token_ids = generation_defaults.eos_token_ids
        self.info = EngineInfo(
            model_path=str(parts.path),
            max_model_len=parts.max_model_len,
            vocab_size=model.vocab_size,
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.block_size,
            device=str(model.device),
            dtype=model.weight_format,
            hidden_size=model.hidden_size,
            default_sampling_params=generation_defaults.sampling_params,
            tokenizer_path=str(tokenizer_path),
            config=config.model_dump(mode="json"),
            modalities=list(parts.family.kinds) if parts.family is not None else [],
        )
        self._max_num_seqs = config.max_num_seqs
        self._max_seq_len = parts.max_seq_len
        self.timers = StepTimers()
        self.scheduler = Scheduler(parts.scheduler_config(config, is_prompt_engine=prompts_at is not None))
        self.request_output_pool = RequestOutputPool()
        self._tracked = TrackedRequests(
            self.scheduler,
            self.request_output_pool,
            vocab_size=model.vocab_size,
            eos_token_ids=self._eos_token_ids,
        )
        self._adapters = AdapterCache(
            model.lora,
            config.lora_modules,
            max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank,
            run_on_stream=lambda work: self.stream.submit(work).result(),
        )
        self._adapters.check_configured()
        self._draft_policy: DraftPolicy | None = None
        if num_speculative_tokens:
            self._draft_policy = DraftPolicy(num_speculative_tokens, drafter_computes=parts.drafter_computes)
        self._last_step_end_s = 0.0
        self._sequence_metadata_pool = SequenceMetadataPool()
        self._deferred_release = DeferredRelease(self.request_output_pool)
        self.multi_modal_processor = MultiModalProcessor(parts.path, config, starts_now=parts.family is not None)
        self._media = MediaRequests(parts.family, self.multi_modal_processor)
        self._embeddings = parts.media_embeddings(config)
        slots = SlotState(config.max_num_seqs, num_speculative_tokens, model.device)
        buffers = [self.stream.submit(lambda: parts.step_buffers(config)).result() for _ in range(2)]
        self.worker = Worker(
            ModelRunner(
                model,
                kv_cache,
                slots,
                parts.ranks,
                self._media.state,
                self._embeddings,
                max_seq_len=self._max_seq_len,
            ),
            self.stream,
            (buffers[0], buffers[1]),
            slots,
            parts.drafter,
            zero_overhead_scheduling=config.zero_overhead_scheduling,
            post_process=self.post_process,
            plan_sampling=self._tracked.plan,
            pre_sampler_sync=self.pre_sampler_sync,
            timers=self.timers,
        )
        self._grammars = GrammarQueue(tokenizer_path, model.vocab_size, self._eos_token_ids, config)
        self._waiting = WaitingRequests(
            self.multi_modal_processor,
            self._grammars,
            self._adapters,
            self._take_prompt,
            self._add_to_scheduler,
            self._media.release,
            config.priority_aging_s,
        )
        self._queue_deadlines = QueueDeadlines()
        self._results: list[RequestResult] = []
        self._is_stalled = False
        self._seeds = random.Random(config.seed)
        self._num_steps = self._num_prompt_tokens = self._num_generation_tokens = 0

    def add_request(self, request: EngineRequest) -> None:
        """Puts the request's sequence into the waiting queue; first it waits for its media to be processed, its grammar
        and its adapter's place.

        Raises:
            InvalidRequestError: its prompt is empty or too long, a token id is outside the vocabulary, its adapter is
                unknown, its id is that of another unfinished request, or it has several sequences and this engine only
                prefills.
            UnavailableError: too many bytes of media wait.
            EngineError: its adapter cannot be loaded.
        """
        prompt = request.prompt_token_ids
        if len(prompt) and (prompt.min() < 0 or prompt.max() >= self.info.vocab_size):
            raise InvalidRequestError(f"prompt_token_ids: each must be 0 to {self.info.vocab_size - 1}")
        params = request.sampling_params
        if self._prompts_at is not None and max(params.n, params.beam_width) > 1:
            raise InvalidRequestError("n: an engine that only prefills takes requests of one sequence")
        self._waiting.add(request)
        if request.prompted is None:
            self._queue_deadlines.add(request)

    def abort_request(self, request_ids: list[str]) -> None:
        """Ends these requests; no output of theirs comes out any more. Unknown ids are ignored."""
        for request_id in request_ids:
            self._queue_deadlines.discard(request_id)
            self._waiting.abort(request_id)
            self.scheduler.abort_request(request_id)

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        """Ends single sequences, (request id, sequence index); no output of theirs comes out any more."""
        for request_id, sequence_index in sequences:
            self.scheduler.abort_request(request_id, sequence_index)

    def abort_clients(self, client_indices: list[int]) -> None:
        """The same for every request of these clients."""
        for client_index in client_indices:
            self._waiting.abort_client(client_index)
            self.scheduler.abort_client(client_index)

    def has_unfinished_requests(self) -> bool:
        """Whether a sequence is in a queue, or a request waits for its grammar or its adapter."""
        return self.scheduler.has_unfinished_seqs() or len(self._waiting) > 0

    @property
    def is_stalled(self) -> bool:
        """Whether the last step found nothing to compute, and the next will not either: others must act first."""
        return self._is_stalled and not len(self._waiting)

    @property
    def is_group_busy(self) -> bool:
        """Whether any rank of the group computed something in the last step."""
        return self._group is not None and self._group.agreed is not StepKind.IDLE

    def get_num_unfinished_requests(self) -> int:
        return self.scheduler.num_unfinished_requests + len(self._waiting)

    @property
    def num_tracked(self) -> int:
        """How much is remembered of requests besides what the scheduler knows; 0 once all that ended were freed."""
        return self._tracked.num_entries

    @property
    def num_media(self) -> int:
        """Requests of which images or videos are held."""
        return len(self._media.state)

    @property
    def num_media_computed(self) -> int:
        """How often the embeddings of an image or a video were computed."""
        return 0 if self._embeddings is None else self._embeddings.num_computed

    def has_inflight_step(self) -> bool:
        """Whether a flush would find a step to post-process."""
        return self.worker.prev_step_state is not None

    def step(self) -> Handles:
        """One round: schedule, then the Worker's four parts.

        Returns the handles (uint64, into `request_output_pool`) of the outputs that are ready: a prefill's own, or
        those of the decode step before. Keep one with `RequestOutput.clone(handle)`.
        """
        if len(self._waiting):
            may_sleep = not self.scheduler.has_unfinished_seqs() and not self.has_inflight_step()
            with self.timers.record("multi_modal_fetch"):
                failures = self._waiting.admit_ready(may_sleep=may_sleep)
            # Where the fault is ours, a part of it may be in the scheduler; one that was refused may bear another's id.
            self.abort_request([failure.request_id for failure in failures if failure.word == EngineError.word])
            self._results += failures
        self._end_expired()
        with self.timers.record("step"):
            with self.timers.record("schedule"):
                draft_threshold = ALL_DRAFTS
                if self._draft_policy is not None:
                    draft_threshold = self._draft_policy.threshold(self.scheduler.acceptance_rates)
                _, batch = self.scheduler.schedule(self._sequence_metadata_pool, draft_threshold=draft_threshold)
            others_compute = False
            if self._group is not None:
                with self.timers.record("vote"):
                    others_compute = self._group.vote(step_kind(batch)) is not StepKind.IDLE
            self._is_stalled = batch.is_empty() and not self.has_inflight_step()
            handles = self.worker.execute_model_step(batch, with_placeholder=others_compute)
            if not self.has_unfinished_requests():
                self._free_finished()  # the next round may be far away
            if self._group is None or self.is_group_busy:
                self._num_steps += 1
        return self._give_out(handles)

    def flush_inflight_reqs(self) -> Handles:
        """The outputs of the step in flight, if there is one; waits for the device."""
        handles = self.worker.flush_inflight_reqs()
        self._free_finished()
        return self._give_out(handles)

    def take_results(self) -> list[RequestResult]:
        """What steps found out about requests besides their tokens; to be read before the same steps' outputs."""
        results, self._results = self._results, []
        return [*results, *self._tracked.take_results()]

    def post_process(self, state: StepState) -> Handles:
        """The Worker's first callback: a launched step's tokens → its sequences → handles of their outputs."""
        batch = state.batch
        try:
            result = state.wait()
            self._take_step_time(state)
            # Where there was no token to sample the request is ended below, and none comes out.
            self.scheduler.process_outputs(
                batch,
                np.maximum(result.token_ids.numpy(), 0),
                result.num_tokens.numpy(),
                drafts=None if result.drafts is None else result.drafts.numpy(),
                logprobs=step_logprobs(result),
            )
        except EngineDeadError:
            raise
        except torch.AcceleratorError as error:
            raise EngineDeadError("the device failed; the engine cannot go on") from error
        except Exception:
            return self._fail_step(batch)
        handles: list[Handles] = []
        if len(batch.tracked_rows) or batch.num_prompt_logits:
            try:
                handles = self._tracked.after_step(batch, state.plan, result)
            except Exception:
                request_ids = self._tracked.fail_step(batch)
                logger.exception("a step's tokens cannot be taken; requests end: %s", shown_ids(request_ids))
        if self._embeddings is not None and (failed := self._embeddings.take_failed()):
            self._tracked.fail_requests(self._media.fail(failed), media_failed_error)
        outputs: Handles = np.concatenate(
            [self.scheduler.build_request_outputs(batch, self.request_output_pool), *handles]
        )
        # An embedding's one token is nobody's.
        self._num_generation_tokens += len(outputs) - len(state.plan.embedding_rows)
        return outputs

    def pre_sampler_sync(self) -> None:
        """The Worker's second callback, while the device samples: what the last round held is given back."""
        self._deferred_release.release()
        self._free_finished()

    def stats(self) -> EngineStats:
        own = EngineStats(
            num_waiting=len(self._waiting),
            max_num_seqs=self._max_num_seqs,
            block_size=self.info.block_size,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_steps=self._num_steps,
            num_engines=1,
        )
        return own + scheduler_stats(self.scheduler)

    def close(self) -> None:
        """Ends the device thread, the grammar compiler and the media processes; safe to call twice."""
        self._grammars.close()
        self.multi_modal_processor.close()
        self.worker.close()

    def _give_out(self, handles: Handles) -> Handles:
        self._deferred_release.collect(handles)
        if self._prompts_at is not None and len(handles):
            self._results += prompted_among(self.request_output_pool.clone(handles), self._prompts_at)
        return handles

    def _take_step_time(self, state: StepState) -> None:
        """Of a step that the device has just ended; it began when it was launched or when the one before ended."""
        began_s, self._last_step_end_s = max(state.launched_s, self._last_step_end_s), time.perf_counter()
        if self._draft_policy is not None:
            self._draft_policy.take_step(state.batch, self._last_step_end_s - began_s)

    def _take_prompt(self, request: EngineRequest) -> EngineRequest:
        """A request whose media are processed, with its prompt. Raises InvalidRequestError: that is too long."""
        request, result = self._media.take(request)
        check_prompt_length(len(request.prompt_token_ids), self.info)
        self._results.append(result)
        return request

    def _add_to_scheduler(self, request: EngineRequest, grammar: Grammar | None, lora_id: int) -> None:
        params, prompt, prompted = request.sampling_params, request.prompt_token_ids, request.prompted
        add_seq, media_id, named_prompt = self.scheduler.add_seq, 0, prompt
        if prompted is not None:
            add_seq = partial(self.scheduler.add_prompted_seq, prompted=prompted_sequence(prompted))
        elif request.processed is not None:
            media_id, named_prompt, spans = self._media.place(request)
            whole = self._media.sees_whole_images
            add_seq = partial(self.scheduler.add_seq, media_spans=spans, keeps_media_whole=whole)
        try:
            seq_id = add_seq(
                request.request_id,
                named_prompt,
                options=sampling_options(request, lora_id, media_id, self._eos_token_ids, self._seeds),
                priority=request.priority,
                cache_salt=_cache_salt(lora_id, params.cache_salt),
                client_index=request.client_index,
            )
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        if is_tracked(request):
            self._tracked.add(seq_id, request, grammar, min(params.max_tokens, self._max_seq_len - len(prompt)))
        if prompted is None:
            self._num_prompt_tokens += len(prompt)

    def _end_expired(self) -> None:
        """Ends requests whose queue_timeout_s has passed and that no step has begun to compute."""
        for deadline in self._queue_deadlines.take_expired():
            request_id = deadline.request_id
            is_ended = self._waiting.abort(request_id) or (
                not self.scheduler.was_scheduled(request_id) and self.scheduler.abort_request(request_id)
            )
            if is_ended:
                self._results.append(deadline.failure())

    def _fail_step(self, batch: SchedulerOutputs) -> Handles:
        """To be called while its exception is handled."""
        handles = self.scheduler.fail_step(batch, self.request_output_pool)
        request_ids = {output.request_id: None for output in self.request_output_pool.clone(handles)}
        logger.exception("a step failed; its requests end with an error: %s", shown_ids(request_ids))
        # A request fails as a whole: nobody gets some of its sequences.
        for request_id in request_ids:
            self.scheduler.abort_request(request_id)
        return handles

    def _free_finished(self) -> None:
        self.scheduler.free_finished_seqs()
        for request in self._tracked.take_freed():
            if request.sampling_params.lora_name is not None:
                self._adapters.release(request.sampling_params.lora_name)
            self._media.release(request)


def _cache_salt(lora_id: int, client_salt: str | None) -> str:
    """What was computed with one adapter, or for one client's salt, is found only by requests with the same two."""
    return f"{lora_id}:{client_salt or ''}" if lora_id or client_salt else ""
