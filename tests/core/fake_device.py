"""A device without a model: it remembers for every KV slot which history was written there, and checks every read.

`SchedulerDriver` plays the engine's and the Worker's part around a real `Scheduler`: it launches steps on the fake
device, processes them in order, one later with zero-overhead scheduling, and keeps each sequence's true history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import (
    RequestOutput,
    RequestOutputPool,
    SamplingOptions,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
    SequenceMetadataList,
    SequenceMetadataPool,
    StepArrays,
)

VOCAB_SIZE = 8
EOS = 0
STOP = 1
POISON = -1  # what a failed step leaves in its slots

Finish = tuple[str, int]  # reason, stop token


class Histories:
    """Gives every distinct (salt, token, token, …) a number: the content of the KV slot of its last token."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str], int] = {}

    def extend(self, parent: int, token: int | str) -> int:
        return self._numbers.setdefault((parent, token), len(self._numbers) + 1)

    def of(self, salt: str, tokens: Iterable[int]) -> list[int]:
        parent, numbers = self.extend(0, salt), []
        for token in tokens:
            parent = self.extend(parent, token)
            numbers.append(parent)
        return numbers


def next_token(tokens: list[int], seed: int) -> int:
    """The fake model: depends on the whole history, ends in EOS about once in eight tokens."""
    state = seed * 7919 + 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1000003
    return state % VOCAB_SIZE


@dataclass
class Line:
    """What the tests know of one sequence."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    salt: str = ""
    sequence_index: int = 0
    first_output: int = 0  # output index of the first token that comes out: not 0 for a fork
    history: list[int] = field(default_factory=list)  # prompt and all that the device sampled
    outputs: list[RequestOutput] = field(default_factory=list)
    poisoned: bool = False  # a step of it failed
    ended: str = ""  # the finish reason that came out, or "abort"

    def options(self) -> SamplingOptions:
        return SamplingOptions(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            eos_token_ids=[EOS],
            stop_token_ids=list(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            temperature=1.0,
            seed=self.seed,
        )

    def end_tokens(self) -> set[int]:
        return set(self.stop_token_ids) | (set() if self.ignore_eos else {EOS})

    def expected(self, known: list[int], max_seq_len: int) -> tuple[list[int], Finish]:
        """All outputs after `known` outputs, token by token, and how it ends: the plain model of generation."""
        outputs = list(known)
        while True:
            outputs.append(next_token(self.prompt + outputs, self.seed))
            if len(outputs) > self.min_tokens and outputs[-1] in self.end_tokens():
                return outputs, ("STOP", outputs[-1])
            if len(outputs) == self.max_tokens or len(self.prompt) + len(outputs) == max_seq_len:
                return outputs, ("LENGTH", -1)


@dataclass
class Launched:
    """A step on the device."""

    batch: SchedulerOutputs
    metadata: SequenceMetadataList
    seq_ids: list[int]
    sampled_seq_ids: list[int]
    tokens: list[int]  # [num_sampled]
    fails: bool


def make_arrays(
    max_tokens: int, max_seqs: int, max_blocks: int, max_banned: int = 64, max_prompt_logits: int = 1
) -> dict[str, NDArray[Any]]:
    garbage = -77
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "token_ids": (np.int32, (max_tokens,)),
        "inflight_rows": (np.int32, (max_tokens,)),
        "positions": (np.int64, (max_tokens,)),
        "slot_mapping": (np.int64, (max_tokens,)),
        "query_start_loc": (np.int32, (max_seqs + 1,)),
        "seq_lens": (np.int32, (max_seqs,)),
        "block_tables": (np.int32, (max_seqs, max_blocks)),
        "logits_indices": (np.int64, (max_seqs + max_prompt_logits,)),
        "temperature": (np.float32, (max_seqs,)),
        "top_k": (np.int32, (max_seqs,)),
        "top_p": (np.float32, (max_seqs,)),
        "min_p": (np.float32, (max_seqs,)),
        "uniforms": (np.float64, (max_seqs,)),
        "banned_rows": (np.int64, (max_banned,)),
        "banned_token_ids": (np.int64, (max_banned,)),
    }
    return {name: np.full(shape, garbage, dtype=dtype) for name, (dtype, shape) in shapes.items()}


class SchedulerDriver:
    """Owns a Scheduler with its pools, the fake device's slots, and what is known of every sequence.

    1. After every step the scheduler's own recount adds up.
    2. Whatever a launched row reads through its block table is the KV of its own history.
    3. What comes out for a sequence is what the plain model says, in order, and nothing after its end.
    """

    def __init__(self, *, zero_overhead_scheduling: bool = True, **limits: Any) -> None:
        defaults: dict[str, Any] = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
        }
        self.limits = {**defaults, **limits}
        self.zero_overhead_scheduling = zero_overhead_scheduling
        self.scheduler = Scheduler(SchedulerConfig(**self.limits))
        self.metadata_pool = SequenceMetadataPool()
        self.output_pool = RequestOutputPool()
        self.lines: dict[int, Line] = {}
        self.inflight: Launched | None = None
        self.max_seq_len = min(self.limits["max_model_len"], self.limits["num_blocks"] * self.limits["block_size"])
        self._histories = Histories()
        self._slots: dict[int, int] = {}
        self._uniforms: dict[tuple[int, int], float] = {}
        max_blocks = -(-self.max_seq_len // self.limits["block_size"])
        sizes = (self.limits["max_num_batched_tokens"], self.limits["max_num_seqs"], max_blocks)
        self._arrays = make_arrays(*sizes)
        self._step_arrays = StepArrays(**self._arrays)

    # ---- requests ----

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 8, **params: Any) -> int:
        line = Line(request_id, prompt, max_tokens, **params)
        line.history = list(prompt)
        prompt_array = np.array(prompt, dtype=np.int32)
        seq_id = self.scheduler.add_seq(
            request_id, prompt_array, line.options(), priority=line.priority, cache_salt=line.salt
        )
        self.lines[seq_id] = line
        return seq_id

    def fork(self, seq_id: int, seed: int) -> int:
        parent = self.lines[seq_id]
        child_id = self.scheduler.fork_seq(seq_id, seed=seed)
        siblings = [line for line in self.lines.values() if line.request_id == parent.request_id]
        self.lines[child_id] = Line(
            **{
                **parent.__dict__,
                "seed": seed,
                "sequence_index": max(line.sequence_index for line in siblings) + 1,
                "first_output": len(parent.history) - len(parent.prompt),
                "history": list(parent.history),
                "outputs": [],
            }
        )
        return child_id

    def abort(self, request_id: str) -> None:
        lines = [line for line in self.lines.values() if line.request_id == request_id and not line.ended]
        assert self.scheduler.abort_request(request_id) == bool(lines)
        for line in lines:
            line.ended = "abort"

    def live_seq_ids(self) -> list[int]:
        return [seq_id for seq_id, line in self.lines.items() if not line.ended]

    # ---- the step, as LLMEngine and Worker do it ----

    def step(self, *, fails: bool = False, num_tokens_of: Callable[[int], int] = lambda seq_id: 1) -> SchedulerOutputs:
        metadata, batch = self.scheduler.schedule(self.metadata_pool)
        launched = None if batch.is_empty() else self._launch(batch, metadata, fails)
        self.scheduler.check_invariants()
        self.flush(num_tokens_of, later=launched)
        self.scheduler.free_finished_seqs()
        if launched is not None:
            self.inflight = launched
            if batch.is_prefill or not self.zero_overhead_scheduling:
                self.flush(num_tokens_of)
        self.scheduler.check_invariants()
        return batch

    def flush(
        self, num_tokens_of: Callable[[int], int] = lambda seq_id: 1, later: Launched | None = None
    ) -> list[RequestOutput]:
        launched, self.inflight = self.inflight, None
        if launched is None:
            return []
        if launched.fails:
            handles = self.scheduler.fail_step(launched.batch, self.output_pool)
        else:
            token_ids, num_tokens = self._sampled(launched, num_tokens_of, later)
            self.scheduler.process_outputs(launched.batch, token_ids, num_tokens)
            self.scheduler.check_invariants()
            handles = self.scheduler.build_request_outputs(launched.batch, self.output_pool)
        outputs = self.output_pool.clone(handles)
        self.output_pool.release(handles)
        for output in outputs:
            self._receive(output, launched)
        return outputs

    def drain(self, max_steps: int = 10_000) -> None:
        """Until nothing is unfinished; whatever was held is given back."""
        num_steps = 0
        while self.scheduler.has_unfinished_seqs():
            self.step()
            num_steps += 1
            assert num_steps <= max_steps, "somebody starves"
        assert self.flush() == []
        self.scheduler.free_finished_seqs()
        self.scheduler.check_invariants()
        assert self.scheduler.num_free_blocks == self.scheduler.num_blocks
        assert (self.metadata_pool.num_in_use, self.output_pool.num_in_use) == (0, 0)
        assert self.live_seq_ids() == []

    def output_tokens(self, seq_id: int) -> list[int]:
        return [output.token_id for output in self.lines[seq_id].outputs]

    # ---- the device ----

    def _launch(self, batch: SchedulerOutputs, metadata: SequenceMetadataList, fails: bool) -> Launched:
        batch.write(self._step_arrays)
        self._check_limits(batch)
        for source, target in batch.block_copies:
            for offset in range(self.limits["block_size"]):
                self._slots.pop(self._slot(target, offset), None)
                if self._slot(source, offset) in self._slots:
                    self._slots[self._slot(target, offset)] = self._slots[self._slot(source, offset)]
        rows = [self.lines[row.seq_id] for row in metadata]
        for line in rows:
            line.poisoned = line.poisoned or fails
        for index, line in enumerate(rows):
            self._write_row(index, line)
        for index, (row, line) in enumerate(zip(metadata, rows, strict=True)):
            assert (row.request_id, row.is_prefill) == (line.request_id, batch.is_prefill)
            assert row.samples == (row.seqlen_k == len(line.history))
            assert row.output_index == len(line.history) - len(line.prompt)
            self._check_reads(index, line)
        sampled = [row.seq_id for row in metadata if row.samples]
        tokens = self._sample(batch, [self.lines[seq_id] for seq_id in sampled])
        return Launched(batch, metadata, [row.seq_id for row in metadata], sampled, tokens, fails)

    def _check_limits(self, batch: SchedulerOutputs) -> None:
        assert 0 < batch.num_seqs <= self.limits["max_num_seqs"]
        assert batch.num_seqs <= batch.num_tokens <= self.limits["max_num_batched_tokens"]
        assert self._arrays["query_start_loc"][0] == 0
        assert self._arrays["query_start_loc"][batch.num_seqs] == batch.num_tokens
        assert batch.max_seq_len == self._arrays["seq_lens"][: batch.num_seqs].max()
        lengths = np.diff(self._arrays["query_start_loc"][: batch.num_seqs + 1])
        assert batch.max_query_len == lengths.max()
        assert lengths.min() > 0

    def _slot(self, block: int, offset: int) -> int:
        return int(block) * int(self.limits["block_size"]) + offset

    def _own_slot(self, index: int, position: int) -> int:
        block = self._arrays["block_tables"][index, position // self.limits["block_size"]]
        assert 1 <= block <= self.limits["num_blocks"]
        return self._slot(block, position % self.limits["block_size"])

    def _write_row(self, index: int, line: Line) -> None:
        begin, end = self._arrays["query_start_loc"][index : index + 2]
        seq_len = int(self._arrays["seq_lens"][index])
        contents = self._histories.of(line.salt, line.history[:seq_len])
        for token_index in range(begin, end):
            position = int(self._arrays["positions"][token_index])
            assert position == seq_len - (end - token_index)
            token, row = self._arrays["token_ids"][token_index], self._arrays["inflight_rows"][token_index]
            if row >= 0:
                assert self.inflight is not None, "an input from a step that is not in flight"
                token = self.inflight.tokens[row]
            assert token == line.history[position]
            assert self._arrays["slot_mapping"][token_index] == self._own_slot(index, position)
            slot = int(self._arrays["slot_mapping"][token_index])
            self._slots[slot] = POISON if line.poisoned else contents[position]

    def _check_reads(self, index: int, line: Line) -> None:
        seq_len = int(self._arrays["seq_lens"][index])
        if line.poisoned:
            return
        read = [self._slots.get(self._own_slot(index, position)) for position in range(seq_len)]
        assert read == self._histories.of(line.salt, line.history[:seq_len])

    def _sample(self, batch: SchedulerOutputs, lines: list[Line]) -> list[int]:
        arrays, num_sampled = self._arrays, batch.num_sampled
        assert num_sampled == len(lines)
        banned = set()
        for row, line in enumerate(lines):
            output_index = len(line.history) - len(line.prompt)
            uniform = float(arrays["uniforms"][row])
            assert 0 <= uniform < 1
            assert self._uniforms.setdefault((line.seed, output_index), uniform) == uniform
            if output_index < line.min_tokens:
                banned |= {(row, token) for token in line.end_tokens()}
        pairs = zip(arrays["banned_rows"][: batch.num_banned], arrays["banned_token_ids"], strict=False)
        assert {(int(row), int(token)) for row, token in pairs} == banned
        lasts = arrays["logits_indices"][:num_sampled]
        assert list(arrays["positions"][lasts]) == [len(line.history) - 1 for line in lines]
        tokens = [next_token(line.history, line.seed) for line in lines]
        for line, token in zip(lines, tokens, strict=True):
            line.history.append(token)
        return tokens

    # ---- what comes back ----

    def _sampled(
        self, launched: Launched, num_tokens_of: Callable[[int], int], later: Launched | None
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The step's tokens, with more or fewer than one where no later step builds on exactly one."""
        token_ids = np.full((len(launched.tokens), 2), -1, dtype=np.int32)
        num_tokens = np.ones(len(launched.tokens), dtype=np.int32)
        for row, (seq_id, token) in enumerate(zip(launched.sampled_seq_ids, launched.tokens, strict=True)):
            line = self.lines[seq_id]
            token_ids[row, 0] = token
            built_on = later is not None and seq_id in later.seq_ids
            if line.ended or built_on:
                continue
            num_tokens[row] = num_tokens_of(seq_id)
            if num_tokens[row] == 0:
                line.history.pop()
            elif num_tokens[row] == 2:
                token_ids[row, 1] = next_token(line.history, line.seed)
                line.history.append(int(token_ids[row, 1]))
        return token_ids, num_tokens

    def _receive(self, output: RequestOutput, launched: Launched) -> None:
        line = self.lines[output.seq_id]
        assert not line.ended, "an output after the end"
        line.outputs.append(output)
        assert output.seq_id in launched.seq_ids
        assert (output.request_id, output.sequence_index) == (line.request_id, line.sequence_index)
        assert output.num_prompt_tokens == len(line.prompt)
        assert 0 <= output.num_cached_tokens < len(line.prompt)
        assert output.output_index == line.first_output + len(line.outputs) - 1
        assert output.finished == (output.finish_reason.name != "NONE")
        if launched.fails:
            assert (output.token_id, output.finish_reason.name) == (-1, "ERROR")
            line.ended = "ERROR"
            return
        known = line.history[len(line.prompt) :][: line.first_output]
        expected, finish = line.expected(known, self.max_seq_len)
        assert output.token_id == expected[output.output_index]
        is_last = output.output_index == len(expected) - 1
        reason = finish if is_last else ("NONE", -1)
        assert (output.finish_reason.name, output.stop_token_id) == reason
        if is_last:
            line.ended = output.finish_reason.name
