"""Engines in lockstep that share the experts of a small Mixtral: transformers' tokens, whoever has which experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError, EngineError
from tests.engine.test_data_parallel import check_death_of_a_rank
from tests.engine.test_same_tokens import ModelAndCases
from tests.support.models import make_random_model

SHARED = {"enable_expert_parallel": True}


def sharing_experts(model: Path, num_ranks: int, **engine_args: Any) -> LLM:
    args = {"num_gpu_blocks_override": 64, "dtype": "float32", "device": "cpu", **SHARED, **engine_args}
    return LLM(str(model), decode_sequence=False, data_parallel_size=num_ranks, **args)


@pytest.mark.parametrize(
    ("num_ranks", "engine_args"),
    [
        (2, {}),
        (2, {"zero_overhead_scheduling": False, "max_num_batched_tokens": 48}),
        (4, {"num_gpu_blocks_override": 28}),
        (2, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}),
    ],
    ids=["2", "2, no zos, chunks", "4, few blocks", "2, n-grams"],
)
def test_tokens_equal_transformers(
    random_model: Callable[[str], ModelAndCases], num_ranks: int, engine_args: dict[str, Any]
) -> None:
    path, cases, expected = random_model("mixtral")
    with sharing_experts(path, num_ranks, **engine_args) as llm:
        results: Any = llm.generate(
            prompt_token_ids=[prompt for prompt, _ in cases],
            sampling_params=[SamplingParams(temperature=0, max_tokens=limit) for _, limit in cases],
            use_tqdm=False,
        )
    assert [[output.token_id for output in result] for result in results] == expected


def test_one_request_is_computed_with_the_experts_of_all_ranks(random_model: Callable[[str], ModelAndCases]) -> None:
    """The other ranks have nothing to do but that."""
    path, cases, expected = random_model("mixtral")
    (prompt, limit), tokens = cases[0], expected[0]
    with sharing_experts(path, 2) as llm:
        (result,) = llm.generate(
            prompt_token_ids=[prompt],
            sampling_params=SamplingParams(temperature=0, max_tokens=limit),
            use_tqdm=False,
        )
    assert [output.token_id for output in result] == tokens  # type: ignore[union-attr]


def test_a_rank_that_dies_is_an_error_and_no_process_stays(random_model: Callable[[str], ModelAndCases]) -> None:
    path, _, _ = random_model("mixtral")
    check_death_of_a_rank(sharing_experts(path, 2))


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = make_random_model("llama", tmp_path)
    with pytest.raises(EngineError, match="transformers has no plan to share experts of llama models"):
        sharing_experts(path, 2)


def test_experts_that_ranks_cannot_share_evenly_are_refused(random_model: Callable[[str], ModelAndCases]) -> None:
    path, _, _ = random_model("mixtral")
    with pytest.raises(EngineError, match="4 experts across 3"):
        sharing_experts(path, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "data_parallel_size must be over 1"),
        (
            {"data_parallel_size": 2, "data_parallel_lockstep": False},
            "data_parallel_lockstep must be true, or",
        ),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, "tensor_parallel_size must be 1"),
        ({"data_parallel_size": 2, "lora_modules": {"a": "/nowhere"}}, "lora_modules empty"),
    ],
)
def test_layouts_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{**SHARED, **arguments})
