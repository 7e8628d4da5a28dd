"""One model on several ranks: the tokens of transformers and of one rank, whatever a request asks for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.errors import ConfigError, EngineDeadError, EngineError
from deepinfer_backend.outputs import Logprobs
from tests.engine.test_same_tokens import Case, ModelAndCases, blocks_for_the_longest
from tests.support.models import make_similar_model
from tests.support.processes import children_of
from tests.support.triton_server import wait_until


@contextmanager
def on_ranks(model: Path | None, num_ranks: int, **engine_args: Any) -> Iterator[LLM]:
    args = {"num_gpu_blocks_override": 64, "dtype": "float32", "device": "cpu", **engine_args}
    path = None if model is None else str(model)
    with LLM(path, decode_sequence=False, tensor_parallel_size=num_ranks, **args) as llm:
        yield llm


def greedy(llm: LLM, cases: list[Case]) -> list[list[int]]:
    results: Any = llm.generate(
        prompt_token_ids=[prompt for prompt, _ in cases],
        sampling_params=[SamplingParams(temperature=0, max_tokens=limit) for _, limit in cases],
        use_tqdm=False,
    )
    return [[output.token_id for output in result] for result in results]


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"zero_overhead_scheduling": False, "num_gpu_blocks_override": 0},
        {"max_num_batched_tokens": 48, "enable_prefix_caching": False},
        {"kv_cache_dtype": "float32", "data_parallel_size": 2, "data_parallel_lockstep": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=["default", "no zos, few blocks", "chunks", "two engines in lockstep", "n-grams"],
)
def test_tokens_equal_transformers(random_model: Callable[[str], ModelAndCases], engine_args: dict[str, Any]) -> None:
    path, cases, expected = random_model("llama")
    if engine_args.get("num_gpu_blocks_override") == 0:
        engine_args = {**engine_args, "num_gpu_blocks_override": blocks_for_the_longest(cases)}
    with on_ranks(path, 2, **engine_args) as llm:
        assert greedy(llm, cases) == expected


@pytest.mark.parametrize("family", ["gemma3", "mixtral", "qwen3"])
def test_tokens_equal_transformers_for_other_families(
    random_model: Callable[[str], ModelAndCases], family: str
) -> None:
    """Gemma 3 and Mixtral by transformers' own plan."""
    path, cases, expected = random_model(family)
    with on_ranks(path, 2) as llm:
        assert greedy(llm, cases) == expected


def test_a_draft_model_proposes_on_the_leader_alone(
    random_model: Callable[[str], ModelAndCases], tmp_path: Path
) -> None:
    path, cases, expected = random_model("llama")
    similar = make_similar_model(path, tmp_path)
    speculation = {"method": "draft_model", "model": str(similar), "num_speculative_tokens": 2}
    with on_ranks(path, 2, speculative_config=speculation) as llm:
        assert greedy(llm, cases) == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("auto", 0.2)], ids=["float32", "4-bit"])
def test_bundled_model_on_three_ranks_says_what_it_says_on_one(dtype: str, tolerance: float) -> None:
    """SmolLM2 has nine heads that share three keys and values. Inputs of 4-bit products are rounded to 8 bits, which
    makes the smallest difference larger.
    """
    prompts = ["The capital of France is Paris, which lies on the Seine", "def fibonacci(n):\n    if n < 2:"]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, prompt_logprobs=0)
    completions = []
    for num_ranks in (1, 3):
        with on_ranks(None, num_ranks, dtype=dtype) as llm:
            completions.append(llm.complete(prompts, params, use_tqdm=False))
    for one, three in zip(*completions, strict=True):
        assert one.prompt_logprobs is not None and three.prompt_logprobs is not None
        np.testing.assert_allclose(logprobs(one.prompt_logprobs), logprobs(three.prompt_logprobs), atol=tolerance)
        if dtype == "float32":
            assert one.sequences[0].token_ids == three.sequences[0].token_ids


def logprobs(positions: list[Logprobs | None]) -> list[float]:
    return [entries[0].logprob for entries in positions if entries is not None]


def test_heads_that_ranks_cannot_share_are_refused(random_model: Callable[[str], ModelAndCases]) -> None:
    path, _, _ = random_model("llama")
    message = r"tensor_parallel_size is 3: the model's num_heads, 4, must be a multiple"
    with pytest.raises(EngineError, match=message), on_ranks(path, 3):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [("lora_modules", {"a": "/nowhere"}), ("speculative_config", {"method": "mtp", "num_speculative_tokens": 1})],
)
def test_what_is_not_shared_among_ranks_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is 2: must be 1 with {field}"):
        LLM(tensor_parallel_size=2, **{field: value})


def test_a_rank_that_dies_takes_its_engine_with_it(random_model: Callable[[str], ModelAndCases]) -> None:
    path, _, _ = random_model("llama")
    with on_ranks(path, 2) as llm:
        leader, follower = process_ids(llm)
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            llm.generate(
                prompt_token_ids=[[5, 6, 7]] * 4,
                sampling_params=SamplingParams(max_tokens=400, ignore_eos=True),
                use_tqdm=False,
            )
    assert not Path(f"/proc/{leader}").exists()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["", "stopped"])
def test_a_leader_that_dies_takes_its_ranks_with_it(
    random_model: Callable[[str], ModelAndCases], is_stopped: bool
) -> None:
    path, _, _ = random_model("llama")
    with on_ranks(path, 2) as llm:
        leader, follower = process_ids(llm)
        if is_stopped:
            os.kill(follower, signal.SIGSTOP)
        os.kill(leader, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{follower}").exists(), 10, "the other rank has ended")


def process_ids(llm: LLM) -> tuple[int, int]:
    """Of the leader and the other rank."""
    (leader,) = llm._client.process_ids  # type: ignore[attr-defined]
    (follower,) = children_of(leader)
    return leader, follower
