"""An adapter's folder that cannot be used is refused with the adapter, the field or tensor, its value and the limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_backend.errors import ConfigError
from deepinfer_backend.models.lora_adapter import read_lora_adapter, read_lora_layout
from tests.support.lora import edit_config, make_random_adapter
from tests.support.models import make_random_model

Q_PROJ_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
Q_PROJ_B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Path:
    return make_random_adapter(llama, tmp_path / "adapter", seed=1, r=8, lora_alpha=16, target_modules=["q_proj"])


def read_error(folder: Path, max_lora_rank: int = 64) -> str:
    messages = []
    for read in (read_lora_layout, read_lora_adapter):
        with pytest.raises(ConfigError) as error:
            read("summaries", folder, max_lora_rank)
        messages.append(error.value.message)
    assert messages[0] == messages[1]
    assert messages[0].startswith("LoRA adapter 'summaries': ")
    assert str(folder) in messages[0]
    return messages[0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peft_type", "LOHA", "peft_type is 'LOHA': must be 'LORA'"),
        ("peft_type", None, "peft_type is None: must be 'LORA'"),
        ("r", 0, "r is 0: must be at least 1"),
        ("r", 2.5, "r is 2.5: must be an integer"),
        ("lora_alpha", "much", "lora_alpha is 'much': must be a number"),
        ("lora_alpha", float("inf"), "lora_alpha is inf: must be a finite number"),
        ("use_rslora", "maybe", "use_rslora is 'maybe': must be true or false"),
        ("rank_pattern", {"q_proj": 0}, "rank_pattern.q_proj is 0: must be at least 1"),
        ("rank_pattern", {"(": 4}, "rank_pattern has the key '(': must be a regular expression"),
        ("alpha_pattern", {"[": 4}, "alpha_pattern has the key '[': must be a regular expression"),
        ("alpha_pattern", 3, "alpha_pattern is 3: must be an object"),
        ("bias", "all", "bias is 'all': must be 'none'"),
        ("bias", "lora_only", "bias is 'lora_only': must be 'none'"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights is 'pissa_niter_4': must be True, False, 'gaussian'"),
        ("init_lora_weights", "loftq", "init_lora_weights is 'loftq': must be"),
        ("use_dora", True, "use_dora is True: is not supported"),
        ("lora_bias", True, "lora_bias is True: is not supported"),
        ("fan_in_fan_out", True, "fan_in_fan_out is True: is not supported"),
        ("modules_to_save", ["lm_head"], "modules_to_save is ['lm_head']: is not supported"),
        ("trainable_token_indices", [3], "trainable_token_indices is [3]: is not supported"),
        ("alora_invocation_tokens", [1, 2], "alora_invocation_tokens is [1, 2]: is not supported"),
        ("layer_replication", [[0, 2], [1, 3]], "layer_replication is [[0, 2], [1, 3]]: is not supported"),
        ("target_parameters", ["experts.w"], "target_parameters is ['experts.w']: is not supported"),
        ("use_qalora", True, "use_qalora is True: is not supported"),
        ("kasa_config", {"beta": 1}, "kasa_config is {'beta': 1}: is not supported"),
        ("of_a_later_peft", "on", "of_a_later_peft is 'on': is not supported"),
    ],
    ids=str,
)
def test_field_that_is_wrong_or_not_supported_is_refused_by_name(
    field: str, value: Any, message: str, adapter: Path
) -> None:
    edit_config(adapter, **{field: value})
    assert message in read_error(adapter)


def edit_tensors(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}),
            "tensor 'base_model.model.lm_head.w",
        ),
        (lambda t: t.update({Q_PROJ_B.replace("weight", "bias"): torch.ones(2)}), "lora_B.bias' is not supported"),
        (
            lambda t: t.update({Q_PROJ_A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(2)}),
            "lora_magnitude_vector' is not supported: must be the lora_A.weight or lora_B.weight of a module",
        ),
        (lambda t: t.pop(Q_PROJ_A), f"tensor '{Q_PROJ_A}' is missing"),
        (lambda t: t.pop(Q_PROJ_B), f"tensor '{Q_PROJ_B}' is missing"),
        (lambda t: t.clear(), "adapter_model.safetensors has no tensors"),
        (lambda t: t.update({Q_PROJ_A: torch.ones(8)}), "lora_A of model.layers.1.self_attn.q_proj has shape [8]"),
        (
            lambda t: t.update({Q_PROJ_A: torch.ones(7, 64)}),
            "q_proj have shapes [7, 64] and [64, 8]: do not fit the rank of 8 that adapter_config.json gives it",
        ),
        (lambda t: t.update({Q_PROJ_A: torch.ones(8, 64).long()}), "is of I64: must be one of F32, F16, BF16"),
    ],
)
def test_tensor_that_is_missing_unknown_or_of_a_wrong_shape_is_refused_by_name(
    edit: Callable[[dict[str, torch.Tensor]], object], message: str, adapter: Path
) -> None:
    edit_tensors(adapter, edit)
    assert message in read_error(adapter)


def only_pickle(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


def truncate(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda adapter: adapter.rename(adapter.with_name("elsewhere")), "there is no such folder"),
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (
            lambda adapter: (adapter / "adapter_config.json").write_text("{"),
            "adapter_config.json cannot be read as JSON",
        ),
        (
            lambda adapter: (adapter / "adapter_config.json").write_text("[]"),
            "adapter_config.json is not a JSON object",
        ),
        (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (only_pickle, "adapter_model.bin is a pickle, which can run code and is never loaded"),
        (truncate, "adapter_model.safetensors is damaged or incomplete"),
    ],
)
def test_file_that_is_missing_or_damaged_is_refused_by_name(
    damage: Callable[[Path], object], message: str, adapter: Path
) -> None:
    damage(adapter)
    assert message in read_error(adapter)


def test_rank_over_the_limit_is_refused_with_both(llama: Path, tmp_path: Path) -> None:
    folder = make_random_adapter(
        llama, tmp_path / "adapter", seed=1, r=4, target_modules=["q_proj"], rank_pattern={"layers.1.*q_proj": 16}
    )
    assert (
        "the rank of model.layers.1.self_attn.q_proj is 16: must be at most max_lora_rank, 15"
        in read_error(folder, max_lora_rank=15)
    )  # fmt: skip
    assert len(read_lora_layout("summaries", folder, 16).modules) == 3


def test_fields_that_say_how_it_was_trained_have_no_effect(adapter: Path) -> None:
    before = read_lora_layout("summaries", adapter, 64)
    edit_config(adapter, lora_dropout=0.3, task_type="CAUSAL_LM", revision="main", inference_mode=True, use_dora=False)
    assert read_lora_layout("summaries", adapter, 64) == before


def test_adapter_of_an_old_peft_needs_few_fields(adapter: Path) -> None:
    before = read_lora_layout("summaries", adapter, 64)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "enable_lora": None}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert read_lora_layout("summaries", adapter, 64) == before
