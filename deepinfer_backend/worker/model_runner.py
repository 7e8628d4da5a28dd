"""Packed batch → logits: the host prepares, the device runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepinfer_backend._core import SchedulerOutputs
from deepinfer_backend.errors import EngineDeadError
from deepinfer_backend.models.interface import ForwardResult, MediaInputs, Model
from deepinfer_backend.models.lora import LoraStep
from deepinfer_backend.ops.paged_attention import AttentionStep
from deepinfer_backend.ops.rank_world import TensorGroup
from deepinfer_backend.ops.step_inputs import StepInputs, resolve_step_inputs
from deepinfer_backend.worker.kv_cache import KVCache
from deepinfer_backend.worker.media_embeddings import MediaEmbeddings
from deepinfer_backend.worker.media_state import MediaState, MediaStep
from deepinfer_backend.worker.shared_step import SharedStep, send_step
from deepinfer_backend.worker.slot_state import SlotState
from deepinfer_backend.worker.step_buffers import StepBuffers, StepTensors


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """What a forward runs on. Made on the host beforehand: between two forwards the device has nothing to prepare.

    block_copies: [num_copies, 2] int32 (source, target), or None; lora: the adapters of the step's tokens; media: what
    of them stands for images and videos.
    """

    buffers: StepBuffers
    tensors: StepTensors
    step: StepInputs
    attention: AttentionStep
    has_logits: bool
    wants_token_states: bool
    block_copies: torch.Tensor | None
    lora: LoraStep | None
    media: MediaStep | None


class ModelRunner:
    """Runs a model over the paged cache: `forward` on the device's stream."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        slots: SlotState,
        ranks: TensorGroup | None,
        media: MediaState,
        embeddings: MediaEmbeddings | None,
        *,
        max_seq_len: int,
    ) -> None:
        """ranks: those with which this one, their leader, computes the model. embeddings: of media; None: the model
        takes none. max_seq_len: the most tokens of a sequence.
        """
        self._media = media
        self._embeddings = embeddings
        self._ranks = ranks
        self._model = model
        self._kv_cache = kv_cache
        self._slots = slots
        self.max_seq_len = max_seq_len
        model.use_caches(kv_cache.layers[: len(model.layers)])

    def prepare(
        self, batch: SchedulerOutputs, buffers: StepBuffers, lora: LoraStep | None, *, wants_token_states: bool
    ) -> ForwardInputs:
        """Of a batch that was written into the buffers; on the host, without waiting for the device."""
        tensors = buffers.views(batch)
        block_copies = batch.block_copies
        media_rows = batch.media_rows
        media = self._media.step(media_rows, buffers.positions[: batch.num_tokens]) if len(media_rows) else None
        return ForwardInputs(
            buffers,
            tensors,
            _step_inputs(tensors),
            _attention(tensors, batch.max_query_len, batch.max_seq_len),
            has_logits=batch.num_sampled + batch.num_prompt_logits > 0,
            wants_token_states=wants_token_states,
            block_copies=torch.from_numpy(block_copies.copy()) if len(block_copies) else None,
            lora=lora,
            media=media,
        )

    def prepare_placeholder(self, buffers: StepBuffers) -> ForwardInputs:
        """Of a step that computes nothing for anybody."""
        tensors = buffers.placeholder()
        return ForwardInputs(
            buffers,
            tensors,
            _step_inputs(tensors),
            _attention(tensors, max_query_len=1, max_seq_len=1),
            has_logits=False,
            wants_token_states=False,
            block_copies=None,
            lora=None,
            media=None,
        )

    def forward(self, inputs: ForwardInputs) -> ForwardResult:
        """What the rows that sample and the prompt tokens that want logits give; of one token when there is neither.

        The inputs that the host has not seen yet come from the slots.
        """
        if inputs.block_copies is not None:
            self._kv_cache.copy_blocks(inputs.block_copies)
        inputs.buffers.upload()
        tensors = inputs.tensors
        resolve_step_inputs(
            inputs.step,
            self._slots.next_tokens,
            self._slots.num_accepted,
            block_size=self._kv_cache.block_size,
            max_seq_len=self.max_seq_len,
        )
        attention, media = inputs.attention, None
        if inputs.media is not None:
            media = self._media_inputs(inputs.media)
            if inputs.media.key_ends is not None:
                attention = replace(attention, key_ends=inputs.media.key_ends)
        if self._ranks is not None:
            shared = SharedStep(
                tensors.token_ids,
                tensors.positions,
                attention,
                tensors.logits_indices,
                inputs.block_copies,
                inputs.wants_token_states,
                media,
            )
            send_step(self._ranks, shared)
        self._model.lora.set_step(inputs.lora)
        try:
            return self._model.forward(
                tensors.token_ids,
                tensors.positions,
                attention,
                tensors.logits_indices,
                wants_token_states=inputs.wants_token_states,
                media=media,
            )
        except RuntimeError as error:
            if self._ranks is None:
                raise
            raise EngineDeadError("the tensor-parallel ranks are not in the same step any more") from error

    def _media_inputs(self, step: MediaStep) -> MediaInputs:
        assert self._embeddings is not None
        device = self._model.device
        return MediaInputs(
            step.rows.to(device),
            self._embeddings.gather(step.parts),
            None if step.rope_offsets is None else step.rope_offsets.to(device),
        )


def _step_inputs(tensors: StepTensors) -> StepInputs:
    return StepInputs(
        token_ids=tensors.token_ids,
        positions=tensors.positions,
        slot_mapping=tensors.slot_mapping,
        seq_lens=tensors.seq_lens,
        token_sources=tensors.token_sources,
        advance_slots=tensors.advance_slots,
        query_start_loc=tensors.query_start_loc,
        block_tables=tensors.block_tables,
    )


def _attention(tensors: StepTensors, max_query_len: int, max_seq_len: int) -> AttentionStep:
    return AttentionStep(
        block_tables=tensors.block_tables,
        seq_lens=tensors.seq_lens,
        query_start_loc=tensors.query_start_loc,
        slot_mapping=tensors.slot_mapping,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
