"""Builds the frontend of a model as Triton describes it, with the real engine behind it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_process import ChildEngineClient
from deepinfer_backend.engine.messages import EngineInfo
from deepinfer_backend.models.loader import load_tokenizer, resolve_tokenizer
from deepinfer_backend.triton.frontend import Frontend
from deepinfer_backend.triton.shutdown_signal import end_with_server

logger = logging.getLogger(__name__)

_TOKENIZER_LIBRARY = "transformers.models.auto.tokenization_auto"


def start_frontend(
    arguments: Mapping[str, Any], *, model_name: str, model_version: str, instance_kind: str, device_id: str
) -> Frontend:
    """Blocks until the engine is ready.

    Raises:
        DeepInferError: the arguments are wrong, or the engine cannot start.
    """
    end_with_server()
    config = _place_on_device(EngineConfig(**arguments), instance_kind, device_id)
    if not config.skip_tokenizer_init:
        # The tokenizer's library takes as long to import as an engine to start: side by side.
        threading.Thread(target=import_module, args=(_TOKENIZER_LIBRARY,), name="deepinfer-import", daemon=True).start()

    def load(info: EngineInfo) -> Any:
        if config.skip_tokenizer_init:
            return None
        return load_tokenizer(resolve_tokenizer(config.tokenizer, Path(info.model_path)))

    return Frontend(
        config,
        model_name=model_name,
        model_version=model_version,
        start_engine=ChildEngineClient,
        load_tokenizer=load,
        give_up=lambda: _unload(model_name),
    )


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
