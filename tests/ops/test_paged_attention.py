"""Paged attention equals plain attention over each sequence's own keys."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from deepinfer_backend.ops.paged_attention import paged_attention, plan_attention

BLOCK_SIZE = 4
KEY_DIM, VALUE_DIM = 16, 8


def plain_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """One sequence, straight from the definition: query [q, heads, dim], keys and values [k, kv_heads, dim]."""
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    output = torch.empty(num_queries, num_heads, values.shape[2])
    for row in range(num_queries):
        last = num_keys - num_queries + row
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = keys[first : last + 1, kv_head] @ query[row, head] * scale
            output[row, head] = scores.softmax(0) @ values[first : last + 1, kv_head]
    return output


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    "lens",  # (tokens of this step, keys with them) of each sequence
    [
        [(1, 1)],
        [(1, 9), (1, 1), (1, 33), (1, 17)],  # decode
        [(7, 7), (1, 1), (5, 5), (30, 30)],  # prefill
        [(3, 11), (1, 7), (8, 8), (6, 31), (1, 40)],  # chunks and decodes
    ],
)
def test_equals_plain_attention_over_each_sequence(
    lens: list[tuple[int, int]], num_kv_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    num_heads = 6
    tables, next_block = [], 1
    for _, num_keys in lens:
        num_blocks = -(-num_keys // BLOCK_SIZE)
        tables.append(list(range(next_block, next_block + num_blocks)))
        next_block += num_blocks
    shuffled = torch.randperm(next_block - 1) + 1
    max_blocks = max(map(len, tables))
    block_tables = torch.zeros(len(lens), max_blocks, dtype=torch.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = shuffled[torch.tensor(table) - 1]
    key_cache = torch.randn(next_block, BLOCK_SIZE, num_kv_heads, KEY_DIM)
    value_cache = torch.randn(next_block, BLOCK_SIZE, num_kv_heads, VALUE_DIM)
    starts = np.cumsum([0, *(num_queries for num_queries, _ in lens)]).astype(np.int32)
    seq_lens = np.array([num_keys for _, num_keys in lens], dtype=np.int32)
    query = torch.randn(int(starts[-1]), num_heads, KEY_DIM)

    plan = plan_attention(
        block_tables=block_tables,
        seq_lens=torch.from_numpy(seq_lens),
        query_start_loc=torch.from_numpy(starts),
        host_seq_lens=seq_lens,
        host_query_start_loc=starts,
        block_size=BLOCK_SIZE,
    )
    output = paged_attention(query, key_cache, value_cache, plan, scale=0.3, window=window)

    for row, ((start, end), num_keys) in enumerate(zip(pairwise(starts), seq_lens, strict=True)):
        keys = key_cache[block_tables[row]].flatten(0, 1)[:num_keys]
        values = value_cache[block_tables[row]].flatten(0, 1)[:num_keys]
        expected = plain_attention(query[start:end], keys, values, 0.3, window)
        torch.testing.assert_close(output[start:end], expected, atol=2e-6, rtol=1e-5)
