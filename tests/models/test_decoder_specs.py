"""What the native decoder must know of a model is read through transformers once, and anew when it may be another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deepinfer_backend.models.decoder_specs import read_decoder_spec
from deepinfer_backend.models.llama_family import DecoderSpec
from deepinfer_backend.models.loader import load_config

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoders"


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, rope_parameters=YARN).save_pretrained(
        tmp_path / "model"
    )
    return tmp_path / "model"


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often transformers was asked."""
    reads: list[Path] = []

    def counted(path: Path) -> object:
        reads.append(path)
        return load_config(path)

    monkeypatch.setattr("deepinfer_backend.models.decoder_specs.load_config", counted)
    return lambda: len(reads)


def test_a_kept_spec_is_what_transformers_says(folder: Path, num_reads: Callable[[], int]) -> None:
    read_decoder_spec(folder)
    kept = read_decoder_spec(folder)
    assert num_reads() == 1
    assert isinstance(kept, DecoderSpec)
    assert (kept.num_kv_heads, kept.head_dim, kept.windows, kept.tied) == (4, 16, (0, 0, 0), False)
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig.from_pretrained(folder), torch.device("cpu"))
    assert torch.equal(torch.tensor(kept.inv_freq), inv_freq)
    assert kept.rotary_scaling == scaling


def test_a_changed_configuration_is_read_anew(folder: Path) -> None:
    before = read_decoder_spec(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}), encoding="utf-8")
    after = read_decoder_spec(folder)
    assert isinstance(before, DecoderSpec)
    assert isinstance(after, DecoderSpec)
    assert (before.rms_norm_eps, after.rms_norm_eps) == (1e-6, 0.25)


def test_what_is_not_computed_is_asked_again(folder: Path, num_reads: Callable[[], int]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}), encoding="utf-8")
    assert [read_decoder_spec(folder) for _ in range(2)] == ["hidden_act is 'gelu'"] * 2
    assert num_reads() == 2


@pytest.mark.parametrize("content", [b"", b"{}", b'{"hidden_size": "64"}'])
def test_a_damaged_spec_is_replaced(folder: Path, cache: Path, content: bytes, num_reads: Callable[[], int]) -> None:
    spec = read_decoder_spec(folder)
    (kept,) = cache.iterdir()
    kept.write_bytes(content)
    assert [read_decoder_spec(folder) for _ in range(2)] == [spec] * 2
    assert num_reads() == 2


def test_a_cache_that_cannot_be_written_is_done_without(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "file"))
    assert isinstance(read_decoder_spec(folder), DecoderSpec)
