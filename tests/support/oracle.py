"""What transformers itself generates: the answer that ours must equal, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from deepinfer_backend.models.conversion_cache import write_float32_weights


@dataclass(frozen=True)
class BeamSearchAnswer:
    """New tokens and transformers' `sequences_scores` of each returned sequence, best first; how many steps it took."""

    sequences: list[list[int]]
    scores: list[float]
    num_steps: int


class TransformersOracle:
    """What a model folder answers in transformers, one prompt at a time.

    dtype: float32 unless two ways to compute the same, with cache and without, must not differ in any float32 bit.
    """

    def __init__(self, path: Path, *, dtype: torch.dtype = torch.float32) -> None:
        write_float32_weights(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The new tokens, an end token included unless they go on past it."""
        tokens = torch.tensor([list(prompt)])
        ends = {"eos_token_id": None, "pad_token_id": 0} if ignore_eos else {}
        result = self._model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens, do_sample=False, **ends
        )
        return [int(token) for token in result[0, len(prompt) :]]

    def beam_search(self, prompt: Sequence[int], **generation_arguments: Any) -> list[list[int]]:
        """The new tokens of each returned sequence, best first, an end token included.

        generation_arguments: of `generate`: num_beams, num_return_sequences, max_new_tokens, length_penalty, …
        """
        return self.beam_search_answer(prompt, **generation_arguments).sequences

    @torch.inference_mode()
    def beam_search_answer(self, prompt: Sequence[int], **generation_arguments: Any) -> BeamSearchAnswer:
        tokens = torch.tensor([list(prompt)])
        result = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
            **generation_arguments,
        )
        # Padding may look like any token; what was generated has the index of a beam.
        lengths = (result.beam_indices >= 0).sum(dim=1).tolist()
        rows = zip(result.sequences.tolist(), lengths, strict=True)
        return BeamSearchAnswer(
            sequences=[row[len(prompt) : len(prompt) + length] for row, length in rows],
            scores=result.sequences_scores.tolist(),
            num_steps=len(result.scores),
        )

    @torch.no_grad()
    def next_token_logprobs(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """The log-softmax of what follows each of these, all of one length; computed without a cache.

        Returns float32 [num_sequences, vocab_size].
        """
        logits = self._model(torch.tensor(sequences), use_cache=False).logits[:, -1]
        return torch.log_softmax(logits.float(), dim=-1)

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The log-softmax of what follows each of these tokens, float32 [num_tokens, vocab_size]."""
        logits = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    @torch.no_grad()
    def last_hidden_state(self, token_ids: Sequence[int]) -> torch.Tensor:
        """What the last layer makes of the last token, after the final norm: float32 [hidden_size]."""
        output = self._model.base_model(torch.tensor([list(token_ids)]), use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states[0, -1].float()
