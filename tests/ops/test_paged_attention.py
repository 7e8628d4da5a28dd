"""Paged attention equals plain attention in float64 over what the cache can hold of each sequence's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from deepinfer_backend.models.interface import LayerShape
from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.ops.paged_attention import AttentionStep, LayerCache, paged_attention
from deepinfer_backend.worker.kv_cache import KVCache

Lens = Sequence[tuple[int, int]]
"""Tokens of the step, and keys with them, of each sequence."""

SINGLE: Lens = [(1, 1)]
DECODE: Lens = [(1, 9), (1, 1), (1, 33), (1, 130), (1, 64)]
PREFILL: Lens = [(7, 7), (1, 1), (5, 5), (140, 140)]
CHUNKS: Lens = [(3, 11), (1, 7), (8, 8), (70, 200), (1, 40)]
SPANS: Lens = [(1, 1300), (2, 513), (1, 512), (4, 1027)]
CACHE_DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def as_stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of `dtype` keeps of rows [..., dim], in float64."""
    if dtype == torch.int8:
        scales = rows.abs().amax(-1, keepdim=True) / 127
        return (rows / scales).round().double() * scales.double()
    return rows.to(dtype).double()


def plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    key_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence, straight from the definition: query [q, heads, dim], keys and values [k, kv_heads, dim]."""
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * scale
    positions = torch.arange(num_keys - num_queries, num_keys)[:, None]
    is_hidden = torch.arange(num_keys) > positions
    if key_ends is not None:
        is_hidden = torch.arange(num_keys) >= key_ends[:, None]
    if window is not None:
        is_hidden |= torch.arange(num_keys) <= positions - window
    weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


class Sequences:
    """Random sequences, of which all tokens but this step's are in the cache already; blocks are in random order."""

    def __init__(
        self,
        lens: Lens,
        *,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        key_dim: int = 16,
        value_dim: int = 8,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        wholes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """wholes: in every sequence the keys [begin, end) that see each other, if all are the step's or earlier."""
        generator = torch.Generator().manual_seed(seed)

        def random(num_tokens: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn(num_tokens, heads, dim, generator=generator)

        self.lens = lens
        self.scale = 1.3 * key_dim**-0.5
        self.keys = [random(num_keys, num_kv_heads, key_dim) for _, num_keys in lens]
        self.values = [random(num_keys, num_kv_heads, value_dim) for _, num_keys in lens]
        self.queries = [random(num_queries, num_heads, key_dim) for num_queries, _ in lens]
        self.dtype = dtype
        self.key_ends = [_key_ends(num_queries, num_keys, wholes) for num_queries, num_keys in lens]
        self.has_wholes = bool(wholes)
        num_blocks = [-(-num_keys // block_size) for _, num_keys in lens]
        blocks = torch.randperm(sum(num_blocks), generator=generator).int() + 1
        self.tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32)
        for table, own in zip(self.tables, torch.split(blocks, num_blocks), strict=True):
            table[: len(own)] = own
        shape = LayerShape(num_kv_heads, key_dim, value_dim)
        device = torch.device("cpu")
        owner = KVCache([shape], num_blocks=sum(num_blocks), block_size=block_size, dtype=dtype, device=device)
        self.cache: LayerCache = owner.layers[0]
        for tensor in (self.cache.keys, self.cache.values):  # what no sequence wrote must not matter
            tensor.fill_(torch.nan if tensor.is_floating_point() else 127)
        self.slots = [
            table.repeat_interleave(block_size)[:num_keys] * block_size + torch.arange(num_keys) % block_size
            for table, (_, num_keys) in zip(self.tables, lens, strict=True)
        ]
        before = [num_keys - num_queries for num_queries, num_keys in lens]
        earlier = [torch.cat([x[:n] for x, n in zip(xs, before, strict=True)]) for xs in (self.keys, self.values)]
        rows = torch.cat([tensor.flatten(1) for tensor in earlier], 1)
        slots = torch.cat([x[:n] for x, n in zip(self.slots, before, strict=True)])
        cache = self.cache
        kernels.write_kv_cache(rows, 0, cache.keys, cache.values, cache.key_scales, cache.value_scales, slots)

    def attend(self, window: int | None = None, *, rows: Sequence[int] | None = None) -> list[torch.Tensor]:
        """The result of each sequence; rows: which of them are in the batch, in which order."""
        chosen = range(len(self.lens)) if rows is None else rows
        lens = [self.lens[row] for row in chosen]

        def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([tensors[row][-self.lens[row][0] :] for row in chosen])

        step = AttentionStep(
            block_tables=self.tables[list(chosen)],
            seq_lens=torch.tensor([num_keys for _, num_keys in lens], dtype=torch.int32),
            query_start_loc=torch.from_numpy(np.cumsum([0, *(queries for queries, _ in lens)], dtype=np.int32)),
            slot_mapping=packed(self.slots),
            max_query_len=max(queries for queries, _ in lens),
            max_seq_len=max(num_keys for _, num_keys in lens),
            key_ends=torch.cat([self.key_ends[row] for row in chosen]) if self.has_wholes else None,
        )
        query, key, value = packed(self.queries), packed(self.keys), packed(self.values)
        output = paged_attention(query, key, value, self.cache, step, scale=self.scale, window=window)
        return list(torch.split(output, [queries for queries, _ in lens]))

    def expected(self, window: int | None = None) -> list[torch.Tensor]:
        return [
            plain_attention(
                query.double(), as_stored(keys, self.dtype), as_stored(values, self.dtype), self.scale, window, key_ends
            )
            for query, keys, values, key_ends in zip(self.queries, self.keys, self.values, self.key_ends, strict=True)
        ]

    def check(self, window: int | None = None) -> None:
        # A value that lies between two steps of int8 may be rounded to the other one.
        atol = 2e-4 if self.dtype == torch.int8 else 3e-6
        for actual, expected in zip(self.attend(window), self.expected(window), strict=True):
            torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=1e-5)


def _key_ends(num_queries: int, num_keys: int, wholes: Sequence[tuple[int, int]]) -> torch.Tensor:
    ends = torch.arange(1, num_keys + 1, dtype=torch.int32)
    for begin, end in wholes:
        if end <= num_keys:
            ends[begin:end] = end
    return ends[num_keys - num_queries :]


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("lens", [PREFILL, CHUNKS, SPANS], ids=["prefill", "chunks", "spans"])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_tokens_of_a_whole_see_each_other(isa: str, dtype: torch.dtype, lens: Lens, window: int | None) -> None:
    Sequences(lens, dtype=dtype, wholes=[(0, 3), (4, 5), (10, 75), (120, 140), (1020, 1027)]).check(window)


@pytest.mark.parametrize("key_ends", [[5, 6, 7, 8], [3, 2, 3, 4], [1, 2, 3]])
def test_key_ends_that_cannot_be_are_refused(key_ends: list[int]) -> None:
    sequences = Sequences([(4, 4)], wholes=[(0, 2)])
    sequences.key_ends = [torch.tensor(key_ends, dtype=torch.int32)]
    with pytest.raises(ValueError, match="key_ends"):
        sequences.attend()


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(
    "lens", [SINGLE, DECODE, PREFILL, CHUNKS, SPANS], ids=["single", "decode", "prefill", "chunks", "spans"]
)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_equals_plain_attention_over_each_sequence(
    isa: str, dtype: torch.dtype, lens: Lens, window: int | None
) -> None:
    Sequences(lens, dtype=dtype).check(window)


@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 12, 16, 32, 100, 256, 1024])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_blocks_have_any_size(isa: str, dtype: torch.dtype, block_size: int) -> None:
    Sequences([(1, 130), (5, 9), (40, 77), (1, 600)], dtype=dtype, block_size=block_size).check()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 6), (5, 1), (9, 3), (14, 2), (100, 1)])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_heads_share_keys_in_groups_of_any_size(
    isa: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> None:
    Sequences([(1, 70), (30, 41), (1, 515)], dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads).check()


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(4, 4), (20, 12), (64, 64), (80, 80), (128, 96), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_heads_have_any_size(isa: str, dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    Sequences([(1, 70), (30, 41), (1, 9)], dtype=dtype, key_dim=key_dim, value_dim=value_dim).check()


def test_a_result_does_not_depend_on_the_batch_or_the_threads(isa: str) -> None:
    lens = [*DECODE, *CHUNKS, *SPANS]
    together = Sequences(lens).attend()
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            sequences = Sequences(lens)
            for row in reversed(range(len(lens))):
                assert torch.equal(sequences.attend(rows=[row])[0], together[row])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("query_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_queries_of_any_float_type_get_their_own_type_back(query_dtype: torch.dtype) -> None:
    sequences = Sequences(CHUNKS)
    expected = sequences.attend()
    for name in ("queries", "keys", "values"):
        setattr(sequences, name, [tensor.to(query_dtype) for tensor in getattr(sequences, name)])
    for actual, reference in zip(sequences.attend(), expected, strict=True):
        assert actual.dtype == query_dtype
        torch.testing.assert_close(actual.float(), reference, atol=2e-2, rtol=2e-2)


def test_one_sequences_nan_stays_its_own() -> None:
    sequences = Sequences([(1, 20), (4, 30), (1, 600)])
    expected = sequences.attend()
    sequences.queries[1][:] = torch.nan
    first, second, third = sequences.attend()
    assert second.isnan().all()
    assert torch.equal(first, expected[0]) and torch.equal(third, expected[2])
