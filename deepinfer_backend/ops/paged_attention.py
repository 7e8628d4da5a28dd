"""Causal attention of a ragged batch over the paged KV cache: one entry, CUDA and CPU behind it.

A step plans once (`AttentionPlan`), then every layer calls `paged_attention` with the plan. Keys and values of the
step's own tokens are in the cache already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray


@dataclass(slots=True)
class AttentionPlan:
    """What all layers of a step share.

    block_tables: [num_seqs, max_num_blocks] int32; seq_lens: [num_seqs] int32, keys of each sequence, this step's
    included; query_start_loc: [num_seqs + 1] int32. The host's copies of the last two are for planning on CPU.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    groups: list[_Group] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    """Sequences of similar size, padded to one rectangle.

    token_rows: [num_seqs, num_queries] token of each query, padded with the sequence's last one. query_positions:
    [num_seqs, num_queries]. is_fresh: the step's tokens are all the keys there are, so plain causal masking holds.
    """

    block_tables: torch.Tensor  # [num_seqs, num_blocks]
    num_keys: int
    token_rows: torch.Tensor
    query_positions: torch.Tensor
    is_valid_query: torch.Tensor  # [num_seqs, num_queries]
    is_fresh: bool
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """[num_seqs, 1, num_queries, num_keys], true where a query sees a key; made once per window and step."""
        if window not in self.masks:
            key_positions = torch.arange(self.num_keys)
            queries = self.query_positions[:, :, None]
            mask = key_positions <= queries
            if window is not None:
                mask &= key_positions > queries - window
            self.masks[window] = mask[:, None]
        return self.masks[window]


def plan_attention(
    *,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    host_seq_lens: NDArray[np.int32],
    host_query_start_loc: NDArray[np.int32],
    block_size: int,
) -> AttentionPlan:
    """Prepares a step. On CPU, sequences whose query and key counts round up to the same powers of two form a group,
    so that padding at most doubles either side and the number of calls does not grow with the batch.
    """
    query_lens = np.diff(host_query_start_loc)
    plan = AttentionPlan(block_tables, seq_lens, query_start_loc, int(query_lens.max()), int(host_seq_lens.max()))
    if block_tables.device.type == "cpu":
        size_class = np.stack([np.ceil(np.log2(query_lens)), np.ceil(np.log2(host_seq_lens))], axis=1)
        for size in np.unique(size_class, axis=0):
            members = np.flatnonzero((size_class == size).all(axis=1))
            plan.groups.append(
                _plan_group(members, query_lens, host_seq_lens, host_query_start_loc, block_tables, block_size)
            )
    return plan


def _plan_group(
    members: NDArray[np.intp],
    query_lens: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    query_start_loc: NDArray[np.int32],
    block_tables: torch.Tensor,
    block_size: int,
) -> _Group:
    lens = query_lens[members][:, None]
    keys = seq_lens[members][:, None]
    offsets = np.arange(lens.max())[None, :]
    is_valid = offsets < lens
    offsets = np.minimum(offsets, lens - 1)
    num_keys = int(keys.max())
    tables = block_tables[torch.from_numpy(members), : -(-num_keys // block_size)]
    return _Group(
        block_tables=tables,
        num_keys=num_keys,
        token_rows=torch.from_numpy(query_start_loc[members][:, None] + offsets).long(),
        query_positions=torch.from_numpy(keys - lens + offsets),
        is_valid_query=torch.from_numpy(is_valid),
        is_fresh=bool((lens == keys).all()),
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of query [num_tokens, num_heads, key_dim] → [num_tokens, num_heads, value_dim].

    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, dim]; num_heads is a multiple of num_kv_heads.
    window: a query sees that many keys, itself included; None sees all before it.
    """
    if query.device.type == "cuda":
        return _paged_attention_cuda(query, key_cache, value_cache, plan, scale=scale, window=window)
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    for group in plan.groups:
        result = _attend_group(query, key_cache, value_cache, group, scale=scale, window=window)
        output[group.token_rows[group.is_valid_query]] = result[group.is_valid_query]
    return output


def _attend_group(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    group: _Group,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """→ [num_seqs, num_queries, num_heads, value_dim]"""
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    keys = key_cache[group.block_tables].flatten(1, 2)[:, : group.num_keys].transpose(1, 2)
    values = value_cache[group.block_tables].flatten(1, 2)[:, : group.num_keys].transpose(1, 2)
    queries = query[group.token_rows].transpose(1, 2)  # [num_seqs, num_heads, num_queries, key_dim]
    num_seqs, _, num_queries, _ = queries.shape
    if num_queries == 1:
        # One query a sequence: the heads that share a key head become the queries of that head, nothing is repeated.
        grouped = queries.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, -1)
        result = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask(window), scale=scale)
        return result.reshape(num_seqs, 1, num_heads, -1)
    is_plain_causal = group.is_fresh and (window is None or window >= group.num_keys)
    result = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if is_plain_causal else group.mask(window),
        is_causal=is_plain_causal,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return result.transpose(1, 2)


def _paged_attention_cuda(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(
        query,
        key_cache,
        value_cache,
        plan.query_start_loc,
        None,
        plan.max_query_len,
        plan.max_seq_len,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key_cache.shape[2],
        seqused_k=plan.seq_lens,
        block_table=plan.block_tables,
    )
    assert isinstance(result, torch.Tensor)
    return result
