"""Causal attention of a ragged batch over the paged KV cache: one entry, CPU and CUDA behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend.ops.kernels import kernels


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, in the layout of the device.

    On CUDA both are [num_blocks, block_size, num_kv_heads, dim]. On CPU, with p elements to 32 bits (float32 1,
    bfloat16 2, int8 4): keys [num_blocks, num_kv_heads, key_dim / p, block_size, p], values [num_blocks, num_kv_heads,
    block_size, value_dim]; int8 has scales [num_blocks, num_kv_heads, block_size] float32, the others None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What all layers of a step share.

    block_tables: [num_seqs, max_num_blocks] int32; seq_lens: [num_seqs] int32, keys of each sequence, this step's
    included; query_start_loc: [num_seqs + 1] int32; slot_mapping: [num_tokens] int64, block * block_size + offset of
    each token. key_ends: [num_tokens] int32, up to where in its sequence each token sees keys, itself included and
    never falling within a sequence; None: up to itself. On CPU alone.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    key_ends: torch.Tensor | None = None


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Stores the step's keys and values, then attends.

    query: [num_tokens, num_heads, key_dim], num_heads a multiple of num_kv_heads; key: [num_tokens, num_kv_heads,
    key_dim]; value: [num_tokens, num_kv_heads, value_dim]; window: keys that a query sees, itself included (None: all
    before it). Returns [num_tokens, num_heads, value_dim] in the query's dtype.
    """
    attend = _attend_cuda if query.device.type == "cuda" else _attend_cpu
    return attend(query, key, value, cache, step, scale, window)


def _attend_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    step: AttentionStep,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    num_heads = query.shape[1]
    rows = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1).float()
    tensors = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    kernels.write_kv_cache(rows, num_heads, *tensors, step.slot_mapping)
    output: torch.Tensor = kernels.paged_attention(
        rows[:, : num_heads * query.shape[2]].view(-1, num_heads, query.shape[2]),
        *tensors,
        step.block_tables,
        step.seq_lens,
        step.query_start_loc,
        scale,
        window or 0,
        step.key_ends,
    )
    return output.to(query.dtype)


def _attend_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerCache,
    step: AttentionStep,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert step.key_ends is None

    cache.keys.flatten(0, 1).index_copy_(0, step.slot_mapping, key)
    cache.values.flatten(0, 1).index_copy_(0, step.slot_mapping, value)
    result = varlen_attn(
        query,
        cache.keys,
        cache.values,
        step.query_start_loc,
        None,
        step.max_query_len,
        step.max_seq_len,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
        seqused_k=step.seq_lens,
        block_table=step.block_tables,
    )
    assert isinstance(result, torch.Tensor)
    return result
