"""Builds the frontend of a model as Triton describes it, with the real engine behind it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineClient
from deepinfer_backend.engine.engine_process import AttachedEngineClient, ChildEngineClient
from deepinfer_backend.engine.messages import EngineInfo
from deepinfer_backend.engine.parallel_engines import ParallelEngineClient
from deepinfer_backend.errors import ConfigError, shown
from deepinfer_backend.models.loader import load_tokenizer
from deepinfer_backend.triton.engine_folder import ENGINE_OF, engine_folder
from deepinfer_backend.triton.frontend import Frontend
from deepinfer_backend.triton.generate_request import WireInterface
from deepinfer_backend.triton.request import native_interface
from deepinfer_backend.triton.shutdown_signal import end_with_server

logger = logging.getLogger(__name__)

_ATTACH_TIMEOUT_S = 3600.0  # loading the largest models takes most of it
_TOKENIZER_LIBRARY = "transformers.models.auto.tokenization_auto"


def start_frontend(
    arguments: Mapping[str, Any],
    *,
    model_name: str,
    model_version: str,
    instance_kind: str,
    device_id: str,
    interface: WireInterface = native_interface,
) -> Frontend:
    """Blocks until the engine is ready: its own, or that of the model that `engine_of` names.

    Raises:
        DeepInferError: the arguments are wrong, or the engine cannot start.
    """
    end_with_server()
    # The tokenizer's library takes as long to import as an engine to start: side by side.
    importing = threading.Thread(target=import_module, args=(_TOKENIZER_LIBRARY,), name="deepinfer-import", daemon=True)
    importing.start()

    def load_tokenizer_after_import(info: EngineInfo) -> Any:
        importing.join()  # two imports of the library at once can each find the other's modules half made
        return load_tokenizer_of(info)

    return Frontend(
        model_name=model_name,
        model_version=model_version,
        start_engine=_engine_starter(arguments, model_name, instance_kind, device_id),
        load_tokenizer=load_tokenizer_after_import,
        give_up=lambda: _unload(model_name),
        interface=interface,
    )


def load_tokenizer_of(info: EngineInfo) -> Any:
    """The tokenizer of an engine's model; None for an engine without one."""
    return None if info.config["skip_tokenizer_init"] else load_tokenizer(Path(info.tokenizer_path))


def _engine_starter(
    arguments: Mapping[str, Any], model_name: str, instance_kind: str, device_id: str
) -> Callable[[int], EngineClient]:
    """What starts a data-parallel rank, or attaches to it."""
    owner = arguments.get(ENGINE_OF)
    if owner is None:
        config = _place_on_device(EngineConfig(**arguments), instance_kind, device_id)
        if config.data_parallel_lockstep:
            return lambda _: ParallelEngineClient(config, lambda rank: engine_folder(model_name, rank))
        return lambda rank: ChildEngineClient(config, engine_folder(model_name, rank), rank)
    others = sorted(arguments.keys() - {ENGINE_OF})
    if others or not isinstance(owner, str):
        raise ConfigError(
            f"{ENGINE_OF} is {shown(owner)}: must be the name of a model, and all that model.json says"
            + (f", not beside {others[0]}" if others else "")
        )
    return lambda rank: AttachedEngineClient(engine_folder(owner, rank), model_name, _ATTACH_TIMEOUT_S)


def _place_on_device(config: EngineConfig, instance_kind: str, device_id: str) -> EngineConfig:
    """KIND_GPU names the device, KIND_CPU forbids one, KIND_MODEL leaves it to the configuration."""
    if instance_kind == "GPU":
        # Read by the engine process, before it imports torch.
        os.environ["CUDA_VISIBLE_DEVICES"] = device_id
    elif instance_kind == "CPU" and config.device == "auto":
        return config.model_copy(update={"device": "cpu"})
    return config


def _unload(model_name: str) -> None:
    """Makes Triton report the model as not ready: possible with --model-control-mode=explicit only."""
    try:
        pb_utils.unload_model(model_name)
    except Exception as error:
        logger.error("model %s stays loaded and refuses every request: %s", model_name, error)
