"""What the model looks like to Triton: its tensors, how they are declared, and the folder that Triton loads."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_backend.errors import ConfigError, nearest_name, shown

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "deepinfer"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as config.pbtxt declares it; `is_optional` is about inputs only."""

    name: str
    data_type: str
    dims: list[int]
    is_optional: bool = True


RETURN_INPUTS: dict[str, tuple[str, ...]] = {
    "return_finish_reason": ("finish_reason",),
    "return_stop_reason": ("stop_reason",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_prompt_logprobs": ("prompt_logprobs",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_num_cached_tokens": ("num_cached_tokens",),
    "return_perf_metrics": (
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
    ),
}
"""Input → the additional outputs that it asks for."""

INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", [1]),
    TensorSpec("input_ids", "TYPE_INT32", [-1]),
    TensorSpec("messages", "TYPE_STRING", [1]),
    TensorSpec("tools", "TYPE_STRING", [1]),
    TensorSpec("chat_template_kwargs", "TYPE_STRING", [1]),
    TensorSpec("embedding_request", "TYPE_STRING", [1]),
    TensorSpec("image", "TYPE_STRING", [-1]),
    TensorSpec("video", "TYPE_STRING", [-1]),
    TensorSpec("stream", "TYPE_BOOL", [1]),
    TensorSpec("sampling_parameters", "TYPE_STRING", [1]),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", [1]),
    TensorSpec("cancel_request_id", "TYPE_STRING", [1]),
    *(TensorSpec(name, "TYPE_BOOL", [1]) for name in RETURN_INPUTS),
)
OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", [-1]),
    TensorSpec("token_ids", "TYPE_INT32", [-1]),
    TensorSpec("sequence_index", "TYPE_INT32", [-1]),
    TensorSpec("finish_reason", "TYPE_STRING", [-1]),
    TensorSpec("stop_reason", "TYPE_STRING", [-1]),
    TensorSpec("cumulative_logprob", "TYPE_FP32", [-1]),
    TensorSpec("logprobs", "TYPE_STRING", [-1]),
    TensorSpec("prompt_logprobs", "TYPE_STRING", [1]),
    TensorSpec("num_input_tokens", "TYPE_UINT32", [1]),
    TensorSpec("num_output_tokens", "TYPE_UINT32", [-1]),
    TensorSpec("num_cached_tokens", "TYPE_UINT32", [1]),
    TensorSpec("arrival_time_ns", "TYPE_INT64", [-1]),
    TensorSpec("first_scheduled_time_ns", "TYPE_INT64", [-1]),
    TensorSpec("first_token_time_ns", "TYPE_INT64", [-1]),
    TensorSpec("last_token_time_ns", "TYPE_INT64", [-1]),
)

MODEL_PY = '''\
"""What Triton loads; the code is in the package."""

from deepinfer_backend.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def complete_config(config: Any) -> Any:
    """Fills what a config.pbtxt leaves out; what it declares keeps its shape. `config` is Triton's ModelConfig.

    Raises:
        ValueError: the file asks for something that this model cannot be.
    """
    given = config.as_dict()
    if given["max_batch_size"] > 0:
        raise ValueError(
            f"config.pbtxt: max_batch_size is {given['max_batch_size']}: must be 0 (the engine batches by itself)"
        )
    policy = given.get("model_transaction_policy") or {}
    if policy.get("decoupled") is False and "model_transaction_policy" in given:
        raise ValueError("config.pbtxt: model_transaction_policy.decoupled is false: must be true (or left out)")
    add_missing_tensors(config, INPUTS, OUTPUTS)
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})
    return config


def add_missing_tensors(config: Any, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Any:
    """Declares those of a model's tensors that its config.pbtxt does not.

    Raises:
        ValueError: the file declares one that the model does not have, or with another type.
    """
    given = config.as_dict()
    missing_inputs = _missing_tensors("input", given["input"], inputs)
    missing_outputs = _missing_tensors("output", given["output"], outputs)
    for spec in missing_inputs:
        config.add_input(
            {"name": spec.name, "data_type": spec.data_type, "dims": spec.dims, "optional": spec.is_optional}
        )
    for spec in missing_outputs:
        config.add_output({"name": spec.name, "data_type": spec.data_type, "dims": spec.dims})
    return config


def _missing_tensors(kind: str, declared: list[dict[str, Any]], specs: tuple[TensorSpec, ...]) -> list[TensorSpec]:
    data_types = {spec.name: spec.data_type for spec in specs}
    for tensor in declared:
        name, data_type = tensor["name"], tensor["data_type"]
        if name not in data_types:
            raise ValueError(f"config.pbtxt: unknown {kind} {shown(name)}{nearest_name(name, data_types)}")
        if data_type != data_types[name]:
            raise ValueError(f"config.pbtxt: {kind} {name} is {data_type}: must be {data_types[name]}")
    names = {tensor["name"] for tensor in declared}
    return [spec for spec in specs if spec.name not in names]


def check_instances(model_config: Mapping[str, Any]) -> None:
    """One instance is one engine with one KV cache; more of them would fight over one device.

    Raises:
        ConfigError: config.pbtxt asks for more than one.
    """
    count = sum(int(group["count"]) for group in model_config.get("instance_group", []))
    if count > 1:
        raise ConfigError(f"config.pbtxt: instance_group count is {count}: must be 1 (the engine batches by itself)")


def place_instance(model_config: Mapping[str, Any], kind: str, device_id: str) -> tuple[str, str]:
    """(kind, device) of an instance: KIND_MODEL with the vLLM backend's GPU_DEVICE_IDS is KIND_GPU on that GPU.

    Raises:
        ConfigError: GPU_DEVICE_IDS is not the number of one GPU.
    """
    parameter = model_config.get("parameters", {}).get("GPU_DEVICE_IDS", {})
    named = str(parameter.get("string_value", "")).strip()
    if kind != "MODEL" or not named:
        return kind, device_id
    if not (named.isascii() and named.isdigit()):
        raise ConfigError(
            f"config.pbtxt: GPU_DEVICE_IDS is {shown(named)}: must be the number of one GPU (one engine uses one)"
        )
    return "GPU", named


def read_engine_arguments(version_folder: Path) -> dict[str, Any]:
    """The engine arguments of `model.json`; none, that is all defaults, where there is no such file.

    Raises:
        ConfigError: the file is not one JSON object.
    """
    path = version_folder / "model.json"
    if not path.exists():
        logger.warning("%s is missing: every engine argument has its default, and the bundled model is served", path)
        return {}
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """
    Raises:
        ConfigError: the file cannot be read or is not one JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one JSON object, not {shown(content)}")
    return content


def config_pbtxt(name: str) -> str:
    """The whole config.pbtxt of a model called `name`."""
    inputs = ",\n".join(
        f'  {{ name: "{spec.name}" data_type: {spec.data_type} dims: [ {spec.dims[0]} ] optional: true }}'
        for spec in INPUTS
    )
    outputs = ",\n".join(
        f'  {{ name: "{spec.name}" data_type: {spec.data_type} dims: [ {spec.dims[0]} ] }}' for spec in OUTPUTS
    )
    return f"""\
name: "{name}"
backend: "python"
max_batch_size: 0  # the engine batches by itself
model_transaction_policy {{ decoupled: true }}
input [
{inputs}
]
output [
{outputs}
]
instance_group [ {{ kind: KIND_MODEL count: 1 }} ]  # one instance is one engine with one KV cache
"""


_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def write_model_repository(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes a model repository: one model for each name, with these engine arguments.

    Raises:
        ConfigError: a name cannot be a model's.
    """
    for name, arguments in models.items():
        if not name or not set(name) <= _NAME_CHARS or name.startswith("."):
            raise ConfigError(f"model name is {shown(name)}: must be letters, digits, '_', '-' and '.'")
        version_folder = folder / name / "1"
        version_folder.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config_pbtxt(name), encoding="utf-8")
        (version_folder / "model.py").write_text(MODEL_PY, encoding="utf-8")
        (version_folder / "model.json").write_text(
            json.dumps(dict(arguments), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
