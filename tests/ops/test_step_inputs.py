"""What the device completes of a step's arrays, against the same in plain Python."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from deepinfer_backend.ops.step_inputs import StepInputs, resolve_step_inputs, resolve_step_inputs_in_torch

BLOCK_SIZE = 4
NUM_SLOTS = 9
MAX_NUM_BLOCKS = 6

implementations = pytest.mark.parametrize("resolve", [resolve_step_inputs, resolve_step_inputs_in_torch])
Resolve = Callable[..., None]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def slot_at(block_table: list[int], position: int) -> int:
    return block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


@dataclasses.dataclass
class Row:
    """One sequence's part in a step, at the least advance."""

    begin: int
    token_ids: list[int]
    token_sources: list[int]
    advance_slot: int
    block_table: list[int]


def random_row(rng: random.Random, num_speculative_tokens: int, slot: int) -> Row:
    num_tokens = rng.randrange(0, 2 + num_speculative_tokens)
    sources = [
        rng.choice([-1, slot * (1 + num_speculative_tokens) + min(column, num_speculative_tokens)])
        for column in range(num_tokens)
    ]
    return Row(
        begin=rng.randrange(0, MAX_NUM_BLOCKS * BLOCK_SIZE - num_tokens + 1),
        token_ids=[rng.randrange(100) for _ in range(num_tokens)],
        token_sources=sources,
        advance_slot=rng.choice([-1, slot]),
        block_table=[rng.randrange(1, 50) for _ in range(MAX_NUM_BLOCKS)],
    )


def step_of(rows: list[Row]) -> StepInputs:
    positions = [row.begin + i for row in rows for i in range(len(row.token_ids))]
    slots = [slot_at(row.block_table, row.begin + i) for row in rows for i in range(len(row.token_ids))]
    # A part of wider tables, as the Worker's are.
    tables = torch.full((len(rows), MAX_NUM_BLOCKS + 3), -1, dtype=torch.int32)
    tables[:, :MAX_NUM_BLOCKS] = int32([block for row in rows for block in row.block_table]).view(-1, MAX_NUM_BLOCKS)
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.token_ids))
    return StepInputs(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids], dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        seq_lens=int32([row.begin + len(row.token_ids) for row in rows]),
        token_sources=int32([source for row in rows for source in row.token_sources]),
        advance_slots=int32([row.advance_slot for row in rows]),
        query_start_loc=int32(starts),
        block_tables=tables[:, :MAX_NUM_BLOCKS],
    )


def completed_by_definition(
    rows: list[Row], next_tokens: list[int], num_accepted: list[int], max_seq_len: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """token_ids, positions, slot_mapping, seq_lens."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    seq_lens: list[int] = []
    limit = min(max_seq_len, MAX_NUM_BLOCKS * BLOCK_SIZE)
    for row in rows:
        for token_id, source in zip(row.token_ids, row.token_sources, strict=True):
            token_ids.append(token_id if source < 0 else max(0, next_tokens[source]))
        end = row.begin + len(row.token_ids)
        if row.advance_slot < 0:
            positions += range(row.begin, end)
            slots += [slot_at(row.block_table, position) for position in range(row.begin, end)]
            seq_lens.append(end)
            continue
        advance = num_accepted[row.advance_slot]
        for position in range(row.begin + advance, end + advance):
            positions.append(min(position, limit - 1))
            slots.append(slot_at(row.block_table, position) if position < limit else 0)
        seq_lens.append(min(end + advance, limit))
    return token_ids, positions, slots, seq_lens


@implementations
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 5])
def test_tokens_and_places_come_from_the_step_before(resolve: Resolve, num_speculative_tokens: int) -> None:
    rng = random.Random(num_speculative_tokens)
    for _ in range(100):
        slots = rng.sample(range(NUM_SLOTS), rng.randrange(1, NUM_SLOTS + 1))
        rows = [random_row(rng, num_speculative_tokens, slot) for slot in slots]
        next_tokens = [rng.randrange(-1, 100) for _ in range(NUM_SLOTS * (1 + num_speculative_tokens))]
        num_accepted = [rng.randrange(num_speculative_tokens + 1) for _ in range(NUM_SLOTS)]
        # Below the tables' width every other time: then it is what ends sequences.
        max_seq_len = rng.choice([MAX_NUM_BLOCKS * BLOCK_SIZE - 3, 1000])
        step = step_of(rows)
        resolve(
            step,
            int32(next_tokens).view(NUM_SLOTS, -1),
            int32(num_accepted),
            block_size=BLOCK_SIZE,
            max_seq_len=max_seq_len,
        )
        results = (step.token_ids, step.positions, step.slot_mapping, step.seq_lens)
        expected = completed_by_definition(rows, next_tokens, num_accepted, max_seq_len)
        assert tuple(result.tolist() for result in results) == expected


@implementations
def test_what_ended_by_length_is_written_to_the_dummy_slot(resolve: Resolve) -> None:
    last = MAX_NUM_BLOCKS * BLOCK_SIZE - 1
    step = step_of([Row(last, [0], [2], 1, [7] * MAX_NUM_BLOCKS), Row(last - 1, [0], [4], 2, [8] * MAX_NUM_BLOCKS)])
    next_tokens = int32([0, 0, 11, 12, 13, 14]).view(3, 2)
    resolve(step, next_tokens, int32([0, 1, 1]), block_size=BLOCK_SIZE, max_seq_len=1000)
    assert step.token_ids.tolist() == [11, 13]
    assert step.positions.tolist() == [last, last]
    assert step.slot_mapping.tolist() == [0, 8 * BLOCK_SIZE + BLOCK_SIZE - 1]
    assert step.seq_lens.tolist() == [last + 1, last + 1]


def test_what_does_not_fit_is_refused_by_name() -> None:
    step = step_of([Row(0, [5, 6], [-1, 3], 1, [1] * MAX_NUM_BLOCKS)])
    next_tokens, num_accepted = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def resolve(step: StepInputs, block_size: int = BLOCK_SIZE) -> None:
        resolve_step_inputs(step, next_tokens, num_accepted, block_size=block_size, max_seq_len=99)

    with pytest.raises(ValueError, match=r"token_sources.1. is 4: must be below 4"):
        resolve(dataclasses.replace(step, token_sources=int32([-1, 4])))
    with pytest.raises(ValueError, match=r"advance_slots.0. is 2: must be below 2"):
        resolve(dataclasses.replace(step, advance_slots=int32([2])))
    with pytest.raises(ValueError, match=r"query_start_loc is 0 to 1: must be 0 to 2"):
        resolve(dataclasses.replace(step, query_start_loc=int32([0, 1])))
    with pytest.raises(ValueError, match=r"positions is .*must be contiguous Long .2."):
        resolve(dataclasses.replace(step, positions=step.positions.int()))
    with pytest.raises(ValueError, match=r"block_tables is .*must be Int .1, max_num_blocks."):
        resolve(dataclasses.replace(step, block_tables=step.block_tables.repeat(2, 1)))
    with pytest.raises(ValueError, match=r"block_size is 0: must be 1 or more"):
        resolve(step, block_size=0)
