"""A LoRA adapter's folder, as PEFT writes it: found missing, damaged or of an unknown kind here, then read.

Whatever an adapter may hold that would change its answers and that we do not compute is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_backend.errors import ConfigError, UnsupportedModelError, shown
from deepinfer_backend.models.model_files import PICKLE_SUFFIXES, one_line, read_json
from deepinfer_backend.validation import describe_validation_error

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_DTYPES = ("F32", "F16", "BF16")
# Fields of PEFT that say how an adapter was trained or where it came from. Which modules it changes, its tensors tell.
_FIELDS_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)


@dataclass(frozen=True, slots=True)
class LoraShape:
    """What an adapter adds to one module: scaling * B @ A, with A [rank, in_features] and B [out_features, rank]."""

    rank: int
    in_features: int
    out_features: int
    scaling: float


@dataclass(frozen=True, slots=True)
class LoraLayout:
    """All of an adapter but its numbers. `modules`: by the module's name within the base model."""

    name: str
    modules: Mapping[str, LoraShape]


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """A: [rank, in_features], B: [out_features, rank], on the CPU and in the file's dtype."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter in memory; `matrices` has the keys of `layout.modules`."""

    layout: LoraLayout
    matrices: Mapping[str, LoraMatrices]


def read_lora_layout(name: str, folder: Path, max_lora_rank: int) -> LoraLayout:
    """The layout of the adapter `name` in `folder`; reads no tensor.

    Raises:
        ConfigError: a file is missing or damaged, or the adapter has a feature that is not supported or a rank over
            `max_lora_rank`; the message names the adapter, the field or tensor, its value and the limit.
    """
    with _open_weights(name, folder) as weights:
        return _layout(name, folder, max_lora_rank, weights)


def read_lora_adapter(name: str, folder: Path, max_lora_rank: int) -> LoraAdapter:
    """The adapter `name` in `folder`, with its matrices. Raises what `read_lora_layout` raises."""
    with _open_weights(name, folder) as weights:
        layout = _layout(name, folder, max_lora_rank, weights)

        def read(module: str, matrix: str) -> torch.Tensor:
            tensor: torch.Tensor = weights.get_tensor(f"base_model.model.{module}.lora_{matrix}.weight")
            # The library maps the file into memory: were it cut short later on, reading it would kill the process.
            return tensor.clone()

        matrices = {module: LoraMatrices(read(module, "A"), read(module, "B")) for module in layout.modules}
    return LoraAdapter(layout, matrices)


class _AdapterConfig(BaseModel):
    """adapter_config.json: the fields that decide what is computed, with PEFT's defaults."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    peft_type: Literal["LORA"] = Field(None, validate_default=True)
    r: int = Field(8, ge=1)
    lora_alpha: float = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: Literal["none"] = "none"
    # Any other way of making the first A and B also changes the weights of the base model.
    init_lora_weights: Literal[True, False, "gaussian", "eva", "orthogonal", "mica"] = True

    def rank(self, module: str) -> int:
        return int(_by_pattern("rank_pattern", self.rank_pattern or {}, module, self.r))

    def scaling(self, module: str) -> float:
        alpha = _by_pattern("alpha_pattern", self.alpha_pattern or {}, module, self.lora_alpha)
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _by_pattern(field: str, patterns: Mapping[str, float], module: str, default: float) -> float:
    """PEFT's rule: the first pattern, in the file's order, that matches the end of the module's name at a dot."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ValueError(f"{field} has the key {shown(pattern)}: must be a regular expression ({error})") from None
    return patterns.get(module, default)


@contextmanager
def _adapter_errors(name: str, folder: Path) -> Iterator[None]:
    """What is wrong inside, as a ConfigError that names the adapter and its folder."""
    from safetensors import SafetensorError

    try:
        yield
    except UnsupportedModelError as error:
        raise ConfigError(f"LoRA adapter {shown(name)}: {error.message}") from error
    except (SafetensorError, OSError) as error:
        reason = f"{WEIGHTS_NAME} is damaged or incomplete: {one_line(error)}"
        raise ConfigError(f"LoRA adapter {shown(name)}: {folder}: {reason}") from error
    except ValueError as error:
        raise ConfigError(f"LoRA adapter {shown(name)}: {folder}: {error}") from None


@contextmanager
def _open_weights(name: str, folder: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with _adapter_errors(name, folder):
        _check_files(folder)
        with safe_open(folder / WEIGHTS_NAME, framework="pt", device="cpu") as weights:
            yield weights


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError("there is no such folder")
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"{CONFIG_NAME} is missing")
    if not (folder / WEIGHTS_NAME).is_file():
        text = f"{WEIGHTS_NAME} is missing"
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickled:
            text += f"; {pickled[0]} is a pickle, which can run code and is never loaded: convert it to safetensors"
        raise ValueError(text)


def _read_config(folder: Path) -> _AdapterConfig:
    content = read_json(folder / CONFIG_NAME)
    for field, value in content.items():
        known = field in _AdapterConfig.model_fields or field in _FIELDS_WITHOUT_EFFECT
        if not known and value not in (None, False, [], {}):
            raise ValueError(f"{CONFIG_NAME}: {field} is {shown(value)}: is not supported")
    try:
        return _AdapterConfig.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{CONFIG_NAME}: {describe_validation_error(error, _AdapterConfig.model_fields)}") from None


def _layout(name: str, folder: Path, max_lora_rank: int, weights: Any) -> LoraLayout:
    config = _read_config(folder)
    shapes: dict[str, dict[str, list[int]]] = {}
    for tensor in weights.keys():  # noqa: SIM118 (not a dict)
        parts = _TENSOR_NAME.fullmatch(tensor)
        if parts is None:
            raise ValueError(
                f"tensor {tensor!r} is not supported: must be the lora_A.weight or lora_B.weight of a module"
            )
        view = weights.get_slice(tensor)
        if view.get_dtype() not in _DTYPES:
            raise ValueError(f"tensor {tensor!r} is of {view.get_dtype()}: must be one of {', '.join(_DTYPES)}")
        shapes.setdefault(parts["module"], {})[parts["matrix"]] = view.get_shape()
    if not shapes:
        raise ValueError(f"{WEIGHTS_NAME} has no tensors")
    modules = {module: _shape(module, matrices, config) for module, matrices in sorted(shapes.items())}
    for module, shape in modules.items():
        if shape.rank > max_lora_rank:
            raise ValueError(f"the rank of {module} is {shape.rank}: must be at most max_lora_rank, {max_lora_rank}")
    return LoraLayout(name, modules)


def _shape(module: str, matrices: Mapping[str, list[int]], config: _AdapterConfig) -> LoraShape:
    for matrix in ("A", "B"):
        if matrix not in matrices:
            raise ValueError(f"tensor 'base_model.model.{module}.lora_{matrix}.weight' is missing")
        if len(matrices[matrix]) != 2:
            raise ValueError(f"lora_{matrix} of {module} has shape {matrices[matrix]}: must have two dimensions")
    (rank_of_a, in_features), (out_features, rank_of_b) = matrices["A"], matrices["B"]
    rank = config.rank(module)
    if not rank == rank_of_a == rank_of_b:
        raise ValueError(
            f"lora_A and lora_B of {module} have shapes {matrices['A']} and {matrices['B']}: "
            f"do not fit the rank of {rank} that {CONFIG_NAME} gives it"
        )
    return LoraShape(rank, in_features, out_features, config.scaling(module))
