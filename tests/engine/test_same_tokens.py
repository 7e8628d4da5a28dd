"""Greedy tokens equal transformers' own `generate` in float32, however the engine batches, chunks, preempts, caches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.models.loader import resolve_model
from tests.support.models import FAMILIES, VOCAB_SIZE
from tests.support.oracle import TransformersOracle

Case = tuple[list[int], int]  # prompt, most new tokens
ModelAndCases = tuple[Path, list[Case], list[list[int]]]

BATCHING: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one at a time": {"max_num_seqs": 1},
    "tiny prefill budget": {"max_num_batched_tokens": 24},
    "large prefill budget": {"max_num_batched_tokens": 16384},
    "no prefix cache": {"enable_prefix_caching": False},
    "few blocks": {"num_gpu_blocks_override": 0},  # replaced by what the longest case needs
    "small blocks": {"block_size": 3, "max_num_batched_tokens": 100},
}


def run(path: Path, cases: list[Case], **engine_args: Any) -> tuple[list[list[int]], int]:
    """→ (each case's new tokens, how often a sequence was preempted)."""
    with LLM(str(path), decode_sequence=False, dtype="float32", **engine_args) as llm:
        results: Any = llm.generate(
            prompt_token_ids=[prompt for prompt, _ in cases],
            sampling_params=[SamplingParams(temperature=0, max_tokens=limit) for _, limit in cases],
            use_tqdm=False,
        )
        scheduler = llm.llm_engine.scheduler
        assert scheduler.num_free_blocks == scheduler.num_blocks
        return [[output.token_id for output in result] for result in results], scheduler.num_preemptions


def blocks_for_the_longest(cases: list[Case], block_size: int = 16) -> int:
    return max(-(-(len(prompt) + limit) // block_size) for prompt, limit in cases)


def random_cases(num_cases: int, max_prompt_len: int, max_new_tokens: int, seed: int) -> list[Case]:
    """Lengths spread over all sizes; every fourth prompt begins like the one before it."""
    rng = random.Random(seed)
    cases: list[Case] = []
    for index in range(num_cases):
        length = round(max_prompt_len ** (index / (num_cases - 1)))
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        if index % 4 == 3:
            shared = cases[-1][0]
            prompt[: len(shared)] = shared[: len(prompt)]
        cases.append((prompt, rng.choice([1, 2, 7, 31, max_new_tokens])))
    rng.shuffle(cases)
    return cases


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_random_models_equal_transformers(
    random_model: Callable[[str], ModelAndCases],
    family: str,
    batching: str,
    zero_overhead_scheduling: bool,
) -> None:
    path, cases, expected = random_model(family)
    engine_args = dict(BATCHING[batching], zero_overhead_scheduling=zero_overhead_scheduling)
    if batching == "few blocks":
        engine_args["num_gpu_blocks_override"] = blocks_for_the_longest(cases)
    tokens, num_preemptions = run(path, cases, **engine_args)
    assert tokens == expected
    assert (num_preemptions > 0) == (batching == "few blocks")


TEXTS = [
    "The history of the Roman Empire began when",
    "def quicksort(items):\n    ",
    "世界上最高的山是",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "Q: What is 17 times 23?\nA:",
    "import numpy as np\n\nx = np.",
    "Paris is to France as Tokyo is to",
    "👩‍🔬 Science is",
]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, list[Case], list[list[int]]]:
    """64 prompts of 1 to 1,500 tokens with 1 to 256 new ones, and transformers' answers."""
    from transformers import AutoTokenizer

    path = resolve_model(None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rng = random.Random(11)
    texts = [tokenizer(text)["input_ids"] for text in TEXTS]
    filler = [token for text in texts for token in text]
    cases: list[Case] = []
    for index in range(64):
        if index < 40:
            prompt = texts[index % len(texts)][: rng.randint(1, 20)]
        else:
            length = rng.randint(30, 300) if index < 60 else rng.randint(1000, 1500)
            prompt = [rng.choice(filler) for _ in range(length - 8)] + texts[index % len(texts)][:8]
        cases.append((prompt, 256 if index == 50 else rng.choice([1, 5, 16, 40])))
    oracle = TransformersOracle(path)
    return path, cases, [oracle.greedy(prompt, limit) for prompt, limit in cases]


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16384},
        {"zero_overhead_scheduling": False, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 0},
    ],
    ids=["defaults", "one at a time", "no prefix cache, large chunks", "no zos, small chunks, few blocks"],
)
def test_tokens_of_smollm2_equal_transformers(
    smollm2: tuple[Path, list[Case], list[list[int]]], engine_args: dict[str, Any]
) -> None:
    path, cases, expected = smollm2
    has_few_blocks = "num_gpu_blocks_override" in engine_args
    if has_few_blocks:
        engine_args = {**engine_args, "num_gpu_blocks_override": blocks_for_the_longest(cases)}
    tokens, num_preemptions = run(path, cases, **engine_args)
    assert tokens == expected
    assert (num_preemptions > 0) == has_few_blocks
