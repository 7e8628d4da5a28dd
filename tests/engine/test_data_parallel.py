"""Several engine processes behind one `LLM`: the same tokens, and no request is lost."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.errors import ConfigError, EngineDeadError, InvalidRequestError
from tests.engine.test_same_tokens import random_cases
from tests.support.models import make_random_model
from tests.support.oracle import TransformersOracle
from tests.support.triton_server import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models"))


def parallel(model: Path, num_ranks: int, **engine_args: Any) -> LLM:
    engine_args = {"num_gpu_blocks_override": 64, **engine_args}
    return LLM(
        str(model), decode_sequence=False, data_parallel_size=num_ranks, dtype="float32", device="cpu", **engine_args
    )


LOCKSTEP = {"data_parallel_lockstep": True}


@pytest.mark.parametrize(
    ("num_ranks", "engine_args"),
    [
        (2, {}),
        (3, {"zero_overhead_scheduling": False}),
        (2, LOCKSTEP),
        (3, {**LOCKSTEP, "zero_overhead_scheduling": False, "num_gpu_blocks_override": 28}),
    ],
    ids=["2", "3, no zos", "2 in lockstep", "3 in lockstep, no zos, few blocks"],
)
def test_tokens_equal_transformers(model: Path, num_ranks: int, engine_args: dict[str, Any]) -> None:
    cases = random_cases(24, 400, 48, seed=3)
    oracle = TransformersOracle(model)
    with parallel(model, num_ranks, **engine_args) as llm:
        results: Any = llm.generate(
            prompt_token_ids=[prompt for prompt, _ in cases],
            sampling_params=[SamplingParams(temperature=0, max_tokens=limit) for _, limit in cases],
            use_tqdm=False,
        )
    assert [[output.token_id for output in result] for result in results] == [
        oracle.greedy(prompt, limit) for prompt, limit in cases
    ]


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
def test_ranks_with_no_one_and_forty_requests_make_the_same_steps(model: Path, zero_overhead_scheduling: bool) -> None:
    """And a rank without any gives nothing out, and leaves no trace in its cache."""
    oracle = TransformersOracle(model)
    asked = {"alone": ([5, 6, 7], 80), **{f"{index}": ([8, 9, index], 3) for index in range(40)}}
    tokens: dict[str, list[int]] = defaultdict(list)
    with parallel(model, 3, **LOCKSTEP, zero_overhead_scheduling=zero_overhead_scheduling) as llm:
        client: Any = llm._client
        for request_id, (prompt, limit) in asked.items():
            params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
            request = EngineRequest(request_id, np.array(prompt, np.int32), params)
            client.add(1 if request_id == "alone" else 2, request)
        while sum(map(len, tokens.values())) < sum(limit for _, limit in asked.values()):
            for output in client.get_outputs(5.0).outputs:
                tokens[output.request_id].append(output.token_id)
        wait_until(lambda: client.get_outputs(1.0) and len(steps_made(client)) == 1, 5, "all are equal")
        (num_steps,) = steps_made(client)
        assert 80 <= num_steps < 140
        assert [stats.num_generation_tokens for _, stats in sorted(client._stats.items())] == [0, 80, 120]
        assert [stats.num_used_blocks for stats in client._stats.values()] == [0, 0, 0]
    for request_id, (prompt, limit) in asked.items():
        assert tokens[request_id] == oracle.greedy(prompt, limit, ignore_eos=True)


def steps_made(client: Any) -> set[int]:
    """By each rank, as far as it has told."""
    return {stats.num_steps for stats in client._stats.values()}


def test_requests_without_a_seed_draw_apart_and_those_with_one_alike(model: Path) -> None:
    with parallel(model, 2) as llm:
        sampled, seeded = (
            llm.complete(
                prompt_token_ids=[[5, 6, 7]] * 2,
                sampling_params=SamplingParams(max_tokens=30, ignore_eos=True, seed=seed),
                use_tqdm=False,
            )
            for seed in (None, 3)
        )
    assert sampled[0].sequences[0].token_ids != sampled[1].sequences[0].token_ids
    assert seeded[0].sequences[0].token_ids == seeded[1].sequences[0].token_ids


def test_after_a_stream_that_was_left_and_a_bad_prompt_the_next_is_right(model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with parallel(model, 2) as llm:
        stream: Any = llm._stream(llm._requests([[5, 6, 7]] * 6, SamplingParams(max_tokens=500, ignore_eos=True)))
        next(stream)
        stream.close()
        with pytest.raises(InvalidRequestError, match="prompt 1"):
            llm.generate(prompt_token_ids=[[5], [99_999]], sampling_params=params, use_tqdm=False)
        (completion,) = llm.complete(prompt_token_ids=[[5, 6, 7]], sampling_params=params, use_tqdm=False)
        assert not llm._client._router._assignments  # type: ignore[attr-defined]
    assert completion.sequences[0].token_ids == TransformersOracle(model).greedy([5, 6, 7], 20, ignore_eos=True)


def test_a_rank_that_dies_is_an_error_and_no_process_stays(model: Path) -> None:
    check_death_of_a_rank(parallel(model, 2))


def check_death_of_a_rank(opened: LLM) -> None:
    """Closes it, too."""
    with opened as llm:
        pids = llm._client.process_ids  # type: ignore[attr-defined]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            llm.generate(
                prompt_token_ids=[[5, 6, 7]] * 4,
                sampling_params=SamplingParams(max_tokens=400, ignore_eos=True),
                use_tqdm=False,
            )
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_more_ranks_than_devices_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(
        ConfigError, match="data_parallel_size is 3 and tensor_parallel_size 1: they need 3 devices, and 2 are visible"
    ):
        parallel(model, 3)
