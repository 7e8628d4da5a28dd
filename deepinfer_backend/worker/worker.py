"""The device side of a step: `execute_model_step` in its four parts, and the step in flight."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend._core import SchedulerOutputs
from deepinfer_backend.models.interface import ForwardResult
from deepinfer_backend.models.lora import plan_lora
from deepinfer_backend.ops.uniforms import SampledRows, uniforms_of
from deepinfer_backend.ops.verify_drafts import verify_drafts
from deepinfer_backend.speculation.drafter import Drafter, SampledStep
from deepinfer_backend.worker.device import DeviceStream, Pending, device_to_host, host_to_device
from deepinfer_backend.worker.logprobs import RowLogprobs, logprobs_of
from deepinfer_backend.worker.model_runner import ModelRunner
from deepinfer_backend.worker.random_draw import SamplingRows
from deepinfer_backend.worker.sampler import SamplingBatch, sample_batch
from deepinfer_backend.worker.sampling_plan import (
    EMPTY_RESULT,
    NO_PLAN,
    SamplingPlan,
    StepResult,
    candidates_to_host,
    logprobs_to_host,
    row_tensor,
)
from deepinfer_backend.worker.slot_state import SlotState
from deepinfer_backend.worker.step_buffers import StepBuffers, StepTensors
from deepinfer_backend.worker.timers import StepTimers

Handles = NDArray[np.uint64]
NO_HANDLES: Handles = np.empty(0, dtype=np.uint64)


@dataclass(slots=True)
class StepState:
    """One launched step, at `launched_s` of time.perf_counter.

    `plan` and `sampled` are set by part 3; the latter's result is None if nothing has logits.
    """

    batch: SchedulerOutputs
    launched_s: float
    buffers: StepBuffers
    forward: Pending[ForwardResult | None]
    plan: SamplingPlan = NO_PLAN
    sampled: Pending[StepResult | None] | None = None

    def wait(self) -> StepResult:
        """Waits for the device; raises what the step raised there."""
        assert self.sampled is not None
        return self.sampled.result() or EMPTY_RESULT


class Worker:
    """Launches steps and keeps the one in flight.

    1. The device works in the order in which steps were launched; the host never waits for a token to launch one.
    2. At most one step is in flight after a call returns: `prev_step_state`, always a decode step.
    3. A buffer set is written again two steps later, when the step that used it has been post-processed.
    4. What goes wrong while a step is launched, on either side, is raised by that step's `StepState.wait`.

    Owned by the thread that steps the engine.

    post_process(state) → handles: called once per launched step, in order, after it is certain to be computed or when
    waiting for it raises. plan_sampling(batch, sample_start_loc): called when the previous step was post-processed, for
    a step with tracked rows or prompt logits; [num_sampled + 1], where each sequence's rows of logits begin.
    pre_sampler_sync(): called once per round while the device samples.
    """

    def __init__(
        self,
        runner: ModelRunner,
        stream: DeviceStream,
        buffers: tuple[StepBuffers, StepBuffers],
        slots: SlotState,
        drafter: Drafter | None,
        *,
        zero_overhead_scheduling: bool,
        post_process: Callable[[StepState], Handles],
        plan_sampling: Callable[[SchedulerOutputs, NDArray[np.int32]], SamplingPlan],
        pre_sampler_sync: Callable[[], None],
        timers: StepTimers,
    ) -> None:
        self.prev_step_state: StepState | None = None
        self._runner = runner
        self._stream = stream
        self._free_buffers, self._used_buffers = buffers
        self._slots = slots
        self.drafter = drafter
        self._zero_overhead_scheduling = zero_overhead_scheduling
        self._post_process = post_process
        self._plan_sampling = plan_sampling
        self._pre_sampler_sync = pre_sampler_sync
        self._timers = timers

    def execute_model_step(self, batch: SchedulerOutputs, *, with_placeholder: bool = False) -> Handles:
        """One round, the same for every kind of step; `batch` may be empty: then nothing is computed, or, with
        `with_placeholder`, a token of nobody, because other ranks compute and wait for this one.

        Returns the handles of the outputs that are ready: those of the previous decode step and, for a prefill (or
        without zero-overhead scheduling), those of this one.
        """
        with self._timers.record("forward"):
            current = None if batch.is_empty() else self._forward(batch)
            placeholder = self._launch_placeholder() if current is None and with_placeholder else None
        handles = self.flush_inflight_reqs()
        with self._timers.record("sample"):
            if current is not None:
                self._sample(current)
            self._pre_sampler_sync()
        if placeholder is not None:
            placeholder.result()
        if current is None:
            return handles
        if batch.is_prefill or not self._zero_overhead_scheduling:
            return np.concatenate([handles, self._timed_post_process(current)])
        self.prev_step_state = current
        return handles

    def flush_inflight_reqs(self) -> Handles:
        """Post-processes the step in flight, waiting for the device; no handles when there is none."""
        previous, self.prev_step_state = self.prev_step_state, None
        return NO_HANDLES if previous is None else self._timed_post_process(previous)

    def close(self) -> None:
        self._stream.close()

    def _timed_post_process(self, state: StepState) -> Handles:
        with self._timers.record("post_process"):
            return self._post_process(state)

    def _forward(self, batch: SchedulerOutputs) -> StepState:
        buffers = self._free_buffers
        self._free_buffers, self._used_buffers = self._used_buffers, buffers
        try:
            forward: Pending[ForwardResult | None] = self._launch_forward(batch, buffers)
        except Exception as error:
            forward = self._failed(error)
        return StepState(batch, time.perf_counter(), buffers, forward)

    def _launch_placeholder(self) -> Pending[ForwardResult]:
        buffers = self._free_buffers
        self._free_buffers, self._used_buffers = self._used_buffers, buffers
        inputs = self._runner.prepare_placeholder(buffers)
        return self._stream.submit(lambda: self._runner.forward(inputs))

    def _launch_forward(self, batch: SchedulerOutputs, buffers: StepBuffers) -> Pending[ForwardResult | None]:
        batch.write(buffers.arrays)
        lora = None
        if batch.any_lora:
            lora = plan_lora(batch.lora_ids, buffers.query_start_loc[: batch.num_seqs + 1], self._stream.device)
        follows = self.drafter if batch.is_prefill else None
        wants_token_states = follows is not None and follows.needs_token_states
        inputs = self._runner.prepare(batch, buffers, lora, wants_token_states=wants_token_states)

        def launch() -> ForwardResult | None:
            result = self._runner.forward(inputs)
            if follows is not None:
                follows.follow_prefill(inputs, result)
            return result if inputs.has_logits else None

        # If the step before failed its sequences end, and what this one computes for them from what their slots had
        # before is dropped; the others need nothing of it.
        return self._stream.submit(launch)

    def _sample(self, state: StepState) -> None:
        try:
            state.sampled = self._launch_sample(state)
        except Exception as error:
            state.sampled = self._failed(error)

    def _failed(self, error: Exception) -> Pending[NoReturn]:
        """In its place among what was launched."""

        def fail() -> NoReturn:
            raise error

        return self._stream.submit(fail)

    def _launch_sample(self, state: StepState) -> Pending[StepResult | None]:
        batch = state.batch
        if len(batch.tracked_rows) or batch.num_prompt_logits:
            state.plan = self._plan_sampling(batch, state.buffers.sample_start_loc[: batch.num_sampled + 1])
        plan, device, num_rows = state.plan, self._stream.device, batch.num_sampled_rows
        tensors = state.buffers.views(batch)
        sampled_rows = SampledRows(
            tensors.seeds, tensors.output_indices, tensors.advance_slots[: batch.num_sampled], tensors.sample_start_loc
        )
        needs_output_indices = not batch.all_greedy or batch.num_banned > 0
        new_slots = [(slot, torch.from_numpy(token_ids)) for slot, token_ids in batch.new_slots]
        sampling = _sampling_batch(batch, tensors, plan, device)
        query_lens, num_drafts = batch.draft_query_lens, batch.max_num_proposed
        embedding_rows = row_tensor(plan.embedding_rows, device)
        targets = [host_to_device(torch.from_numpy(target.token_ids), device) for target in plan.prompt_targets]

        def launch() -> StepResult | None:
            forward = state.forward.on_stream()
            if forward is None:
                return None
            prompt_logprobs = _prompt_logprobs(forward.logits[num_rows:], plan, targets) if targets else []
            embeddings = None
            if embedding_rows is not None:
                embeddings = device_to_host(forward.hidden_states[embedding_rows].float())
            if needs_output_indices:
                uniforms_of(sampled_rows, self._slots.num_accepted, tensors.uniforms, tensors.row_output_indices)
            sampled = sample_batch(forward.logits[:num_rows], sampling)
            self._verify(tensors)
            drafts = None
            if self.drafter is not None:
                step = SampledStep(
                    tensors=tensors,
                    hidden_states=forward.hidden_states,
                    rows=sampling.rows,
                    query_lens=query_lens,
                    num_drafts=num_drafts,
                    max_seq_len=self._runner.max_seq_len,
                )
                drafts = self._propose(self.drafter, step, new_slots)
            return StepResult(
                token_ids=device_to_host(tensors.sampled_token_ids),
                num_tokens=device_to_host(tensors.num_sampled_tokens),
                drafts=None if drafts is None else device_to_host(drafts),
                logprobs=None if sampled.logprobs is None else logprobs_to_host(sampled.logprobs),
                candidates=None if sampled.candidates is None else candidates_to_host(sampled.candidates),
                embeddings=embeddings,
                prompt_logprobs=prompt_logprobs,
            )

        return self._stream.submit(launch)

    def _verify(self, tensors: StepTensors) -> None:
        """Of the targets what each sequence gets. On the device's stream."""
        verify_drafts(
            tensors.targets,
            tensors.sample_start_loc,
            tensors.sample_slots,
            self._slots.next_tokens,
            self._slots.num_accepted,
            tensors.sampled_token_ids,
            tensors.num_sampled_tokens,
        )

    def _propose(self, drafter: Drafter, step: SampledStep, new_slots: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Drafts for the tokens after these, [num_sampled, num_speculative_tokens] int32. On the device's stream."""
        for slot, token_ids in new_slots:
            drafter.begin(slot, token_ids)
        drafter.propose(step, self._slots)
        return self._slots.next_tokens[step.tensors.sample_slots.long(), 1:]


def _prompt_logprobs(logits: torch.Tensor, plan: SamplingPlan, targets: list[torch.Tensor]) -> list[RowLogprobs]:
    """logits: [num_prompt_logits, vocab_size]; targets: the plan's, on the device."""
    spans = torch.split(logits, [len(target) for target in targets])
    return [
        logprobs_to_host(logprobs_of(span, token_ids, target.num_top_logprobs))
        for span, token_ids, target in zip(spans, targets, plan.prompt_targets, strict=True)
    ]


def _sampling_batch(
    batch: SchedulerOutputs, tensors: StepTensors, plan: SamplingPlan, device: torch.device
) -> SamplingBatch:
    return SamplingBatch(
        rows=SamplingRows(
            temperature=tensors.temperature,
            min_p=tensors.min_p,
            top_k=tensors.top_k,
            top_p=tensors.top_p,
            uniforms=tensors.uniforms,
            all_greedy=batch.all_greedy,
            any_min_p=batch.any_min_p,
            any_top_p=batch.any_top_p,
            max_top_k=batch.max_top_k,
        ),
        token_ids=tensors.targets,
        banned_rows=tensors.banned_rows,
        banned_token_ids=tensors.banned_token_ids,
        banned_until=tensors.banned_until,
        row_output_indices=tensors.row_output_indices,
        edits=plan.edits,
        logprob_rows=row_tensor(plan.logprob_rows, device),
        num_top_logprobs=plan.num_top_logprobs,
        candidate_rows=row_tensor(plan.candidate_rows, device),
        num_candidates=plan.num_candidates,
    )
