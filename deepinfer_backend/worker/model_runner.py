"""Packed batch → logits: the device's part of a forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_backend._core import SchedulerOutputs
from deepinfer_backend.models.lora import LoraStep
from deepinfer_backend.models.transformers_model import TransformersModel
from deepinfer_backend.ops.paged_attention import AttentionPlan, paged_attention, plan_attention
from deepinfer_backend.worker.kv_cache import KVCache
from deepinfer_backend.worker.step_buffers import StepBuffers


class PagedAttention:
    """One step's attention (`models.interface.Attention`): into the paged cache, then over it."""

    def __init__(self, kv_cache: KVCache, slot_mapping: torch.Tensor, plan: AttentionPlan) -> None:
        self._kv_cache = kv_cache
        self._slot_mapping = slot_mapping
        self._plan = plan

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        cache = self._kv_cache
        cache.write(layer, key, value, self._slot_mapping)
        return paged_attention(query, cache.keys[layer], cache.values[layer], self._plan, scale=scale, window=window)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """logits: [num_sampled + num_prompt_logits, vocab_size]; hidden_states: [as many, hidden_size], the same rows'."""

    logits: torch.Tensor
    hidden_states: torch.Tensor


class ModelRunner:
    """Runs a model over the paged cache. All its calls happen on the device's stream."""

    def __init__(self, model: TransformersModel, kv_cache: KVCache) -> None:
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
        plan = plan_attention(
            block_tables=step.block_tables[:num_seqs, : batch.max_num_blocks],
            seq_lens=step.seq_lens[:num_seqs],
            query_start_loc=step.query_start_loc[: num_seqs + 1],
            host_seq_lens=buffers.host.seq_lens[:num_seqs].numpy(),
            host_query_start_loc=buffers.host.query_start_loc[: num_seqs + 1].numpy(),
            block_size=self._kv_cache.block_size,
        )
        num_logits = batch.num_sampled + batch.num_prompt_logits
        self._model.lora.set_step(lora)
        logits = self._model.logits(
            token_ids.long(),
            step.positions[:num_tokens],
            PagedAttention(self._kv_cache, step.slot_mapping[:num_tokens], plan),
            step.logits_indices[: max(1, num_logits)],
        )
        return ForwardResult(logits, self._model.last_hidden_states()) if num_logits else None
