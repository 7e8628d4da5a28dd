"""The weights of a safetensors folder are those that safetensors itself reads, by transformers' names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.safetensors_weights import SafetensorsWeights
from tests.support.models import make_random_model


@pytest.mark.parametrize("max_shard_size", ["1GB", "200KB"])
def test_weights_are_those_of_the_model_in_however_many_files(tmp_path: Path, max_shard_size: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_random_model("llama", tmp_path))
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (max_shard_size == "200KB")
    weights = SafetensorsWeights(folder)
    expected = model.state_dict()
    assert weights.names() == frozenset(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights.tensor(name), tensor)
        assert torch.equal(weights.matrix(name), tensor)


def test_a_model_saved_without_its_output_layer_has_the_same_names(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_random_model("llama", tmp_path))
    model.model.save_pretrained(tmp_path / "base")
    assert SafetensorsWeights(tmp_path / "base").names() == frozenset(model.state_dict()) - {"lm_head.weight"}


def test_tensors_are_as_they_are_stored(tmp_path: Path) -> None:
    path = make_random_model("llama", tmp_path)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    weights = SafetensorsWeights(path)
    assert all(torch.equal(weights.tensor(name), tensor) for name, tensor in stored.items())


def test_a_weight_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = make_random_model("llama", tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"{path} lacks the weight model\.norm\.bias"):
        SafetensorsWeights(path).tensor("model.norm.bias")
