"""A device without a model: it remembers for every KV slot which history was written there, and checks every read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import SchedulerOutputs, SequenceMetadataList, StepArrays, StepLogprobs
from tests.core.fake_model import Histories, Line, next_token

TopLogprobs = list[tuple[int, float]]

POISON = -1  # what a failed step leaves in its slots


@dataclass
class Launched:
    """A step on the device."""

    batch: SchedulerOutputs
    seq_ids: list[int]
    sampled_seq_ids: list[int]
    output_indices: list[int]  # [num_sampled] which output of its sequence each is
    tokens: list[int]  # [num_sampled]
    fails: bool


def make_arrays(
    max_tokens: int, max_seqs: int, max_blocks: int, max_banned: int = 64, max_prompt_logits: int = 1
) -> dict[str, NDArray[Any]]:
    garbage = -77
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "token_ids": (np.int64, (max_tokens,)),
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


def make_logprobs(rows: list[int], logprobs: list[float], ranks: list[int], tops: list[TopLogprobs]) -> StepLogprobs:
    return StepLogprobs(
        rows=np.array(rows, np.int32),
        logprobs=np.array(logprobs, np.float32),
        ranks=np.array(ranks, np.int32),
        top_token_ids=np.array([[token for token, _ in top] for top in tops], np.int32),
        top_logprobs=np.array([[logprob for _, logprob in top] for top in tops], np.float32),
    )


class FakeDevice:
    """Owns the KV slots and the step arrays, and checks everything that a launched step says.

    What a launched row reads through its block table is the KV of its own history. Rows, tokens and prompt logits stay
    within the limits. Nothing that is not in the sequence's own past or the step in flight is an input.
    """

    def __init__(self, limits: dict[str, Any], max_seq_len: int) -> None:
        self._limits = limits
        self._block_size = int(limits["block_size"])
        self._histories = Histories()
        self._slots: dict[int, int] = {}
        self._uniforms: dict[tuple[int, int], float] = {}  # by seed and output index
        self._seeds_of: dict[float, tuple[int, int]] = {}
        max_blocks = -(-max_seq_len // self._block_size)
        sizes = (limits["max_num_batched_tokens"], limits["max_num_seqs"], max_blocks)
        self._arrays = make_arrays(*sizes, max_prompt_logits=limits["max_num_prompt_logits"])
        self._step_arrays = StepArrays(**self._arrays)

    def launch(
        self,
        batch: SchedulerOutputs,
        metadata: SequenceMetadataList,
        lines: dict[int, Line],
        previous: Launched | None,
        fails: bool,
    ) -> Launched:
        """Writes and reads the KV of a scheduled step, and samples a token for each row that does."""
        batch.write(self._step_arrays)
        self._check_limits(batch)
        self._copy_blocks(batch)
        seq_ids = [row.seq_id for row in metadata]
        rows = [lines[seq_id] for seq_id in seq_ids]
        for line in rows:
            line.is_poisoned = line.is_poisoned or fails
        for index, line in enumerate(rows):
            self._write_row(index, line, previous)
        for index, (row, line) in enumerate(zip(metadata, rows, strict=True)):
            assert (row.request_id, row.is_prefill) == (line.request_id, batch.is_prefill)
            assert row.samples == (row.seqlen_k == len(line.history))
            assert row.output_index == line.num_outputs
            if line.is_beam:
                assert not line.is_held
                assert previous is None or row.seq_id not in previous.seq_ids
            self._check_reads(index, line)
        sampled_seq_ids = [row.seq_id for row in metadata if row.samples]
        self._check_prompt_logits(batch, seq_ids, rows)
        self._check_columns(batch, rows, sampled_seq_ids, lines)
        output_indices = [lines[seq_id].num_outputs for seq_id in sampled_seq_ids]
        tokens = self._sample(batch, [lines[seq_id] for seq_id in sampled_seq_ids])
        return Launched(batch, seq_ids, sampled_seq_ids, output_indices, tokens, fails)

    def _check_limits(self, batch: SchedulerOutputs) -> None:
        assert 0 < batch.num_seqs <= self._limits["max_num_seqs"]
        assert batch.num_seqs <= batch.num_tokens <= self._limits["max_num_batched_tokens"]
        assert 0 <= batch.num_prompt_logits <= self._limits["max_num_prompt_logits"]
        assert self._arrays["query_start_loc"][0] == 0
        assert self._arrays["query_start_loc"][batch.num_seqs] == batch.num_tokens
        assert batch.max_seq_len == self._arrays["seq_lens"][: batch.num_seqs].max()
        lengths = np.diff(self._arrays["query_start_loc"][: batch.num_seqs + 1])
        assert batch.max_query_len == lengths.max()
        assert lengths.min() > 0

    def _copy_blocks(self, batch: SchedulerOutputs) -> None:
        for source, target in batch.block_copies:
            for offset in range(self._block_size):
                self._slots.pop(self._slot(target, offset), None)
                if self._slot(source, offset) in self._slots:
                    self._slots[self._slot(target, offset)] = self._slots[self._slot(source, offset)]

    def _slot(self, block: int, offset: int) -> int:
        return int(block) * self._block_size + offset

    def _own_slot(self, index: int, position: int) -> int:
        block = self._arrays["block_tables"][index, position // self._block_size]
        assert 1 <= block <= self._limits["num_blocks"]
        return self._slot(block, position % self._block_size)

    def _write_row(self, index: int, line: Line, previous: Launched | None) -> None:
        begin, end = self._arrays["query_start_loc"][index : index + 2]
        seq_len = int(self._arrays["seq_lens"][index])
        contents = self._histories.of(line.salt, line.history[:seq_len])
        for token_index in range(begin, end):
            position = int(self._arrays["positions"][token_index])
            assert position == seq_len - (end - token_index)
            token, row = self._arrays["token_ids"][token_index], self._arrays["inflight_rows"][token_index]
            if row >= 0:
                assert previous is not None, "an input from a step that is not in flight"
                token = previous.tokens[row]
            assert token == line.history[position]
            assert self._arrays["slot_mapping"][token_index] == self._own_slot(index, position)
            slot = int(self._arrays["slot_mapping"][token_index])
            self._slots[slot] = POISON if line.is_poisoned else contents[position]

    def _check_reads(self, index: int, line: Line) -> None:
        seq_len = int(self._arrays["seq_lens"][index])
        if line.is_poisoned:
            return
        read = [self._slots.get(self._own_slot(index, position)) for position in range(seq_len)]
        assert read == self._histories.of(line.salt, line.history[:seq_len])

    def _check_prompt_logits(self, batch: SchedulerOutputs, seq_ids: list[int], lines: list[Line]) -> None:
        """Each token of the prompt but the last, of those who want them and have no output yet, and no other."""
        spans, indices = [], []
        for index, (seq_id, line) in enumerate(zip(seq_ids, lines, strict=True)):
            if not line.prompt_logprobs or line.num_outputs > 0:
                continue
            begin, end = (int(at) for at in self._arrays["query_start_loc"][index : index + 2])
            wanted = [i for i in range(begin, end) if self._arrays["positions"][i] < len(line.prompt) - 1]
            if wanted:
                spans.append([seq_id, int(self._arrays["positions"][wanted[0]]), len(wanted)])
                indices += wanted
                line.prompt_positions |= {int(self._arrays["positions"][i]) for i in wanted}
        assert batch.prompt_logits.tolist() == spans
        assert batch.num_prompt_logits == len(indices)
        written = self._arrays["logits_indices"][batch.num_sampled :][: batch.num_prompt_logits]
        assert written.tolist() == indices

    def _check_columns(
        self, batch: SchedulerOutputs, rows: list[Line], sampled_seq_ids: list[int], lines: dict[int, Line]
    ) -> None:
        assert batch.lora_ids.tolist() == [line.lora_id for line in rows]
        assert batch.any_lora == any(line.lora_id for line in rows)
        tracked = [(row, seq_id) for row, seq_id in enumerate(sampled_seq_ids) if lines[seq_id].is_tracked]
        assert list(zip(batch.tracked_rows.tolist(), batch.tracked_seq_ids.tolist(), strict=True)) == tracked

    def _sample(self, batch: SchedulerOutputs, lines: list[Line]) -> list[int]:
        arrays, num_sampled = self._arrays, batch.num_sampled
        assert num_sampled == len(lines)
        banned = set()
        for row, line in enumerate(lines):
            uniform = float(arrays["uniforms"][row])
            assert 0 <= uniform < 1
            key = (line.seed, line.num_outputs)
            assert self._uniforms.setdefault(key, uniform) == uniform
            assert self._seeds_of.setdefault(uniform, key) == key
            if line.num_outputs < line.min_tokens:
                banned |= {(row, token) for token in line.end_tokens()}
        pairs = zip(arrays["banned_rows"][: batch.num_banned], arrays["banned_token_ids"], strict=False)
        assert {(int(row), int(token)) for row, token in pairs} == banned
        lasts = arrays["logits_indices"][:num_sampled]
        assert list(arrays["positions"][lasts]) == [len(line.history) - 1 for line in lines]
        tokens = [next_token(line.history, line.seed) for line in lines]
        for line, token in zip(lines, tokens, strict=True):
            if not line.is_beam:
                line.history.append(token)
        return tokens
