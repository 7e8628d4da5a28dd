"""What `write_kv_cache` does to heads before they are stored equals transformers' own norm and rotary embedding."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from deepinfer_backend.models.interface import LayerShape
from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.worker.kv_cache import KVCache

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 5, 4


def normalized(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = Qwen3RMSNorm(heads.shape[-1], eps=1e-5)
    norm.weight.data = weight
    result: torch.Tensor = norm(heads)
    return result


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("key_dim", "rotary_dim"), [(64, 64), (128, 32), (20, 12), (8, 0)])
def test_heads_are_normalized_turned_and_stored(
    isa: str, key_dim: int, rotary_dim: int, has_norms: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    value_dim, num_tokens = 12, 9
    query = torch.randn(num_tokens, NUM_HEADS, key_dim)
    key = torch.randn(num_tokens, NUM_KV_HEADS, key_dim)
    value = torch.randn(num_tokens, NUM_KV_HEADS, value_dim)
    angles = torch.randn(num_tokens, rotary_dim // 2) * 10
    query_norm, key_norm = torch.rand(2, key_dim) + 0.5
    slots = torch.randperm((NUM_BLOCKS + 1) * BLOCK_SIZE)[:num_tokens]
    shape = LayerShape(NUM_KV_HEADS, key_dim, value_dim)
    device = torch.device("cpu")
    cache = KVCache([shape], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=device).layers[0]
    rows = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], 1)

    kernels.write_kv_cache(
        rows,
        NUM_HEADS,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        slots,
        cos=angles.cos() if rotary_dim else None,
        sin=angles.sin() if rotary_dim else None,
        query_norm=query_norm if has_norms else None,
        key_norm=key_norm if has_norms else None,
        eps=1e-5,
    )

    if has_norms:
        query, key = normalized(query, query_norm), normalized(key, key_norm)
    both = torch.cat([angles, angles], -1)[None]
    turned = apply_rotary_pos_emb(
        query[None, ..., :rotary_dim], key[None, ..., :rotary_dim], both.cos(), both.sin(), unsqueeze_dim=2
    )
    query, key = (
        torch.cat([part[0], whole[..., rotary_dim:]], -1) for part, whole in zip(turned, (query, key), strict=True)
    )
    torch.testing.assert_close(rows[:, : NUM_HEADS * key_dim].view_as(query), query, atol=2e-6, rtol=2e-6)

    # [num_blocks, block_size, num_kv_heads, dim] of what is stored
    keys = cache.keys.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[slots].float()
    values = cache.values.transpose(1, 2).flatten(0, 1)[slots].float()
    for stored, expected, scales in ((keys, key, cache.key_scales), (values, value, cache.value_scales)):
        if scales is None:
            rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6
            torch.testing.assert_close(stored, expected, atol=2e-6, rtol=rounding)
            continue
        scale = scales.transpose(1, 2).flatten(0, 1)[slots][..., None]
        torch.testing.assert_close(scale, expected.abs().amax(-1, keepdim=True) / 127, atol=0, rtol=2e-6)
        assert ((stored * scale - expected).abs() <= 0.501 * scale).all()


def test_a_row_of_zeros_is_stored_as_zeros(isa: str) -> None:
    device = torch.device("cpu")
    cache = KVCache([LayerShape(1, 8, 8)], num_blocks=1, block_size=4, dtype=torch.int8, device=device).layers[0]
    arguments = (cache.keys, cache.values, cache.key_scales, cache.value_scales, torch.tensor([5]))
    kernels.write_kv_cache(torch.zeros(1, 16), 0, *arguments)
    assert cache.key_scales is not None
    assert not cache.keys.any() and not cache.key_scales.any()
