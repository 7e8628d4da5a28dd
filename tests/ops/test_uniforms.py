"""Random numbers of rows of logits, against splitmix64 as it was published: a generator that goes step by step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from deepinfer_backend.ops.uniforms import SampledRows, uniforms_of, uniforms_of_in_torch

NUM_SLOTS = 5
implementations = pytest.mark.parametrize("uniforms_of", [uniforms_of, uniforms_of_in_torch])
UniformsOf = Callable[[SampledRows, torch.Tensor, torch.Tensor, torch.Tensor], None]


def splitmix64(state: int) -> Iterator[int]:
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def uniform_by_definition(seed: int, output_index: int) -> float:
    generator = splitmix64(next(splitmix64(seed)))
    for _ in range(output_index):
        next(generator)
    return (next(generator) >> 11) / 2**53


def sampled_rows(seeds: list[int], output_indices: list[int], advance_slots: list[int], nums: list[int]) -> SampledRows:
    return SampledRows(
        seeds=torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)),
        output_indices=torch.tensor(output_indices, dtype=torch.int64),
        advance_slots=torch.tensor(advance_slots, dtype=torch.int32),
        sample_start_loc=torch.tensor([0, *np.cumsum(nums)], dtype=torch.int32),
    )


def test_the_oracle_gives_the_published_numbers() -> None:
    generator = splitmix64(1234567)
    assert [next(generator) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@implementations
def test_numbers_are_those_of_the_true_output_indices(uniforms_of: UniformsOf) -> None:
    rng = random.Random(0)
    edges = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
    for _ in range(50):
        nums = [rng.randrange(1, 7) for _ in range(rng.randrange(1, 9))]
        seeds = [rng.choice([*edges, rng.randrange(2**64)]) for _ in nums]
        first = [rng.randrange(200) for _ in nums]
        slots = [rng.randrange(-1, NUM_SLOTS) for _ in nums]
        num_accepted = [rng.randrange(6) for _ in range(NUM_SLOTS)]
        uniforms = torch.empty(sum(nums), dtype=torch.float64)
        indices = torch.empty(sum(nums), dtype=torch.int64)
        rows = sampled_rows(seeds, first, slots, nums)
        uniforms_of(rows, torch.tensor(num_accepted, dtype=torch.int32), uniforms, indices)
        expected = [
            (seed, index + (num_accepted[slot] if slot >= 0 else 0) + i)
            for seed, index, slot, num in zip(seeds, first, slots, nums, strict=True)
            for i in range(num)
        ]
        assert indices.tolist() == [index for _, index in expected]
        assert uniforms.tolist() == [uniform_by_definition(seed, index) for seed, index in expected]


def test_what_does_not_fit_is_refused_by_name() -> None:
    rows = sampled_rows([1, 2], [0, 0], [-1, 0], [1, 2])
    num_accepted, indices = torch.zeros(1, dtype=torch.int32), torch.empty(3, dtype=torch.int64)
    uniforms = torch.empty(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"advance_slots.1. is 1: must be below 1"):
        uniforms_of(sampled_rows([1, 2], [0, 0], [-1, 1], [1, 2]), num_accepted, uniforms, indices)
    with pytest.raises(ValueError, match=r"sample_start_loc is 0 to 2: must be 0 to 3"):
        uniforms_of(sampled_rows([1, 2], [0, 0], [-1, 0], [1, 1]), num_accepted, uniforms, indices)
    with pytest.raises(ValueError, match=r"sample_start_loc gives sequence 0 0 rows: must be 1 to 3"):
        uniforms_of(sampled_rows([1, 2], [0, 0], [-1, 0], [0, 3]), num_accepted, uniforms, indices)
    with pytest.raises(ValueError, match=r"seeds is .*must be contiguous Long .2."):
        uniforms_of(dataclasses.replace(rows, seeds=rows.seeds.int()), num_accepted, uniforms, indices)
    with pytest.raises(ValueError, match=r"uniforms is .*must be contiguous Double .3."):
        uniforms_of(rows, num_accepted, uniforms.float(), indices)
