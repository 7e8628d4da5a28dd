"""Several LoRA adapters in one batch: each token of a step gets the adapter of its own sequence, or none.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): an adapted Linear module computes W x + scaling * B (A x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend.errors import ConfigError, shown
from deepinfer_backend.models.lora_adapter import LoraAdapter, LoraLayout, LoraMatrices, LoraShape


@dataclass(frozen=True, slots=True)
class LoraStep:
    """Which tokens of one step's packed batch have which adapter; the others have none.

    tokens: [num_adapted_tokens] int64 on the host, the indices of those that have one, adapter by adapter; lora_ids
    and group_sizes: the adapters in that order and how many tokens each has.
    """

    num_tokens: int
    tokens: torch.Tensor
    lora_ids: Sequence[int]
    group_sizes: Sequence[int]


def plan_lora(lora_ids: NDArray[np.int32], query_start_loc: NDArray[np.int32], device: torch.device) -> LoraStep | None:
    """The step's LoraStep; None when no sequence has an adapter. Computes nothing on the device.

    lora_ids: [num_seqs], 0 for none; query_start_loc: [num_seqs + 1]; both are read before this returns. device: where
    the step will be; for CUDA the indices are pinned, so that the copy waits for nothing.
    """
    if not lora_ids.any():
        return None
    lora_id_of_token = np.repeat(lora_ids, np.diff(query_start_loc))
    num_base_tokens = int((lora_id_of_token == 0).sum())
    order = np.argsort(lora_id_of_token, kind="stable")[num_base_tokens:]
    ids, sizes = np.unique(lora_id_of_token[order], return_counts=True)
    tokens = torch.from_numpy(order)
    if device.type == "cuda":
        tokens = tokens.pin_memory()
    return LoraStep(len(lora_id_of_token), tokens, ids.tolist(), sizes.tolist())


class LoraLayers:
    """Owns the matrices of the loaded adapters and adds them to a model's Linear modules.

    1. A module that no loaded adapter changes computes as transformers made it, at no cost.
    2. A token without an adapter has, to the bit, what it has when no adapter is loaded.
    3. `load` changes all of an adapter's modules or, when it raises, none.

    Whatever computes (`load`, `unload`, and `set_step` before the model is called) runs on the device's stream.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, text_part: torch.nn.Module | None = None) -> None:
        """text_part: what of the model sees each token of a step once; None: all of it."""
        self._model = model
        self._text_part = model if text_part is None else text_part
        self._device = device
        self._layers: dict[str, _LoraLinear] = {}
        self._step = _CurrentStep()

    def check(self, layout: LoraLayout) -> None:
        """Raises ConfigError, which names the adapter and the module, if the model cannot take such an adapter."""
        for name, shape in layout.modules.items():
            try:
                _find_linear(self._model, self._text_part, name, shape)
            except ValueError as error:
                raise ConfigError(f"LoRA adapter {shown(layout.name)}: {error}") from None

    def load(self, lora_id: int, adapter: LoraAdapter) -> None:
        """Copies the adapter to the model's device and dtype; `lora_id`, at least 1, is its name in a LoraStep.

        Raises:
            ConfigError: the model cannot take it, or one of its numbers is not finite in the model's dtype.
        """
        layout = adapter.layout
        loaded: list[tuple[str, torch.nn.Linear, _Weights]] = []
        for name, shape in layout.modules.items():
            try:
                linear = _find_linear(self._model, self._text_part, name, shape)
                loaded.append((name, linear, _copy_weights(name, adapter.matrices[name], shape.scaling, linear)))
            except ValueError as error:
                raise ConfigError(f"LoRA adapter {shown(layout.name)}: {error}") from None
        for name, linear, weights in loaded:
            layer = self._layers.get(name)
            if layer is None:
                layer = self._layers[name] = _LoraLinear(linear, self._step)
            layer.weights[lora_id] = weights

    def unload(self, lora_id: int) -> None:
        """Gives back what `load` took."""
        for name, layer in list(self._layers.items()):
            layer.weights.pop(lora_id, None)
            if not layer.weights:
                self._layers.pop(name).restore()

    def set_step(self, step: LoraStep | None) -> None:
        """What the next calls of the model compute with; None is the base model alone."""
        self._step.value = None
        if step is not None:
            tokens = torch.split(step.tokens.to(self._device, non_blocking=True), list(step.group_sizes))
            self._step.value = _DeviceStep(step.num_tokens, list(zip(step.lora_ids, tokens, strict=True)))


@dataclass(frozen=True, slots=True)
class _DeviceStep:
    """A LoraStep on the device: the groups are a lora_id and its tokens."""

    num_tokens: int
    groups: Sequence[tuple[int, torch.Tensor]]


class _CurrentStep:
    """What all adapted modules look at."""

    value: _DeviceStep | None = None


@dataclass(frozen=True, slots=True)
class _Weights:
    """The matrices as they are multiplied with, in the module's dtype and on its device."""

    a_transposed: torch.Tensor  # [in_features, rank]
    b_transposed: torch.Tensor  # [rank, out_features]
    scaling: float


class _LoraLinear:
    """Stands in for the `forward` of one Linear module while an adapter that changes it is loaded.

    Not a forward hook: with one, torch calls a module by a slower path, 3 µs for each in every step.
    """

    def __init__(self, linear: torch.nn.Linear, step: _CurrentStep) -> None:
        self.weights: dict[int, _Weights] = {}
        self._step = step
        self._linear = linear
        self._base_forward: Callable[[torch.Tensor], torch.Tensor] = linear.forward
        linear.forward = self._forward  # type: ignore[method-assign]

    def restore(self) -> None:
        self._linear.forward = self._base_forward  # type: ignore[method-assign, assignment]

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        outputs = self._base_forward(input)
        step = self._step.value
        if step is not None:
            self._add(step, input.reshape(-1, input.shape[-1]), outputs.view(-1, outputs.shape[-1]))
        return outputs

    def _add(self, step: _DeviceStep, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """inputs: [num_tokens, in_features]; outputs: [num_tokens, out_features], changed in place."""
        assert len(inputs) == step.num_tokens, "an adapted module must see every token of the step, once and in order"
        for lora_id, tokens in step.groups:
            weights = self.weights.get(lora_id)
            if weights is None:
                continue
            low_rank = inputs.index_select(0, tokens) @ weights.a_transposed
            outputs.index_add_(0, tokens, low_rank @ weights.b_transposed, alpha=weights.scaling)


def _copy_weights(name: str, matrices: LoraMatrices, scaling: float, linear: torch.nn.Linear) -> _Weights:
    device, dtype = linear.weight.device, linear.weight.dtype
    a, b = matrices.a.to(device, dtype), matrices.b.to(device, dtype)
    # One NaN would spoil the whole step's sampling, other requests' too.
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(f"lora_A or lora_B of {name} has numbers that are not finite in {dtype}")
    return _Weights(a.T, b.T, scaling)


def _find_linear(model: torch.nn.Module, text_part: torch.nn.Module, name: str, shape: LoraShape) -> torch.nn.Linear:
    """The module that an adapter changes, or ValueError."""
    if "experts" in name.split("."):
        raise ValueError(f"module {name} belongs to a mixture's experts, which cannot take an adapter")
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the model has no module {name}") from None
    if not isinstance(module, torch.nn.Linear):
        raise ValueError(f"module {name} is a {type(module).__name__}: must be a Linear")
    if module is model.get_output_embeddings():  # type: ignore[operator]
        raise ValueError(f"module {name} is the model's output layer, which cannot take an adapter")
    if all(module is not each for each in text_part.modules()):
        raise ValueError(f"module {name} belongs to the model's vision part, which cannot take an adapter")
    if (shape.in_features, shape.out_features) != (module.in_features, module.out_features):
        raise ValueError(
            f"module {name} has {module.in_features} inputs and {module.out_features} outputs: "
            f"the adapter is for {shape.in_features} and {shape.out_features}"
        )
    return module
