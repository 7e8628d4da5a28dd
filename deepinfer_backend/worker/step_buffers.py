"""The packed arrays of one step: one host buffer that the scheduler writes, one copy of it to the device.

And where the device puts what it makes of them, so that a decode step allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend._core import SchedulerOutputs, StepArrays

_ALIGNMENT_BYTES = 64
MAX_EXTRA_LOGITS = 256
"""Rows of logits of one step beyond one a sequence, of prompt tokens or drafts: as float32 of 256k tokens 256 MiB."""
_PLACEHOLDER = {
    "token_ids": [0],
    "token_sources": [-1],
    "positions": [0],
    "slot_mapping": [0],
    "query_start_loc": [0, 1],
    "seq_lens": [1],
    "advance_slots": [-1],
    "block_tables": [0],
    "logits_indices": [0],
}
MAX_BANNED_PER_ROW = 128
"""End and stop tokens that `min_tokens` may hold back in a row of logits: 64 stop token ids and the model's own."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Device views of a step's arrays, shapes as in `_core.StepArrays`, and of what only the device knows.

    row_output_indices, uniforms: [L] int64 and float64, which output each row of logits samples, and the random number
    that does it; targets: [L] int64, what it sampled. sampled_token_ids: [S, 1 + num_speculative_tokens] int32, what
    each sequence gets of that, and num_sampled_tokens, [S] int32, how many they are.
    """

    token_ids: torch.Tensor
    token_sources: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    advance_slots: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor
    sample_start_loc: torch.Tensor
    sample_slots: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    output_indices: torch.Tensor
    banned_rows: torch.Tensor
    banned_token_ids: torch.Tensor
    banned_until: torch.Tensor
    row_output_indices: torch.Tensor
    uniforms: torch.Tensor
    targets: torch.Tensor
    sampled_token_ids: torch.Tensor
    num_sampled_tokens: torch.Tensor


class StepBuffers:
    """Owns one host buffer and, on CUDA, its device twin; allocated once.

    `arrays` is what the scheduler writes into, `positions` and the `…_start_loc` some of them; `views` what a
    kernel reads after `upload()`. On CPU both are one memory.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        num_speculative_tokens: int,
        device: torch.device,
    ) -> None:
        tokens, seqs, logits = (max_num_tokens,), (max_num_seqs,), (max_num_seqs + MAX_EXTRA_LOGITS,)
        banned = ((max_num_seqs + (MAX_EXTRA_LOGITS if num_speculative_tokens else 0)) * MAX_BANNED_PER_ROW,)
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, tokens),
            "token_sources": (torch.int32, tokens),
            "positions": (torch.int64, tokens),
            "slot_mapping": (torch.int64, tokens),
            "query_start_loc": (torch.int32, (max_num_seqs + 1,)),
            "seq_lens": (torch.int32, seqs),
            "advance_slots": (torch.int32, seqs),
            "block_tables": (torch.int32, (max_num_seqs, max_blocks_per_seq)),
            "logits_indices": (torch.int64, logits),
            "sample_start_loc": (torch.int32, (max_num_seqs + 1,)),
            "sample_slots": (torch.int32, seqs),
            "temperature": (torch.float32, logits),
            "top_k": (torch.int32, logits),
            "top_p": (torch.float32, logits),
            "min_p": (torch.float32, logits),
            "seeds": (torch.int64, seqs),
            "output_indices": (torch.int64, seqs),
            "banned_rows": (torch.int64, banned),
            "banned_token_ids": (torch.int64, banned),
            "banned_until": (torch.int64, banned),
        }
        sizes = {name: dtype.itemsize * int(np.prod(shape)) for name, (dtype, shape) in layout.items()}
        padded = {name: -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for name, size in sizes.items()}
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(sum(padded.values()), dtype=torch.uint8, pin_memory=on_cuda)
        self._device = torch.zeros_like(self._host, device=device) if on_cuda else self._host

        def views(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
            offset, result = 0, {}
            for name, (dtype, shape) in layout.items():
                result[name] = buffer[offset : offset + sizes[name]].view(dtype).view(shape)
                offset += padded[name]
            return result

        self._whole = StepTensors(
            **views(self._device),
            row_output_indices=torch.zeros(logits, dtype=torch.int64, device=device),
            uniforms=torch.zeros(logits, dtype=torch.float64, device=device),
            targets=torch.zeros(logits, dtype=torch.int64, device=device),
            sampled_token_ids=torch.zeros((max_num_seqs, 1 + num_speculative_tokens), dtype=torch.int32, device=device),
            num_sampled_tokens=torch.zeros(seqs, dtype=torch.int32, device=device),
        )
        arrays = {name: tensor.numpy() for name, tensor in views(self._host).items()}
        self.arrays = StepArrays(**arrays)
        self._host_arrays = arrays
        self.positions: NDArray[np.int64] = arrays["positions"]
        self.query_start_loc: NDArray[np.int32] = arrays["query_start_loc"]
        self.sample_start_loc: NDArray[np.int32] = arrays["sample_start_loc"]
        self._sizes: tuple[int, ...] = ()
        self._views = self._whole

    def views(self, batch: SchedulerOutputs) -> StepTensors:
        """The parts of the device's arrays that the batch fills; made anew only when its sizes are not the last ones.

        Of logits_indices at least one. Does not wait for the device.
        """
        num_rows = batch.num_sampled_rows
        sizes = (
            batch.num_tokens,
            batch.num_seqs,
            batch.num_sampled,
            num_rows,
            max(1, num_rows + batch.num_prompt_logits),
            batch.num_banned,
            batch.max_num_blocks,
        )
        if sizes != self._sizes:
            self._views, self._sizes = self._cut(*sizes), sizes
        return self._views

    def placeholder(self) -> StepTensors:
        """One token of nobody: the first of the dummy block, which every sequence may overwrite."""
        for name, values in _PLACEHOLDER.items():
            self._host_arrays[name].flat[: len(values)] = values
        return self._cut(
            num_tokens=1, num_seqs=1, num_sampled=0, num_rows=0, num_logits=1, num_banned=0, max_num_blocks=1
        )

    def upload(self) -> None:
        """Copies the host's arrays to the device; call it on the device's stream."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def _cut(
        self,
        num_tokens: int,
        num_seqs: int,
        num_sampled: int,
        num_rows: int,
        num_logits: int,
        num_banned: int,
        max_num_blocks: int,
    ) -> StepTensors:
        whole = self._whole
        return StepTensors(
            token_ids=whole.token_ids[:num_tokens],
            token_sources=whole.token_sources[:num_tokens],
            positions=whole.positions[:num_tokens],
            slot_mapping=whole.slot_mapping[:num_tokens],
            query_start_loc=whole.query_start_loc[: num_seqs + 1],
            seq_lens=whole.seq_lens[:num_seqs],
            advance_slots=whole.advance_slots[:num_seqs],
            block_tables=whole.block_tables[:num_seqs, :max_num_blocks],
            logits_indices=whole.logits_indices[:num_logits],
            sample_start_loc=whole.sample_start_loc[: num_sampled + 1],
            sample_slots=whole.sample_slots[:num_sampled],
            temperature=whole.temperature[:num_rows],
            top_k=whole.top_k[:num_rows],
            top_p=whole.top_p[:num_rows],
            min_p=whole.min_p[:num_rows],
            seeds=whole.seeds[:num_sampled],
            output_indices=whole.output_indices[:num_sampled],
            banned_rows=whole.banned_rows[:num_banned],
            banned_token_ids=whole.banned_token_ids[:num_banned],
            banned_until=whole.banned_until[:num_banned],
            row_output_indices=whole.row_output_indices[:num_rows],
            uniforms=whole.uniforms[:num_rows],
            targets=whole.targets[:num_rows],
            sampled_token_ids=whole.sampled_token_ids[:num_sampled],
            num_sampled_tokens=whole.num_sampled_tokens[:num_sampled],
        )
