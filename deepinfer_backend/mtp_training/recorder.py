"""Watches an engine write: every token with the hidden state that the output layer was given for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepinfer_backend.models.interface import ForwardResult, LayerShape
from deepinfer_backend.ops.paged_attention import LayerCache
from deepinfer_backend.ops.verify_drafts import NO_TOKEN
from deepinfer_backend.speculation.drafter import SampledStep
from deepinfer_backend.worker.model_runner import ForwardInputs
from deepinfer_backend.worker.slot_state import SlotState


@dataclass(slots=True)
class WrittenText:
    """token_ids: [num_tokens] int32; hidden_states: [num_tokens - 1, hidden_size] float32, of all but the last."""

    token_ids: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(slots=True)
class _Open:
    token_ids: list[torch.Tensor] = field(default_factory=list)
    hidden_states: list[torch.Tensor] = field(default_factory=list)

    def text(self) -> WrittenText:
        return WrittenText(torch.cat(self.token_ids), torch.cat(self.hidden_states))


class HiddenStateRecorder:
    """A `Drafter` that proposes nothing. Prompts must be computed whole: no prefix cache, no chunks."""

    layers: list[LayerShape] = []  # noqa: RUF012
    needs_token_states = True
    max_tokens_behind = 0

    def __init__(self) -> None:
        self._done: list[WrittenText] = []
        self._open: dict[int, _Open] = {}
        self._prompts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        pass

    def follow_prefill(self, inputs: ForwardInputs, result: ForwardResult) -> None:
        assert result.token_states is not None
        lens = inputs.tensors.query_start_loc.diff().tolist()
        token_ids = torch.split(inputs.tensors.token_ids.int(), lens)
        states = torch.split(result.token_states.clone(), lens)
        self._prompts = list(zip(token_ids, states, strict=True))

    def begin(self, slot: int, token_ids: torch.Tensor) -> None:
        if slot in self._open:
            self._done.append(self._open.pop(slot).text())
        self._open[slot] = _Open()

    def propose(self, step: SampledStep, state: SlotState) -> None:
        tensors = step.tensors
        slots = tensors.sample_slots.tolist()
        state.next_tokens[tensors.sample_slots.long(), 1:] = NO_TOKEN
        first_rows = tensors.sample_start_loc[:-1].long()
        tokens = tensors.targets[first_rows].int()
        states = step.hidden_states[first_rows].clone()
        for index, slot in enumerate(slots):
            text = self._open[slot]
            if self._prompts:
                prompt_token_ids, prompt_states = self._prompts[index]
                text.token_ids += [prompt_token_ids.clone(), tokens[index : index + 1]]
                text.hidden_states.append(prompt_states)
            else:
                text.token_ids.append(tokens[index : index + 1])
                text.hidden_states.append(states[index : index + 1])
        self._prompts = []

    def take(self) -> list[WrittenText]:
        """All that was written, when nothing is being written."""
        texts = [*self._done, *(text.text() for text in self._open.values())]
        self._done, self._open = [], {}
        return texts
