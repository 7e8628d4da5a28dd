"""A multi-token-prediction module of a model that runs through transformers, its layer one of transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.interface import ForwardResult, LayerShape
from deepinfer_backend.models.transformers_model import PagedLayers, TransformersModel
from deepinfer_backend.models.weights import WeightSource
from deepinfer_backend.ops.paged_attention import AttentionStep, LayerCache


class TransformersMtpHead:
    """An `MtpHead` of a DeepSeek-V3: `layer` is model.layers.N of its checkpoint, the first that the model has not.

    What only such a module has, enorm, hnorm, eh_proj and shared_head, is read from `source`.

    Raises (constructor):
        UnsupportedModelError: a weight is missing.
    """

    def __init__(self, model: TransformersModel, layer: torch.nn.Module, source: WeightSource) -> None:
        self._model: Any = model.module.base_model
        self._layer = layer
        self._output_layer = model.module.get_output_embeddings()  # type: ignore[operator]
        self._index = int(layer.self_attn.layer_idx)  # type: ignore[union-attr, arg-type]
        prefix, names = f"model.layers.{self._index}", source.names()

        def weight(name: str) -> torch.Tensor:
            full_name = f"{prefix}.{name}.weight"
            if full_name not in names:
                raise UnsupportedModelError(f"there is no multi-token-prediction module: no weight {full_name}")
            return source.tensor(full_name).to(model.device, model.dtype)

        self._embedding_norm, self._hidden_norm = weight("enorm"), weight("hnorm")
        self._projection, self._final_norm = weight("eh_proj"), weight("shared_head.norm")
        self._eps = float(model.module.config.rms_norm_eps)  # type: ignore[union-attr, arg-type]
        self._caches: dict[int, LayerCache] = {}
        self.draft_token_ids = None
        # The module's layer stores what the layer before it does.
        self.layers: list[LayerShape] = [model.layers[-1]]

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        self._caches = {self._index: caches[0]}

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        logits_indices: torch.Tensor,
    ) -> ForwardResult:
        both = torch.cat(
            [
                self._norm(self._model.get_input_embeddings()(token_ids), self._embedding_norm),
                self._norm(hidden_states, self._hidden_norm),
            ],
            dim=1,
        )
        states = functional.linear(both, self._projection)[None]
        position_ids = positions[None]
        states = self._layer(
            states,
            position_ids=position_ids,
            position_embeddings=self._model.rotary_emb(states, position_ids),
            use_cache=False,
            deepinfer_attention=PagedLayers(attention, self._caches),
        )
        last = self._norm(states[0, logits_indices], self._final_norm)
        return ForwardResult(self._output_layer(last), last)

    def _norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, weight.shape, weight, self._eps)
