"""A model's logits for whole prompts, through a paged cache that lasts for one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer_backend.models.interface import Model
from deepinfer_backend.ops.paged_attention import AttentionStep
from deepinfer_backend.worker.kv_cache import KVCache

BLOCK_SIZE = 16


@torch.inference_mode()
def packed_logits(model: Model, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [num_tokens, vocab_size] of each of these prompts, computed in one batch on CPU."""
    lens = [len(prompt) for prompt in prompts]
    max_blocks = -(-max(lens) // BLOCK_SIZE)
    block_tables = torch.arange(1, len(prompts) * max_blocks + 1, dtype=torch.int32).view(len(prompts), max_blocks)
    positions = [torch.arange(length) for length in lens]
    slots = [
        table[position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        for table, position in zip(block_tables, positions, strict=True)
    ]
    step = AttentionStep(
        block_tables=block_tables,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        query_start_loc=torch.from_numpy(np.cumsum([0, *lens], dtype=np.int32)),
        slot_mapping=torch.cat(slots),
        max_query_len=max(lens),
        max_seq_len=max(lens),
    )
    dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
    cache = KVCache(
        model.layers, num_blocks=block_tables.numel(), block_size=BLOCK_SIZE, dtype=dtype, device=torch.device("cpu")
    )
    token_ids = torch.tensor([token for prompt in prompts for token in prompt])
    model.use_caches(cache.layers)
    result = model.forward(token_ids, torch.cat(positions), step, torch.arange(len(token_ids)))
    return list(torch.split(result.logits, lens))
