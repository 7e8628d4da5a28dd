"""Packed batch → logits: the device's part of a forward."""

from __future__ import annotations

import torch

from deepinfer_backend._core import SchedulerOutputs
from deepinfer_backend.models.interface import ForwardResult, Model
from deepinfer_backend.models.lora import LoraStep
from deepinfer_backend.ops.paged_attention import AttentionStep
from deepinfer_backend.worker.kv_cache import KVCache
from deepinfer_backend.worker.step_buffers import StepBuffers


class ModelRunner:
    """Runs a model over the paged cache. All its calls happen on the device's stream."""

    def __init__(self, model: Model, kv_cache: KVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache

    def forward(
        self,
        batch: SchedulerOutputs,
        buffers: StepBuffers,
        block_copies: torch.Tensor | None,
        inflight_tokens: torch.Tensor | None,
        lora: LoraStep | None,
    ) -> ForwardResult | None:
        """What the rows that sample and the prompt tokens that want logits give; None when there is neither.

        inflight_tokens: [num_rows] int32, what the previous step sampled, as the device knows it; the inputs that the
        host has not seen yet come from there.
        """
        if block_copies is not None:
            self._kv_cache.copy_blocks(block_copies)
        step = buffers.upload()
        num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
        token_ids = step.token_ids[:num_tokens]
        if inflight_tokens is not None:
            rows = step.inflight_rows[:num_tokens]
            # A row without a token (NO_TOKEN) has ended, and what is computed for it is dropped.
            token_ids = torch.where(rows >= 0, inflight_tokens[rows.clamp(min=0)].clamp(min=0), token_ids)
        attention = AttentionStep(
            block_tables=step.block_tables[:num_seqs, : batch.max_num_blocks],
            seq_lens=step.seq_lens[:num_seqs],
            query_start_loc=step.query_start_loc[: num_seqs + 1],
            slot_mapping=step.slot_mapping[:num_tokens],
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        num_logits = batch.num_sampled + batch.num_prompt_logits
        self._model.lora.set_step(lora)
        result = self._model.forward(
            token_ids.long(),
            step.positions[:num_tokens],
            attention,
            self._kv_cache.layers,
            step.logits_indices[: max(1, num_logits)],
        )
        return result if num_logits else None
