"""The device side of a step: `execute_model_step` in its four parts, and the step in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend._core import SchedulerOutputs
from deepinfer_backend.worker.device import DeviceStream, Pending
from deepinfer_backend.worker.model_runner import ModelRunner
from deepinfer_backend.worker.sampler import SamplingBatch, sample
from deepinfer_backend.worker.step_buffers import StepBuffers
from deepinfer_backend.worker.timers import StepTimers

Handles = NDArray[np.uint64]
NO_HANDLES: Handles = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step sampled: on the device, where the next step takes its inputs, and the host's copy of it."""

    on_device: torch.Tensor  # [num_sampled] int32
    on_host: torch.Tensor  # [num_sampled] int32; valid once the device has passed this step

    def numpy(self) -> NDArray[np.int32]:
        """[num_sampled, 1]: one token a row."""
        tokens: NDArray[np.int32] = self.on_host.numpy()[:, None]
        return tokens


@dataclass(slots=True)
class StepState:
    """One launched step. `sampled` is set by part 3; its result is None for a step without a row that samples."""

    batch: SchedulerOutputs
    buffers: StepBuffers
    logits: Pending[torch.Tensor | None]
    sampled: Pending[SampledTokens | None] | None = None

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids [num_sampled, width] and how many of each row are new, [num_sampled].

        Waits for the device; raises what the step raised there.
        """
        assert self.sampled is not None
        sampled = self.sampled.result()
        tokens = np.empty((0, 1), dtype=np.int32) if sampled is None else sampled.numpy()
        return tokens, np.ones(len(tokens), dtype=np.int32)


class Worker:
    """Launches steps and keeps the one in flight.

    1. The device works in the order in which steps were launched; the host never waits for a token to launch one.
    2. At most one step is in flight after a call returns: `prev_step_state`, always a decode step.
    3. A buffer set is written again two steps later, when the step that used it has been post-processed.

    Owned by the thread that steps the engine.

    post_process(state) → handles: called once per launched step, in order, after it is certain to be computed or when
    waiting for it raises. pre_sampler_sync(): called once per round while the device samples.
    """

    def __init__(
        self,
        runner: ModelRunner,
        stream: DeviceStream,
        buffers: tuple[StepBuffers, StepBuffers],
        *,
        zero_overhead_scheduling: bool,
        post_process: Callable[[StepState], Handles],
        pre_sampler_sync: Callable[[], None],
        timers: StepTimers,
    ) -> None:
        self.prev_step_state: StepState | None = None
        self._runner = runner
        self._stream = stream
        self._free_buffers, self._used_buffers = buffers
        self._zero_overhead_scheduling = zero_overhead_scheduling
        self._post_process = post_process
        self._pre_sampler_sync = pre_sampler_sync
        self._timers = timers

    def execute_model_step(self, batch: SchedulerOutputs) -> Handles:
        """One round, the same for every kind of step; `batch` may be empty.

        Returns the handles of the outputs that are ready: those of the previous decode step and, for a prefill (or
        without zero-overhead scheduling), those of this one.
        """
        with self._timers.record("forward"):
            current = None if batch.is_empty() else self._forward(batch)
        handles = self.flush_inflight_reqs()
        with self._timers.record("sample"):
            if current is not None:
                self._sample(current)
            self._pre_sampler_sync()
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
        batch.write(buffers.arrays)
        block_copies = torch.from_numpy(batch.block_copies.copy()) if len(batch.block_copies) else None
        previous = self.prev_step_state

        def launch() -> torch.Tensor | None:
            inflight = previous.sampled.on_stream() if previous and previous.sampled else None
            return self._runner.forward(batch, buffers, block_copies, None if inflight is None else inflight.on_device)

        return StepState(batch, buffers, self._stream.submit(launch))

    def _sample(self, state: StepState) -> None:
        sampling = _sampling_batch(state.batch, state.buffers)

        def launch() -> SampledTokens | None:
            logits = state.logits.on_stream()
            if logits is None:
                return None
            tokens = sample(logits, sampling)
            if tokens.device.type == "cpu":
                return SampledTokens(tokens, tokens)
            on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            on_host.copy_(tokens, non_blocking=True)
            return SampledTokens(tokens, on_host)

        state.sampled = self._stream.submit(launch)


def _sampling_batch(batch: SchedulerOutputs, buffers: StepBuffers) -> SamplingBatch:
    num_rows, num_banned = batch.num_sampled, batch.num_banned
    device = buffers.device
    random_rows = None
    if not batch.all_greedy:
        random_rows = buffers.host.temperature[:num_rows].nonzero().squeeze(1)
        random_rows = random_rows.to(device.temperature.device, non_blocking=True)
    return SamplingBatch(
        random_rows=random_rows,
        temperature=device.temperature[:num_rows],
        top_k=device.top_k[:num_rows],
        top_p=device.top_p[:num_rows],
        uniforms=device.uniforms[:num_rows],
        banned_rows=device.banned_rows[:num_banned],
        banned_token_ids=device.banned_token_ids[:num_banned],
        any_top_k=batch.any_top_k,
        any_top_p=batch.any_top_p,
    )
