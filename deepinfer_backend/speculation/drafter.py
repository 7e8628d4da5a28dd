"""The interface of what proposes tokens for a step to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend.models.interface import ForwardResult, LayerShape
from deepinfer_backend.ops.paged_attention import LayerCache
from deepinfer_backend.worker.model_runner import ForwardInputs
from deepinfer_backend.worker.random_draw import SamplingRows
from deepinfer_backend.worker.slot_state import SlotState
from deepinfer_backend.worker.step_buffers import StepTensors


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step that has sampled. Its tensors are on the device, and what the host knew when it was launched is not.

    hidden_states: [num_rows, hidden_size], what the output layer was given for the rows of logits, and for others
    behind them; rows: how each row of logits was sampled. query_lens: [num_sampled] int32, `draft_query_lens` of the
    batch; num_drafts: its `max_num_proposed`; max_seq_len: the most tokens of a sequence.
    """

    tensors: StepTensors
    hidden_states: torch.Tensor
    rows: SamplingRows
    query_lens: NDArray[np.int32]
    num_drafts: int
    max_seq_len: int


class Drafter(Protocol):
    """Proposes what may come next. What it proposes decides how fast tokens come, and never which.

    A drafter with a model brings attention layers of its own: further layers of the model's KV cache, in the same
    blocks, so that the prefix cache, forks and preemption hold for them too. All but the constructor and the properties
    happens on the device's stream, in the order of steps, and none of it waits for the device.
    """

    @property
    def layers(self) -> list[LayerShape]:
        """What each of its attention layers stores; none without a model."""

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        """Of its layers; before the first step, on any thread."""

    @property
    def needs_token_states(self) -> bool:
        """Whether `follow_prefill` reads `token_states` of what the model's forward gives."""

    @property
    def max_tokens_behind(self) -> int:
        """How many tokens of a sequence it computes at once, if it was not asked about it for a while."""

    def follow_prefill(self, inputs: ForwardInputs, result: ForwardResult) -> None:
        """Computes what its own layers store of a prefill's tokens, after the model has."""

    def begin(self, slot: int, token_ids: torch.Tensor) -> None:
        """The slot belongs to another sequence from now on, whose tokens are these, [num_tokens] int32 on the host."""

    def propose(self, step: SampledStep, state: SlotState) -> None:
        """Takes a step's tokens, and writes drafts for those after them into state.next_tokens[sample_slots, 1:].

        NO_TOKEN where there is none.
        """
