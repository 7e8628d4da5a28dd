"""A device without a model: it remembers for every KV slot which history was written there, and checks every read.

What it does with drafts is what a device does: the last token and the drafts of a sequence, and how many it accepted,
are in a state of its own, by slot, and known to it before the host knows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import SchedulerOutputs, SequenceMetadataList, StepArrays, StepLogprobs
from tests.core.fake_model import NO_TOKEN, Histories, Line, draft_tokens, next_token

TopLogprobs = list[tuple[int, float]]

POISON = -1  # what a failed step leaves in its slots


@dataclass
class Sampled:
    """What one sequence got of a step, true whatever the host knew then."""

    seq_id: int
    output_index: int  # of its first token
    verified: list[int]  # the drafts that the step computed; NO_TOKEN where none was proposed
    tokens: list[int]  # those of them that were accepted, and one more
    proposed: list[int]  # drafts for what comes next
    query_len: int  # how many tokens the drafter computed to begin with


@dataclass
class Launched:
    """A step on the device."""

    batch: SchedulerOutputs
    seq_ids: list[int]
    sampled: list[Sampled]
    fails: bool

    def num_drafts(self, seq_id: int) -> int:
        return sum(len(sampled.verified) for sampled in self.sampled if sampled.seq_id == seq_id)


def make_arrays(
    max_tokens: int, max_seqs: int, max_blocks: int, max_banned: int = 64, max_extra_logits: int = 1
) -> dict[str, NDArray[Any]]:
    garbage = -77
    max_logits = max_seqs + max_extra_logits
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "token_ids": (np.int64, (max_tokens,)),
        "token_sources": (np.int32, (max_tokens,)),
        "positions": (np.int64, (max_tokens,)),
        "slot_mapping": (np.int64, (max_tokens,)),
        "query_start_loc": (np.int32, (max_seqs + 1,)),
        "seq_lens": (np.int32, (max_seqs,)),
        "advance_slots": (np.int32, (max_seqs,)),
        "block_tables": (np.int32, (max_seqs, max_blocks)),
        "logits_indices": (np.int64, (max_logits,)),
        "sample_start_loc": (np.int32, (max_seqs + 1,)),
        "sample_slots": (np.int32, (max_seqs,)),
        "temperature": (np.float32, (max_logits,)),
        "top_k": (np.int32, (max_logits,)),
        "top_p": (np.float32, (max_logits,)),
        "min_p": (np.float32, (max_logits,)),
        "seeds": (np.int64, (max_seqs,)),
        "output_indices": (np.int64, (max_seqs,)),
        "banned_rows": (np.int64, (max_banned,)),
        "banned_token_ids": (np.int64, (max_banned,)),
        "banned_until": (np.int64, (max_banned,)),
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
    within the limits. Nothing that is not in the sequence's own past or the step in flight is an input. However many
    drafts the step in flight accepted, what a row writes is in its own block table, and within the longest sequence.
    A drafter with a model has keys and values of its own in the same blocks, and knows all tokens before those that it
    is to compute; unless they come from the prefix cache, which does not know whether it does.
    """

    def __init__(self, limits: dict[str, Any], max_seq_len: int) -> None:
        self._limits = limits
        self._max_seq_len = max_seq_len
        self._block_size = int(limits["block_size"])
        self._width = 1 + int(limits["num_speculative_tokens"])
        self._histories = Histories()
        self._slots: dict[int, int] = {}
        self._draft_slots: dict[int, int] = {}  # what the drafter wrote there
        self._num_owners: Counter[int] = Counter()  # of each block in the tables of a step
        self._next_tokens = np.full((limits["max_num_seqs"], self._width), 77, np.int32)
        self._num_accepted = np.full(limits["max_num_seqs"], 77, np.int32)
        self._texts: dict[int, list[int]] = {}  # by slot, for a drafter that looks up what was there before
        max_blocks = -(-max_seq_len // self._block_size)
        sizes = (limits["max_num_batched_tokens"], limits["max_num_seqs"], max_blocks)
        self._arrays = make_arrays(*sizes, max_extra_logits=limits["max_num_extra_logits"])
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
        sampled_seq_ids = [row.seq_id for row in metadata if row.samples]
        num_drafts = dict.fromkeys(seq_ids, 0)
        num_rows = np.diff(self._arrays["sample_start_loc"][: batch.num_sampled + 1])
        num_drafts.update(zip(sampled_seq_ids, (num_rows - 1).tolist(), strict=True))
        in_flight = [0 if previous is None else previous.num_drafts(seq_id) for seq_id in seq_ids]
        seq_lens = self._arrays["seq_lens"][: batch.num_seqs]
        assert batch.max_seq_len == (seq_lens + in_flight).max()
        self._num_owners = Counter(self._arrays["block_tables"][: batch.num_seqs, : batch.max_num_blocks].flat)
        verified = {}
        for index, (seq_id, line) in enumerate(zip(seq_ids, rows, strict=True)):
            assert (self._arrays["advance_slots"][index] >= 0) == (in_flight[index] > 0)
            verified[seq_id] = self._write_row(index, line, num_drafts[seq_id], previous, batch.is_prefill)
        for index, (row, line) in enumerate(zip(metadata, rows, strict=True)):
            text = line.history + [max(0, draft) for draft in verified[row.seq_id]]
            assert (row.request_id, row.is_prefill) == (line.request_id, batch.is_prefill)
            assert row.samples == (row.seqlen_k + self._advance(index) == len(text))
            assert row.output_index + self._advance(index) == line.num_outputs
            assert not verified[row.seq_id] or not (line.is_beam or batch.is_prefill)
            if line.is_beam:
                assert not line.is_held
                assert previous is None or row.seq_id not in previous.seq_ids
            self._check_reads(index, line, text)
        self._check_prompt_logits(batch, seq_ids, rows)
        self._check_columns(batch, rows, sampled_seq_ids, lines)
        self._take_new_slots(batch)
        sampled = self._sample(batch, [(seq_id, lines[seq_id], verified[seq_id]) for seq_id in sampled_seq_ids])
        for each in sampled:
            self._compute_drafts(seq_ids.index(each.seq_id), lines[each.seq_id], each)
        return Launched(batch, seq_ids, sampled, fails)

    def receive_block(self, block: int, index: int, line: Line) -> None:
        """The content of block number `index` of the line's prompt comes from elsewhere; a drafter has not computed the
        prompt's last token.
        """
        contents = self._histories.of(line.salt, line.prompt)
        for offset, content in enumerate(contents[index * self._block_size : (index + 1) * self._block_size]):
            self._slots[self._slot(block, offset)] = content
            if index * self._block_size + offset < len(line.prompt) - 1:
                self._draft_slots[self._slot(block, offset)] = content

    def _check_limits(self, batch: SchedulerOutputs) -> None:
        assert 0 < batch.num_seqs <= self._limits["max_num_seqs"]
        assert batch.num_seqs <= batch.num_tokens <= self._limits["max_num_batched_tokens"]
        num_extra_logits = batch.num_sampled_rows - batch.num_sampled + batch.num_prompt_logits
        assert 0 <= num_extra_logits <= self._limits["max_num_extra_logits"]
        assert self._arrays["query_start_loc"][0] == 0
        assert self._arrays["query_start_loc"][batch.num_seqs] == batch.num_tokens
        lengths = np.diff(self._arrays["query_start_loc"][: batch.num_seqs + 1])
        assert batch.max_query_len == lengths.max()
        assert lengths.min() > 0

    def _copy_blocks(self, batch: SchedulerOutputs) -> None:
        for source, target in batch.block_copies:
            for slots in (self._slots, self._draft_slots):
                for offset in range(self._block_size):
                    slots.pop(self._slot(target, offset), None)
                    if self._slot(source, offset) in slots:
                        slots[self._slot(target, offset)] = slots[self._slot(source, offset)]

    def _slot(self, block: int, offset: int) -> int:
        return int(block) * self._block_size + offset

    def _own_slot(self, index: int, position: int) -> int:
        block = self._arrays["block_tables"][index, position // self._block_size]
        assert 1 <= block <= self._limits["num_blocks"]
        return self._slot(block, position % self._block_size)

    def _advance(self, index: int) -> int:
        slot = int(self._arrays["advance_slots"][index])
        return int(self._num_accepted[slot]) if slot >= 0 else 0

    def _write_row(
        self, index: int, line: Line, num_drafts: int, previous: Launched | None, is_prefill: bool
    ) -> list[int]:
        """Returns its drafts."""
        begin, end = (int(at) for at in self._arrays["query_start_loc"][index : index + 2])
        token_ids, sources = self._arrays["token_ids"], self._arrays["token_sources"]
        advance = self._advance(index)
        seq_len = int(self._arrays["seq_lens"][index]) + advance
        assert seq_len <= self._max_seq_len
        drafts = [int(self._next_tokens.flat[source]) for source in sources[end - num_drafts : end]]
        text = line.history[: seq_len - num_drafts] + [max(0, draft) for draft in drafts]
        contents = self._histories.of(line.salt, text)
        for token_index in range(begin, end):
            position = int(self._arrays["positions"][token_index]) + advance
            assert position == seq_len - (end - token_index)
            token, source = int(token_ids[token_index]), int(sources[token_index])
            if source >= 0:
                assert source % self._width > 0 or previous is not None, "an input from a step that is not in flight"
                token = max(0, int(self._next_tokens.flat[source]))
            assert token == text[position]
            slot = self._own_slot(index, position)
            assert self._num_owners[slot // self._block_size] == 1, "writes into a block that another one reads"
            assert advance > 0 or self._arrays["slot_mapping"][token_index] == slot
            self._slots[slot] = POISON if line.is_poisoned else contents[position]
            if is_prefill:
                self._draft_slots[slot] = contents[position]
        return drafts

    def _check_reads(self, index: int, line: Line, text: list[int]) -> None:
        seq_len = int(self._arrays["seq_lens"][index]) + self._advance(index)
        if line.is_poisoned:
            return
        read = [self._slots.get(self._own_slot(index, position)) for position in range(seq_len)]
        assert read == self._histories.of(line.salt, text[:seq_len])

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
        written = self._arrays["logits_indices"][batch.num_sampled_rows :][: batch.num_prompt_logits]
        assert written.tolist() == indices

    def _check_columns(
        self, batch: SchedulerOutputs, rows: list[Line], sampled_seq_ids: list[int], lines: dict[int, Line]
    ) -> None:
        assert batch.lora_ids.tolist() == [line.lora_id for line in rows]
        assert batch.any_lora == any(line.lora_id for line in rows)
        tracked = [(row, seq_id) for row, seq_id in enumerate(sampled_seq_ids) if lines[seq_id].is_tracked]
        assert list(zip(batch.tracked_rows.tolist(), batch.tracked_seq_ids.tolist(), strict=True)) == tracked

    def _take_new_slots(self, batch: SchedulerOutputs) -> None:
        assert self._width > 1 or batch.new_slots == []
        self._texts.update((slot, tokens.tolist()) for slot, tokens in batch.new_slots)

    def _sample(self, batch: SchedulerOutputs, rows: list[tuple[int, Line, list[int]]]) -> list[Sampled]:
        arrays = self._arrays
        assert batch.num_sampled == len(rows)
        assert arrays["sample_start_loc"][0] == 0
        assert arrays["sample_start_loc"][batch.num_sampled] == batch.num_sampled_rows
        slots = arrays["sample_slots"][: batch.num_sampled].tolist()
        assert len(set(slots)) == len(slots)
        # Whatever is sampled is a decode row where anything advances: so its place among all rows is the same.
        advances = [0 if batch.is_prefill else self._advance(index) for index in range(batch.num_sampled)]
        self._check_banned(batch, [line for _, line, _ in rows])
        sampled = []
        query_lens = batch.draft_query_lens.tolist()
        assert len(query_lens) == len(rows)
        for index, ((seq_id, line, drafts), slot, advance) in enumerate(zip(rows, slots, advances, strict=True)):
            assert int(arrays["seeds"][index]) % 2**64 == line.seed
            assert arrays["output_indices"][index] + advance == line.num_outputs
            start, end = arrays["sample_start_loc"][index : index + 2]
            positions = arrays["positions"][arrays["logits_indices"][start:end]] + advance
            assert positions.tolist() == list(range(len(line.history) - 1, len(line.history) + len(drafts)))
            output_index, tokens = line.num_outputs, self._verify(line, drafts)
            has_proposal = query_lens[index] > 0 or not self._limits["num_lookahead_tokens"]
            num_proposed = batch.max_num_proposed if has_proposal else 0
            proposed = draft_tokens(line.history + tokens, line, num_proposed)
            proposed += [NO_TOKEN] * (self._width - 1 - num_proposed)
            if not line.is_beam:
                assert self._width == 1 or self._texts[slot] == line.history
                line.history += tokens
                self._texts[slot] = list(line.history)
            self._next_tokens[slot] = [tokens[-1], *proposed]
            self._num_accepted[slot] = len(tokens) - 1
            sampled.append(Sampled(seq_id, output_index, drafts, tokens, proposed, query_lens[index]))
        return sampled

    def _compute_drafts(self, index: int, line: Line, sampled: Sampled) -> None:
        """The drafter's keys and values of the sequence's last tokens, and of its drafts, in the places that it has."""
        query_len = sampled.query_len
        if not query_len:
            return
        num_tokens = len(line.history)
        drafts = [max(0, draft) for draft in sampled.proposed[:-1]]  # nothing is computed from the last one
        contents = self._histories.of(line.salt, line.history + drafts)
        assert not line.is_beam
        assert 2 <= query_len <= num_tokens
        end = min(num_tokens - 1 + self._limits["num_lookahead_tokens"], self._max_seq_len)
        for position in range(num_tokens - query_len, end):
            slot = self._own_slot(index, position)
            # What was known before may be others' past too: there the same is written again.
            is_shared = self._num_owners[slot // self._block_size] > 1
            assert not is_shared or position < num_tokens - 1, "a drafter writes into a block that another one reads"
            self._draft_slots[slot] = contents[position]
        if not (self._limits["enable_prefix_caching"] or line.is_poisoned):
            known = range(min(num_tokens, self._max_seq_len))
            assert [self._draft_slots[self._own_slot(index, position)] for position in known] == contents[: len(known)]

    @staticmethod
    def _verify(line: Line, drafts: list[int]) -> list[int]:
        """The model's own tokens, up to and including the first that is not the draft in its place."""
        tokens: list[int] = []
        for draft in [*drafts, NO_TOKEN]:
            tokens.append(next_token(line.history + tokens, line.seed))
            if tokens[-1] != draft:
                break
        return tokens

    def _check_banned(self, batch: SchedulerOutputs, lines: list[Line]) -> None:
        """A row is told of what the device must not sample there; whether it still applies the device knows."""
        arrays = self._arrays
        expected, output_index_of = set(), {}
        for index, line in enumerate(lines):
            start, end = (int(at) for at in arrays["sample_start_loc"][index : index + 2])
            for row in range(start, end):
                output_index_of[row] = line.num_outputs + row - start
                if output_index_of[row] < line.min_tokens:
                    expected |= {(row, token) for token in line.end_tokens()}
        columns = (
            arrays[name][: batch.num_banned].tolist() for name in ("banned_rows", "banned_token_ids", "banned_until")
        )
        banned = {(row, token) for row, token, until in zip(*columns, strict=True) if output_index_of[row] < until}
        assert banned == expected
