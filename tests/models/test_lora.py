"""Tokens of several adapters in one batch get the logits of PEFT's merged models; the base model's are untouched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_backend.errors import ConfigError
from deepinfer_backend.models.loader import load_model
from deepinfer_backend.models.lora import LoraLayers, plan_lora
from deepinfer_backend.models.lora_adapter import read_lora_adapter, read_lora_layout
from deepinfer_backend.models.transformers_model import ATTENTION_NAME, TransformersModel
from tests.support.lora import TARGET_MODULES, make_random_adapter, merged_model
from tests.support.models import FAMILIES, VOCAB_SIZE, make_random_model
from tests.support.packed_attention import packed_logits

CPU = torch.device("cpu")
MAX_RANK = 64


def make_prompts(lens: Sequence[int]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lens]


LORA_IDS = [0, 1, 2, 0, 1, 2, 0, 1]
PROMPTS = make_prompts([5, 9, 1, 1, 30, 12, 33, 1])


class Model:
    """A model with room for adapters, as a step sees it."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.module = load_model(path, dtype, CPU, ATTENTION_NAME)
        self.layers = LoraLayers(self.module, torch.device("cpu"))
        self._model = TransformersModel(self.module)

    def load(self, lora_id: int, folder: Path) -> None:
        self.layers.load(lora_id, read_lora_adapter(folder.name, folder, MAX_RANK))

    def logits(self, lora_ids: Sequence[int], prompts: Sequence[Sequence[int]] = PROMPTS) -> list[torch.Tensor]:
        """Each prompt's logits [num_tokens, vocab_size], from one batch, with the adapter of its lora_id (0: none)."""
        starts = np.cumsum([0, *map(len, prompts)], dtype=np.int32)
        self.layers.set_step(plan_lora(np.array(lora_ids, dtype=np.int32), starts, CPU))
        return packed_logits(self._model, prompts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return make_random_model("llama", folder)


@cache
def make_adapter(model_path: Path, seed: int, **fields: Any) -> Path:
    return make_random_adapter(
        model_path,
        model_path.parent / f"{model_path.name}-adapter-{seed}",
        seed=seed,
        target_modules=TARGET_MODULES["llama"],
        **fields,
    )


@torch.inference_mode()
def expected_logits(model_path: Path, adapter: Path | None, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    model = merged_model(model_path, adapter)
    return [model(torch.tensor([list(prompt)]), use_cache=False).logits[0] for prompt in prompts]


def assert_equals_merged(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_of_base_and_two_adapters_equals_merged_models(family: str, tmp_path: Path) -> None:
    path = make_random_model(family, tmp_path)
    targets = TARGET_MODULES[family]
    adapters = {
        1: make_random_adapter(path, tmp_path / "one", seed=1, r=8, lora_alpha=16, target_modules=targets),
        2: make_random_adapter(path, tmp_path / "two", seed=2, r=3, lora_alpha=2, target_modules=targets[-2:]),
    }
    model = Model(path)
    for lora_id, adapter in adapters.items():
        model.load(lora_id, adapter)
    actual = model.logits(LORA_IDS)
    base = expected_logits(path, None, PROMPTS)
    for lora_id in (0, 1, 2):
        expected = expected_logits(path, adapters.get(lora_id), PROMPTS)
        rows = [row for row, id_of_row in enumerate(LORA_IDS) if id_of_row == lora_id]
        assert_equals_merged([actual[row] for row in rows], [expected[row] for row in rows])
        if lora_id:  # the adapters do change something, or there was nothing to see
            assert not torch.allclose(expected[rows[0]], base[rows[0]], atol=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 9, "lora_alpha": 5, "use_rslora": True},
        {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.k_proj": 5, r"^model\.layers\.2\.mlp\.up_proj": 4}},
        {"rank_pattern": {"proj": 3, "layers": 3, "attn.q_proj": 3}},  # match no module: only whole parts of a name do
        {"alpha_pattern": {r"layers\.[01]\..*": 40, "down_proj": 1, r".*_proj": 3}},  # the first match decides
        {"use_rslora": True, "rank_pattern": {"v_proj": 16}, "alpha_pattern": {"v_proj": 7, "o_proj": 30}},
        {"layers_to_transform": [0, 2]},
        {"target_modules": r".*\.(1|2)\.self_attn\.[qk]_proj"},
        {"init_lora_weights": "orthogonal"},
    ],
    ids=str,
)
def test_ranks_scalings_and_modules_are_those_of_peft(fields: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    fields = {"r": 8, "lora_alpha": 24, "target_modules": TARGET_MODULES["llama"], **fields}
    adapter = make_random_adapter(llama, tmp_path / "adapter", seed=3, **fields)
    model = Model(llama)
    model.load(1, adapter)
    assert_equals_merged(model.logits([1] * len(PROMPTS)), expected_logits(llama, adapter, PROMPTS))


def test_base_rows_are_the_same_to_the_bit_with_and_without_neighbours_that_use_adapters(llama: Path) -> None:
    model = Model(llama)
    before = model.logits([0] * len(PROMPTS))
    model.load(1, make_adapter(llama, 1))
    model.load(2, make_adapter(llama, 2))
    among_others = model.logits(LORA_IDS)
    alone = model.logits([0] * len(PROMPTS))
    for row, lora_id in enumerate(LORA_IDS):
        assert torch.equal(before[row], alone[row])
        assert torch.equal(before[row], among_others[row]) == (lora_id == 0)


def test_unloaded_adapter_leaves_no_trace_and_the_others_go_on(llama: Path) -> None:
    model = Model(llama)
    before = model.logits([0] * len(PROMPTS))
    model.load(1, make_adapter(llama, 1))
    with_one = model.logits([1] * len(PROMPTS))
    model.load(2, make_adapter(llama, 2))
    model.layers.unload(2)
    assert all(map(torch.equal, with_one, model.logits([1] * len(PROMPTS))))
    model.layers.unload(1)
    assert all(map(torch.equal, before, model.logits([0] * len(PROMPTS))))
    for module in model.module.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.forward == MethodType(torch.nn.Linear.forward, module)


def test_adapter_is_computed_in_the_models_dtype(llama: Path) -> None:
    """Two ways to round in bfloat16: both are about as far from float32."""
    adapter = make_adapter(llama, 1)
    model = Model(llama, torch.bfloat16)
    model.load(1, adapter)
    exact = expected_logits(llama, adapter, PROMPTS)
    merged = merged_model(llama, adapter).to(torch.bfloat16)
    with torch.inference_mode():
        rounded = [merged(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS]
    ours = model.logits([1] * len(PROMPTS))
    assert ours[0].dtype == torch.bfloat16

    def error(logits: list[torch.Tensor]) -> float:
        return float((torch.cat(logits).float() - torch.cat(exact)).square().mean().sqrt())

    assert error(ours) < 2 * error(rounded)


def test_adapter_in_memory_does_not_change_with_its_file(llama: Path, tmp_path: Path) -> None:
    adapter = make_random_adapter(llama, tmp_path / "adapter", seed=4, target_modules=["q_proj"])
    model = Model(llama)
    model.load(1, adapter)
    before = model.logits([1] * len(PROMPTS))
    weights = adapter / "adapter_model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(1000))
    assert all(map(torch.equal, before, model.logits([1] * len(PROMPTS))))


def test_numbers_that_are_not_finite_are_refused_and_nothing_is_loaded(llama: Path, tmp_path: Path) -> None:
    adapter = make_random_adapter(llama, tmp_path / "adapter", seed=4, target_modules=["q_proj", "v_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"][3, 1] = 1e6
    save_file(tensors, adapter / "adapter_model.safetensors")
    Model(llama).load(1, adapter)  # finite in float32
    model = Model(llama, torch.float16)
    before = model.logits([0] * len(PROMPTS))
    message = (
        r"LoRA adapter 'adapter': .*model\.layers\.2\.self_attn\.v_proj has numbers .* not finite in torch\.float16"
    )
    with pytest.raises(ConfigError, match=message):
        model.load(1, adapter)
    assert all(map(torch.equal, before, model.logits([1] * len(PROMPTS))))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("lm_head", "module lm_head is the model's output layer, which cannot take an adapter"),
        ("embed_tokens", "tensor 'base_model.model.model.embed_tokens.lora_embedding_A' is not supported"),
    ],
)
def test_adapter_of_the_embedding_or_the_output_layer_is_refused(
    target: str, message: str, llama: Path, tmp_path: Path
) -> None:
    adapter = make_random_adapter(llama, tmp_path / "adapter", seed=4, target_modules=[target])
    weights = adapter / "adapter_model.safetensors"
    # PEFT adds the base model's own weight of such a layer, which is refused as well.
    save_file({name: tensor for name, tensor in load_file(weights).items() if ".lora_" in name}, weights)
    with pytest.raises(ConfigError) as error:
        Model(llama).layers.check(read_lora_layout("summaries", adapter, MAX_RANK))
    assert message in error.value.message
    assert "LoRA adapter 'summaries'" in error.value.message


def test_experts_of_a_mixture_are_refused(tmp_path: Path) -> None:
    path = make_random_model("mixtral", tmp_path)
    adapter = make_random_adapter(
        path, tmp_path / "adapter", seed=4, target_modules=[], target_parameters=["mlp.experts.down_proj"]
    )
    with pytest.raises(ConfigError, match=r"target_parameters is .*: is not supported"):
        read_lora_layout("experts", adapter, MAX_RANK)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("model.layers.0.mlp.experts.1.w1", "belongs to a mixture's experts, which cannot take an adapter"),
        ("model.layers.7.self_attn.q_proj", "the model has no module model.layers.7.self_attn.q_proj"),
        ("model.layers.0.self_attn", "is a LlamaAttention: must be a Linear"),
        ("model.layers.0.self_attn.k_proj", "has 64 inputs and 32 outputs: the adapter is for 64 and 64"),
    ],
)
def test_adapter_of_another_model_is_refused(module: str, message: str, llama: Path, tmp_path: Path) -> None:
    adapter = make_random_adapter(llama, tmp_path / "adapter", seed=4, target_modules=["q_proj"], layers_to_transform=0)
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("model.layers.0.self_attn.q_proj", module): tensor for name, tensor in tensors.items()}
    save_file(renamed, adapter / "adapter_model.safetensors")
    model = Model(llama)
    with pytest.raises(ConfigError) as error:
        model.layers.check(read_lora_layout("other", adapter, MAX_RANK))
    assert message in error.value.message
    assert "LoRA adapter 'other': " in error.value.message
    with pytest.raises(ConfigError):
        model.load(1, adapter)
