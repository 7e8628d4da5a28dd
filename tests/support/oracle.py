"""What transformers itself generates: the answer that ours must equal, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class TransformersOracle:
    """Greedy tokens of a model folder in float32, one prompt at a time."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The new tokens, an end token included unless they go on past it."""
        tokens = torch.tensor([list(prompt)])
        ends = {"eos_token_id": None, "pad_token_id": 0} if ignore_eos else {}
        result = self._model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens, do_sample=False, **ends
        )
        return [int(token) for token in result[0, len(prompt) :]]
