"""Any transformers decoder over our paged KV cache, through transformers' own attention registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.interface import ForwardResult, LayerShape, MediaEncoder, MediaInputs
from deepinfer_backend.models.lora import LoraLayers
from deepinfer_backend.ops.paged_attention import AttentionStep, LayerCache, paged_attention

ATTENTION_NAME = "deepinfer_paged"


class Attention(Protocol):
    """What a forward's layers call, each with its index; shapes as in `paged_attention`."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor: ...


class PagedLayers:
    """One step's attention over the caches of all layers."""

    def __init__(self, step: AttentionStep, caches: Sequence[LayerCache] | Mapping[int, LayerCache]) -> None:
        self._step = step
        self._caches = caches

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return paged_attention(query, key, value, self._caches[layer], self._step, scale=scale, window=window)


class _LayerRecorder:
    """Attends to nothing and remembers what each layer would store."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        if layer in self.layers:
            raise UnsupportedModelError(f"layer {layer} attends more than once, which is not supported")
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    deepinfer_attention: Attention,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls with query, key, value [1, num_heads, num_tokens, dim]."""
    for name, value_of in (("softcap", softcap), ("attention sinks", s_aux)):
        if value_of is not None:
            raise UnsupportedModelError(f"{type(module).__name__} needs {name}, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = deepinfer_attention.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        sliding_window,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention_function)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *_args, **_kwargs: None)


class TransformersModel:
    """A transformers causal language model whose attention runs over our cache (`models.interface.Model`).

    Raises:
        UnsupportedModelError: the model keeps state that is not keys and values per token, or attends in a way that
            we do not have.
    """

    def __init__(self, module: torch.nn.Module, *, has_mtp_layer: bool = False) -> None:
        """has_mtp_layer: its last layer is not its own, but that of a multi-token-prediction module: `mtp_layer`."""
        self.module = module
        self.mtp_layer: torch.nn.Module | None = None
        if has_mtp_layer:
            self.mtp_layer = module.base_model.layers.pop(-1)  # type: ignore[union-attr, operator]
            module.config.num_hidden_layers -= 1  # type: ignore[union-attr, operator]
        config = module.config.get_text_config()  # type: ignore[union-attr, operator]
        self.max_position_embeddings = int(config.max_position_embeddings)
        self.vocab_size = int(module.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        self.device = next(module.parameters()).device
        self.dtype = next(module.parameters()).dtype
        self.weight_format = str(self.dtype).removeprefix("torch.")
        self.hidden_size = int(module.get_input_embeddings().embedding_dim)  # type: ignore[operator]
        self.lora = LoraLayers(module, self.device)
        self.media_encoder: MediaEncoder | None = None
        self._hidden_states: torch.Tensor | None = None
        self._caches: Sequence[LayerCache] = ()
        self._token_states: torch.Tensor | None = None
        # What the output layer is given: the last hidden states of the rows that it is asked for.
        module.get_output_embeddings().register_forward_pre_hook(self._keep_hidden_states)  # type: ignore[operator]
        module.base_model.register_forward_hook(self._keep_token_states)  # type: ignore[union-attr]
        self.layers = self._probe_layers()

    def _keep_hidden_states(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden_states = inputs[0]

    def _keep_token_states(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._token_states = output.last_hidden_state[0]

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        self._caches = caches

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        logits_indices: torch.Tensor,
        *,
        wants_token_states: bool = False,
        media: MediaInputs | None = None,
    ) -> ForwardResult:
        return self._forward(token_ids, positions, PagedLayers(attention, self._caches), logits_indices, media)

    def _probe_layers(self) -> list[LayerShape]:
        recorder = _LayerRecorder()
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            self._forward(zero, zero, recorder, zero)
        num_layers = self.module.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
        if sorted(recorder.layers) != list(range(num_layers)):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} has {num_layers} layers of which {len(recorder.layers)} attend over "
                "cached keys and values; other kinds of layers are not supported"
            )
        return [recorder.layers[layer] for layer in range(num_layers)]

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        logits_indices: torch.Tensor,
        media: MediaInputs | None = None,
    ) -> ForwardResult:
        assert media is None
        return self._run({"input_ids": token_ids[None], "position_ids": positions[None]}, attention, logits_indices)

    def _run(
        self, inputs: dict[str, torch.Tensor], attention: Attention, logits_indices: torch.Tensor
    ) -> ForwardResult:
        output = self.module(**inputs, use_cache=False, logits_to_keep=logits_indices, deepinfer_attention=attention)
        assert self._hidden_states is not None
        return ForwardResult(output.logits[0], self._hidden_states.flatten(0, -2), self._token_states)
