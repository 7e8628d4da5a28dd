"""From a configuration to the drafter that it names."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from deepinfer_backend.errors import ConfigError, UnsupportedModelError, shown
from deepinfer_backend.models.interface import Model
from deepinfer_backend.models.loader import resolve_model
from deepinfer_backend.models.mtp_head import MtpHead
from deepinfer_backend.models.native_model import NativeModel
from deepinfer_backend.models.native_mtp import NativeMtpHead
from deepinfer_backend.models.published_mtp import published_mtp_folder
from deepinfer_backend.models.runnable_model import load_runnable_model, open_weights
from deepinfer_backend.models.safetensors_weights import SafetensorsWeights
from deepinfer_backend.speculation.draft_model import DraftModelDrafter
from deepinfer_backend.speculation.drafter import Drafter
from deepinfer_backend.speculation.mtp import MtpDrafter
from deepinfer_backend.speculation.ngram import NgramDrafter
from deepinfer_backend.speculation.token_history import TokenHistory
from deepinfer_backend.speculative_config import SpeculativeConfig
from deepinfer_backend.worker.device import DeviceStream

DraftSource = Model | MtpHead | None


def load_draft_source(
    config: SpeculativeConfig | None, model: Model, model_path: Path, dtype: torch.dtype, stream: DeviceStream
) -> DraftSource:
    """What a drafter for `model` computes with; None if it looks things up.

    Raises:
        ConfigError: a draft model has not the model's vocabulary.
        UnsupportedModelError: it cannot be run, or there is no such module.
    """
    if config is None or config.method == "ngram":
        return None
    load = _load_draft_model if config.method == "draft_model" else _load_mtp_head
    return stream.submit(lambda: load(config, model, model_path, dtype)).result()


def _load_draft_model(config: SpeculativeConfig, model: Model, _: Path, dtype: torch.dtype) -> Model:
    path = resolve_model(config.model)
    draft_model = load_runnable_model(path, dtype, model.device, dequantize=False, has_adapters=False)
    if draft_model.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative_config.model is {shown(config.model)}, of {draft_model.vocab_size} tokens: "
            f"must have the vocabulary of the model, which has {model.vocab_size}"
        )
    return draft_model


def _load_mtp_head(config: SpeculativeConfig, model: Model, model_path: Path, _: torch.dtype) -> MtpHead:
    if isinstance(model, NativeModel):
        model_source = open_weights(model_path)
        folder = published_mtp_folder(model_path) if config.model is None else Path(config.model)
        source = model_source if folder is None else SafetensorsWeights(folder)
        return NativeMtpHead(model, model_source, source)
    from deepinfer_backend.models.transformers_model import TransformersModel
    from deepinfer_backend.models.transformers_mtp import TransformersMtpHead

    if config.model is not None or not isinstance(model, TransformersModel) or model.mtp_layer is None:
        raise UnsupportedModelError(
            f"speculative_config.model is {shown(config.model)}: only native models take a multi-token-prediction "
            "module from a folder of its own"
        )
    return TransformersMtpHead(model, model.mtp_layer, open_weights(model_path))


def make_drafter(
    config: SpeculativeConfig | None,
    source: DraftSource,
    *,
    max_num_seqs: int,
    max_seq_len: int,
    block_size: int,
    device: torch.device,
) -> Drafter | None:
    """max_seq_len: the most tokens of a sequence."""
    if config is None:
        return None
    if config.method == "mtp":
        return MtpDrafter(cast(MtpHead, source), block_size)
    history = TokenHistory(max_num_seqs, max_seq_len, device)
    if config.method == "draft_model":
        return DraftModelDrafter(cast(Model, source), history, block_size)
    return NgramDrafter(history, min_ngram=config.min_ngram, max_ngram=config.max_ngram)
