"""Multi-token-prediction modules: drafts of their own layer, which change how fast tokens come, and none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from deepinfer_backend import LLM
from deepinfer_backend.errors import UnsupportedModelError
from tests.engine.test_same_tokens import BATCHING, random_cases, run
from tests.speculation.greedy import GreedyCases
from tests.support.models import VOCAB_SIZE
from tests.support.oracle import TransformersOracle

HIDDEN_SIZE = 64
NUM_LAYERS = 3


def module_weights(layer_weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """layer_weights: of its decoder layer, by their names within it."""
    generator = torch.Generator().manual_seed(5)
    own = {
        "enorm.weight": 1 + 0.1 * torch.randn(HIDDEN_SIZE, generator=generator),
        "hnorm.weight": 1 + 0.1 * torch.randn(HIDDEN_SIZE, generator=generator),
        "shared_head.norm.weight": 1 + 0.1 * torch.randn(HIDDEN_SIZE, generator=generator),
        "eh_proj.weight": 0.2 * torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE, generator=generator),
    }
    return {f"model.layers.{NUM_LAYERS}.{name}": value for name, value in {**layer_weights, **own}.items()}


def make_module_folder(model: Path, folder: Path) -> Path:
    """A module of the model's kind: its first layer once more."""
    prefix = "model.layers.0."
    weights = load_file(model / "model.safetensors")
    layer = {name.removeprefix(prefix): value.clone() for name, value in weights.items() if name.startswith(prefix)}
    save_file(module_weights(layer), folder / "model.safetensors")
    return folder


def make_deepseek_with_module(folder: Path) -> Path:
    """A random DeepSeek-V3 of three layers, and as the fourth in its checkpoint the module."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=NUM_LAYERS + 1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    model = DeepseekV3ForCausalLM(config)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **module_weights({})}, folder / "model.safetensors", metadata={"format": "pt"})
    config.num_hidden_layers = NUM_LAYERS
    config.save_pretrained(folder)
    return folder


def mtp(num_speculative_tokens: int, folder: Path | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}
    return {"speculative_config": config if folder is None else {**config, "model": str(folder)}}


@pytest.fixture(scope="module")
def module(random_model: GreedyCases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_module_folder(random_model.path, tmp_path_factory.mktemp("module"))


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize(
    ("batching", "num_speculative_tokens"),
    [*((batching, 2) for batching in BATCHING), ("defaults", 1), ("defaults", 8)],
)
def test_greedy_tokens_of_a_native_model_equal_transformers(
    random_model: GreedyCases,
    module: Path,
    batching: str,
    num_speculative_tokens: int,
    zero_overhead_scheduling: bool,
) -> None:
    random_model.check(
        batching, zero_overhead_scheduling=zero_overhead_scheduling, **mtp(num_speculative_tokens, module)
    )


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("num_speculative_tokens", [1, 3])
def test_greedy_tokens_of_a_deepseek_equal_transformers(tmp_path: Path, num_speculative_tokens: int) -> None:
    path = make_deepseek_with_module(tmp_path)
    cases = random_cases(12, 200, 60, seed=4)
    oracle = TransformersOracle(path)
    expected = [oracle.greedy(prompt, limit) for prompt, limit in cases]
    assert run(path, cases, **mtp(num_speculative_tokens))[0] == expected


def test_a_model_without_a_module_is_refused(
    random_model: GreedyCases,
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no multi-token-prediction module: no weight model.layers.3"):
        LLM(str(random_model.path), decode_sequence=False, **mtp(1))
