"""Attention over a packed batch of whole sequences, straight from torch: a model runs without a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_backend.models.transformers_model import TransformersModel


class PackedAttention:
    """`models.interface.Attention` for sequences of these lengths that lie one after another."""

    def __init__(self, lens: Sequence[int]) -> None:
        self._starts = [0, *torch.tensor(lens).cumsum(0).tolist()]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        outputs = []
        for start, end in pairwise(self._starts):
            q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
            mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
            if window is not None:
                mask = mask.triu(1 - window)
            output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)


@torch.inference_mode()
def packed_logits(model: TransformersModel, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [num_tokens, vocab_size] of each of these prompts, computed in one batch."""
    lens = [len(prompt) for prompt in prompts]
    token_ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lens])
    logits = model.logits(token_ids, positions, PackedAttention(lens), torch.arange(len(token_ids)))
    return list(torch.split(logits, lens))
