"""`SchedulerDriver` plays the engine's and the Worker's part around a real `Scheduler`.

It launches steps on the fake device, processes them in order, one later with zero-overhead scheduling, and keeps each
sequence's true history.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import (
    AwaitedBlocks,
    PromptedSequence,
    RequestOutput,
    RequestOutputPool,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
    SequenceMetadataPool,
    StepLogprobs,
)
from tests.core.fake_device import FakeDevice, Launched, Sampled, make_logprobs
from tests.core.fake_model import NO_TOKEN, Line, TokenLogprobs, logprobs_of, next_token

Choice = Callable[[int], bool]  # by sequence id


def nobody(seq_id: int) -> bool:
    return False


class SchedulerDriver:
    """Owns a Scheduler with its pools, the fake device, and what is known of every sequence.

    1. After every step the scheduler's own recount adds up.
    2. What comes out for a sequence is what the plain model says, in order, and nothing after its end.
    3. Sequences come into being and are freed exactly when the scheduler says so.
    4. A row has as many drafts as its sequence's past, the threshold and the limits say, and what becomes of them is
       counted.
    5. No chunk ends within a medium that is kept whole.
    """

    def __init__(self, *, zero_overhead_scheduling: bool = True, **limits: Any) -> None:
        defaults: dict[str, Any] = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
            "max_num_extra_logits": 4,
            "num_speculative_tokens": 0,
            "num_lookahead_tokens": 0,
            "max_tokens_behind": 64,
            "enable_prefix_caching": True,
        }
        self.limits = {**defaults, **limits}
        self.zero_overhead_scheduling = zero_overhead_scheduling
        self.scheduler = Scheduler(SchedulerConfig(**self.limits))
        self.metadata_pool = SequenceMetadataPool()
        self.output_pool = RequestOutputPool()
        self.lines: dict[int, Line] = {}
        self.inflight: Launched | None = None
        self._awaited: dict[int, AwaitedBlocks] = {}
        self.max_seq_len = min(self.limits["max_model_len"], self.limits["num_blocks"] * self.limits["block_size"])
        self.freed_seq_ids: set[int] = set()
        self.num_accepted_by_position = [0] * self.limits["num_speculative_tokens"]
        self._device = FakeDevice(self.limits, self.max_seq_len)

    # ---- requests ----

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 8, **params: Any) -> int:
        line = Line(request_id, prompt, max_tokens, **params)
        line.history = list(prompt)
        line.num_forks_due = line.n - 1
        prompt_array = np.array(prompt, dtype=np.int32)
        seq_id = self.scheduler.add_seq(
            request_id,
            prompt_array,
            line.options(),
            priority=line.priority,
            cache_salt=line.salt,
            media_spans=list(line.media_spans),
            keeps_media_whole=line.keeps_media_whole,
        )
        self._know(seq_id, line)
        return seq_id

    def add_prompted(self, request_id: str, prompt: list[int], max_tokens: int = 8, **params: Any) -> int | None:
        """One whose prompt was computed elsewhere; None if it has ended there with its first token."""
        line = Line(request_id, prompt, max_tokens, **params)
        first_token = next_token(prompt, line.seed)
        line.history, line.first_output = [*prompt, first_token], 1
        if line.finish([first_token], self.max_seq_len)[0] != "NONE":
            return None
        seq_id = self.scheduler.add_prompted_seq(
            request_id,
            np.array(prompt, dtype=np.int32),
            PromptedSequence(first_token_id=first_token, first_scheduled_time_ns=1),
            line.options(),
            priority=line.priority,
            cache_salt=line.salt,
        )
        self._know(seq_id, line)
        return seq_id

    def awaiting(self) -> list[AwaitedBlocks]:
        """Of those that still have the blocks."""
        return [awaited for seq_id, awaited in self._awaited.items() if not self.lines[seq_id].ended]

    def receive(self, awaited: AwaitedBlocks, num_blocks: int) -> None:
        """The first `num_blocks` of those that it awaits are there; the others will not come."""
        line = self.lines[awaited.seq_id]
        for index, block in enumerate(awaited.blocks[:num_blocks].tolist(), start=awaited.first_block):
            self._device.receive_block(block, index, line)
        self.scheduler.blocks_arrived(awaited.seq_id, awaited.first_block + num_blocks)
        del self._awaited[awaited.seq_id]
        line.num_tokens_behind = 1
        self.scheduler.check_invariants()

    def fork(self, seq_id: int, seed: int) -> int:
        parent = self.lines[seq_id]
        child_id = self.scheduler.fork_seq(seq_id, seed=seed)
        indices = [line.sequence_index for line in self.lines.values() if line.request_id == parent.request_id]
        self._know(child_id, parent.fork(parent.history, seed=seed, sequence_index=max(indices) + 1))
        return child_id

    def append_token(self, seq_id: int, token: int) -> None:
        line = self.lines[seq_id]
        self.scheduler.append_token(seq_id, token)
        line.history.append(token)
        line.is_held = False
        if line.finish(line.history[len(line.prompt) :], self.max_seq_len)[0] != "NONE":
            line.ended = "silent"

    def abort(self, request_id: str, sequence_index: int = -1) -> None:
        aborted = [
            line
            for line in self.lines.values()
            if line.request_id == request_id and not line.ended and sequence_index in (-1, line.sequence_index)
        ]
        assert self.scheduler.abort_request(request_id, sequence_index) == bool(aborted)
        for line in aborted:
            line.ended = "abort"

    def abort_seq(self, seq_id: int) -> None:
        line = self.lines[seq_id]
        assert self.scheduler.abort_seq(seq_id) == (not line.ended)
        line.ended = line.ended or "abort"

    def live_seq_ids(self) -> list[int]:
        return [seq_id for seq_id, line in self.lines.items() if not line.ended]

    def held_seq_ids(self) -> list[int]:
        return [seq_id for seq_id in self.live_seq_ids() if self.lines[seq_id].is_held]

    def seq_ids_of(self, request_id: str) -> list[int]:
        return [seq_id for seq_id, line in self.lines.items() if line.request_id == request_id]

    def advance_beams(self) -> None:
        """Gives each request's beams their next tokens once all of them are held: not before, as a beam search does."""
        for request_id in {self.lines[seq_id].request_id for seq_id in self.held_seq_ids()}:
            beams = [seq_id for seq_id in self.live_seq_ids() if self.lines[seq_id].request_id == request_id]
            if all(self.lines[seq_id].is_held for seq_id in beams):
                for seq_id in beams:
                    self.append_token(seq_id, next_token(self.lines[seq_id].history, self.lines[seq_id].seed))

    # ---- the step, as LLMEngine and Worker do it ----

    def step(
        self, *, fails: bool = False, without_token: Choice = nobody, draft_threshold: float = 0.0
    ) -> SchedulerOutputs:
        """without_token: who gets no token of the step that is processed, if no other builds on it."""
        metadata, batch = self.scheduler.schedule(self.metadata_pool, draft_threshold=draft_threshold)
        self._take_freed()
        for awaited in self.scheduler.take_awaited():
            assert awaited.request_id == self.lines[awaited.seq_id].request_id
            self._awaited[awaited.seq_id] = awaited
        launched = None
        if not batch.is_empty():
            num_outputs = {row.seq_id: row.output_index for row in metadata}
            for row in metadata:
                line = self.lines[row.seq_id]
                is_cut = any(begin < row.seqlen_k < end for begin, end in line.media_spans)
                assert not (is_cut and line.keeps_media_whole)
            launched = self._device.launch(batch, metadata, self.lines, self.inflight, fails)
            self._check_num_drafts(launched, num_outputs, draft_threshold)
        self.scheduler.check_invariants()
        self.flush(without_token, later=launched)
        if launched is not None:
            self.inflight = launched
        self._free_finished()
        if launched is not None and (batch.is_prefill or not self.zero_overhead_scheduling):
            self.flush(without_token)
        self.scheduler.check_invariants()
        return batch

    def flush(self, without_token: Choice = nobody, later: Launched | None = None) -> list[RequestOutput]:
        launched, self.inflight = self.inflight, None
        if launched is None:
            return []
        if launched.fails:
            handles = self.scheduler.fail_step(launched.batch, self.output_pool)
        else:
            live = [sampled for sampled in launched.sampled if not self.lines[sampled.seq_id].ended]
            token_ids, num_tokens, drafts = self._sampled(launched, without_token, later)
            logprobs = self._logprobs(launched)
            self.scheduler.process_outputs(launched.batch, token_ids, num_tokens, drafts=drafts, logprobs=logprobs)
            self._expect_forks([sampled.seq_id for sampled in live])
            for sampled in live:
                self._learn(sampled)
            self.scheduler.check_invariants()
            handles = self.scheduler.build_request_outputs(launched.batch, self.output_pool)
        outputs = self.output_pool.clone(handles)
        self.output_pool.release(handles)
        for output in outputs:
            self._receive(output, launched)
        self._check_counts()
        return outputs

    def drain(self, max_steps: int = 10_000) -> None:
        """Until nothing is unfinished; whatever was held is given back."""
        num_steps = num_idle_steps = 0
        while self.scheduler.has_unfinished_seqs():
            self.advance_beams()
            for awaited in self.awaiting():
                self.receive(awaited, len(awaited.blocks))
            is_idle = self.inflight is None
            is_idle = self.step().is_empty() and is_idle
            num_steps += 1
            num_idle_steps = num_idle_steps + 1 if is_idle else 0
            assert num_idle_steps <= 1, "everybody waits for somebody else"
            assert num_steps <= max_steps, "somebody starves"
        assert self.flush() == []
        self._free_finished()
        self.scheduler.check_invariants()
        assert self.scheduler.num_free_blocks == self.scheduler.num_blocks
        assert (self.metadata_pool.num_in_use, self.output_pool.num_in_use) == (0, 0)
        assert self.live_seq_ids() == []
        assert self.freed_seq_ids == {seq_id for seq_id, line in self.lines.items() if line.is_tracked}

    # ---- drafts ----

    def _check_num_drafts(self, launched: Launched, num_outputs: dict[int, int], threshold: float) -> None:
        """As many as the past and the limits say; fewer only where the step or the blocks are full."""
        width, batch = self.limits["num_speculative_tokens"], launched.batch
        num_drafts = sum(len(sampled.verified) for sampled in launched.sampled)
        budget = min(self.limits["max_num_batched_tokens"] - batch.num_seqs, self.limits["max_num_extra_logits"])
        assert batch.is_prefill or num_drafts <= budget
        is_short = num_drafts == budget or self.scheduler.num_free_blocks <= width
        for sampled in launched.sampled:
            line, seq_id = self.lines[sampled.seq_id], sampled.seq_id
            if batch.is_prefill or line.is_beam or not line.has_drafts:
                expected = 0
            else:
                in_flight = 0 if self.inflight is None else self.inflight.num_drafts(seq_id)
                begin = len(line.prompt) + num_outputs[seq_id] - 1 + in_flight  # at the most, of its last token
                room = min(line.max_tokens - num_outputs[seq_id] - 1, self.max_seq_len - begin - 2)
                expected = max(0, min(line.num_drafts(threshold, line.num_proposed), room))
            assert len(sampled.verified) <= expected
            assert is_short or len(sampled.verified) == expected
            line.has_drafts = True
            self._check_proposal(sampled, line, batch.is_prefill, threshold)

    def _check_proposal(self, sampled: Sampled, line: Line, is_prefill: bool, threshold: float) -> None:
        width, num_lookahead_tokens = self.limits["num_speculative_tokens"], self.limits["num_lookahead_tokens"]
        if not num_lookahead_tokens:
            assert sampled.query_len == 0
            line.num_proposed = width
            return
        if is_prefill:
            line.num_tokens_behind = 0
        num_wanted = (
            0
            if line.is_beam or line.num_tokens_behind > self.limits["max_tokens_behind"]
            else line.num_drafts(threshold, width)
        )
        if not num_wanted:
            assert sampled.query_len == 0
        elif sampled.query_len:
            assert sampled.query_len <= line.num_tokens_behind + 2
        else:
            assert self.scheduler.num_free_blocks <= width or len(line.history) + 2 * width >= self.max_seq_len
        line.num_proposed = num_wanted if sampled.query_len else 0
        behind = line.num_tokens_behind + 1 + len(sampled.verified)
        line.num_tokens_behind = 0 if sampled.query_len else behind

    def _learn(self, sampled: Sampled) -> None:
        line = self.lines[sampled.seq_id]
        line.is_held = line.is_beam
        if line.is_beam:
            return
        assert sampled.verified == line.proposed[: len(sampled.verified)]
        is_proposed = [draft != NO_TOKEN for draft in sampled.verified]
        line.num_draft_tokens += sum(is_proposed)
        line.num_rows_with_drafts += any(is_proposed)
        line.compare(sampled.tokens, len(sampled.verified))
        line.proposed = sampled.proposed

    def _check_counts(self) -> None:
        scheduler, lines = self.scheduler, self.lines.values()
        assert scheduler.num_drafts == sum(line.num_rows_with_drafts for line in lines)
        assert scheduler.num_draft_tokens == sum(line.num_draft_tokens for line in lines)
        assert scheduler.num_accepted_draft_tokens == sum(line.num_accepted_draft_tokens for line in lines)
        assert scheduler.num_accepted_by_position.tolist() == self.num_accepted_by_position

    def output_tokens(self, seq_id: int) -> list[int]:
        return [output.token_id for output in self.lines[seq_id].outputs]

    # ---- who comes and goes ----

    def _know(self, seq_id: int, line: Line) -> None:
        assert seq_id == len(self.lines), "ids are given in the order of coming"
        self.lines[seq_id] = line

    def _expect_forks(self, processed_seq_ids: list[int]) -> None:
        """Children of a prompt that was computed just now: with its tokens alone, and seeds of their own."""
        tracked = []
        for seq_id in processed_seq_ids:
            parent = self.lines[seq_id]
            num_forks, parent.num_forks_due = parent.num_forks_due, 0
            for i in range(1, num_forks + 1):
                child_id = len(self.lines)
                self._know(child_id, parent.fork(parent.prompt, seed=parent.seed + i, sequence_index=i))
                if parent.is_tracked:
                    tracked.append((seq_id, child_id))
        assert self.scheduler.take_forks() == tracked

    def _free_finished(self) -> None:
        self.scheduler.free_finished_seqs()
        self._take_freed()

    def _take_freed(self) -> None:
        freed = self.scheduler.take_freed_seq_ids()
        in_flight = set() if self.inflight is None else set(self.inflight.seq_ids)
        ended = {seq_id for seq_id, line in self.lines.items() if line.is_tracked and line.ended}
        assert len(set(freed)) == len(freed)
        assert set(freed) == ended - in_flight - self.freed_seq_ids
        self.freed_seq_ids |= set(freed)

    # ---- what comes back ----

    def _sampled(
        self, launched: Launched, without_token: Choice, later: Launched | None
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """The step's tokens, their numbers and what was proposed; none where no later step builds on one."""
        shape = len(launched.sampled), 1 + self.limits["num_speculative_tokens"]
        token_ids = np.full(shape, -1, dtype=np.int32)
        num_tokens = np.ones(shape[0], dtype=np.int32)
        drafts = np.full((shape[0], shape[1] - 1), NO_TOKEN, dtype=np.int32)
        for row, sampled in enumerate(launched.sampled):
            line = self.lines[sampled.seq_id]
            is_built_on = later is not None and sampled.seq_id in later.seq_ids
            if not (line.ended or is_built_on or line.is_beam) and without_token(sampled.seq_id):
                del line.history[len(line.history) - len(sampled.tokens) :]
                sampled.tokens = []
                line.has_drafts = False
            token_ids[row, : len(sampled.tokens)] = sampled.tokens
            num_tokens[row] = len(sampled.tokens)
            drafts[row] = sampled.proposed
        return token_ids, num_tokens, drafts

    def _logprobs(self, launched: Launched) -> StepLogprobs | None:
        """Of all rows that asked; what those with a token were told is kept to be compared with what comes out."""
        told: list[tuple[int, TokenLogprobs]] = []
        num_top = max((self.lines[sampled.seq_id].num_logprobs for sampled in launched.sampled), default=0)
        first_row = 0
        for sampled in launched.sampled:
            line = self.lines[sampled.seq_id]
            for i in range(1 + len(sampled.verified) if line.num_logprobs >= 0 else 0):
                output_index = sampled.output_index + i
                history = line.history[: len(line.prompt) + output_index]
                told.append((first_row + i, logprobs_of(history, line.seed, num_top)))
                if i < len(sampled.tokens):
                    line.output_logprobs[output_index] = logprobs_of(history, line.seed, line.num_logprobs)
            first_row += 1 + len(sampled.verified)
        if not told:
            return None
        rows, logprobs = zip(*told, strict=True)
        return make_logprobs(
            list(rows),
            [one.logprob for one in logprobs],
            [one.rank for one in logprobs],
            [one.top for one in logprobs],
        )

    def _receive(self, output: RequestOutput, launched: Launched) -> None:
        line = self.lines[output.seq_id]
        assert not line.ended, "an output after the end"
        line.outputs.append(output)
        assert output.seq_id in launched.seq_ids
        assert (output.request_id, output.sequence_index) == (line.request_id, line.sequence_index)
        assert output.num_prompt_tokens == len(line.prompt)
        assert 0 <= output.num_cached_tokens < len(line.prompt)
        assert output.first_scheduled_time_ns > 0
        assert output.finished == (output.finish_reason.name != "NONE")
        if launched.fails:
            assert (output.token_id, output.finish_reason.name) == (-1, "ERROR")
            line.ended = "ERROR"
            return
        assert not line.is_beam
        assert output.output_index == line.first_output + len(line.outputs) - 1
        self._check_drafts(output, line, launched)
        known = line.history[len(line.prompt) :][: line.first_output]
        expected, finish = line.expected(known, self.max_seq_len)
        assert output.token_id == expected[output.output_index]
        is_last = output.output_index == len(expected) - 1
        reason = finish if is_last else ("NONE", -1)
        assert (output.finish_reason.name, output.stop_token_id) == reason
        self._check_logprobs(output, line)
        if is_last:
            line.ended = output.finish_reason.name

    def _check_drafts(self, output: RequestOutput, line: Line, launched: Launched) -> None:
        (sampled,) = (sampled for sampled in launched.sampled if sampled.seq_id == output.seq_id)
        place = output.output_index - sampled.output_index
        if place < len(sampled.tokens) - 1:
            line.num_accepted_draft_tokens += 1
            self.num_accepted_by_position[place] += 1
        assert output.num_draft_tokens == line.num_draft_tokens
        assert output.num_accepted_draft_tokens == line.num_accepted_draft_tokens

    def _check_logprobs(self, output: RequestOutput, line: Line) -> None:
        if line.prompt_logprobs:
            assert output.num_cached_tokens == 0
            assert line.prompt_positions == set(range(len(line.prompt) - 1))
        told = line.output_logprobs.get(output.output_index)
        if told is None:
            assert math.isnan(output.logprob)
            assert (output.rank, output.top_logprobs) == (0, [])
        else:
            assert (output.logprob, output.rank, output.top_logprobs) == (told.logprob, told.rank, told.top)
