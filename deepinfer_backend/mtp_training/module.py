"""The module as torch trains it, and how it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from deepinfer_backend.models.weights import WeightSource


class TrainedMtp(nn.Module):
    """What `NativeMtpHead` computes, for whole texts; embedding and output layer are the model's and stay as they are.

    draft_token_ids: [num_columns] int64, ascending, the tokens that it may propose.
    """

    def __init__(self, config: LlamaConfig, source: WeightSource, output_weight: str, draft_token_ids: torch.Tensor):
        super().__init__()
        size = config.hidden_size
        self._index = config.num_hidden_layers
        self._head_dim = config.head_dim
        self.enorm, self.hnorm = (LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        # Drawn anew: from the model's own last layer it learned more slowly.
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.final_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.final_norm.weight.data = source.tensor("model.norm.weight").float()
        self._rotary = LlamaRotaryEmbedding(config)
        self._embedding = source.tensor("model.embed_tokens.weight").float()
        self._output = source.tensor(output_weight).float()
        self.draft_token_ids = draft_token_ids
        self._draft_output = self._output[draft_token_ids]

    def states(self, token_ids: torch.Tensor, hidden_states: torch.Tensor, num_drafts: int) -> Iterator[torch.Tensor]:
        """One after the other the hidden states that the output layer is given for the first draft, the second ….

        token_ids: [num_texts, length] int64, each behind the token of hidden_states [num_texts, length, hidden_size],
        float32, which is also the result's shape: each is of what follows the token. Those of draft number p (from 0)
        are right where at least p tokens are before it. As when it drafts, what a draft sees of the tokens that are
        known was stored from the model's hidden states, and of the drafts before it from the module's own (Li et al.
        2025, "EAGLE-3").
        """
        positions = torch.arange(token_ids.shape[1])
        stored: list[tuple[torch.Tensor, torch.Tensor]] = []
        for num_drafted in range(num_drafts):
            embeddings = functional.embedding(token_ids, self._embedding)
            both = torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1)
            hidden_states = self.final_norm(self._run_layer(self.eh_proj(both), positions, stored))
            yield hidden_states
            if num_drafted + 1 < num_drafts:
                # A token's next draft is made from what the module made of the token before.
                hidden_states = functional.pad(hidden_states[:, :-1], (0, 0, 1, 0))

    def model_logits(self, hidden_states: torch.Tensor, *, of_drafts_alone: bool) -> torch.Tensor:
        """What the model itself says after each: [..., num_columns] or [..., vocab_size]."""
        return functional.linear(hidden_states, self._draft_output if of_drafts_alone else self._output)

    def save(self, folder: Path, metadata: dict[str, str]) -> None:
        """As `NativeMtpHead` reads it, in bfloat16."""
        prefix = f"model.layers.{self._index}."
        own = {
            "enorm.weight": self.enorm.weight,
            "hnorm.weight": self.hnorm.weight,
            "eh_proj.weight": self.eh_proj.weight,
            "shared_head.norm.weight": self.final_norm.weight,
            **self.layer.state_dict(),
        }
        tensors = {prefix + name: value.detach().bfloat16().contiguous() for name, value in own.items()}
        tensors[prefix + "draft_token_ids"] = self.draft_token_ids.int()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **metadata})

    def _run_layer(
        self, states: torch.Tensor, positions: torch.Tensor, stored: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """The layer for one draft of each token; adds its keys and values to those of the drafts before."""
        attention = self.layer.self_attn
        normed = self.layer.input_layernorm(states)
        shape = (*states.shape[:-1], -1, self._head_dim)
        queries, keys, values = (
            projection(normed).view(shape).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *self._rotary(states, positions[None]))
        num_groups = queries.shape[1] // keys.shape[1]
        stored.append((keys.repeat_interleave(num_groups, 1), values.repeat_interleave(num_groups, 1)))
        attended = _attend(queries, stored).transpose(1, 2).flatten(2)
        states = states + attention.o_proj(attended)
        result: torch.Tensor = states + self.layer.mlp(self.layer.post_attention_layernorm(states))
        return result


def _attend(queries: torch.Tensor, stored: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """queries: [num_texts, num_heads, length, head_dim], of the last that are stored; the same shape comes back.

    With n stored, a query at position i sees the first ones up to i - n + 1, and one of each other: of the second that
    at i - n + 2, of the last its own.
    """
    num_before, length = len(stored) - 1, queries.shape[2]
    keys, values = stored[0]
    queries = queries * queries.shape[-1] ** -0.5
    is_hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - num_before)
    scores = [(queries @ keys.transpose(-1, -2)).masked_fill(is_hidden, float("-inf"))]
    own_values = []
    for number, (own_keys, own) in enumerate(stored[1:], start=1):
        distance = num_before - number
        scores.append((queries * _moved(own_keys, distance)).sum(-1, keepdim=True))
        own_values.append(_moved(own, distance))
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)
    attended = weights[..., :length] @ values
    for number, own in enumerate(own_values):
        attended = attended + weights[..., length + number, None] * own
    return attended


def _moved(values: torch.Tensor, distance: int) -> torch.Tensor:
    """Each position has what the one so far before it had; the first have zeros."""
    return functional.pad(values[:, :, : values.shape[2] - distance], (0, 0, distance, 0))
