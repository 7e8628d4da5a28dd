"""A request with an adapter gets what PEFT's merged model generates, whoever else is in the batch and the cache."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.errors import EngineError, InvalidRequestError
from tests.support.engine_driver import EngineDriver, engine_request
from tests.support.lora import TARGET_MODULES, make_random_adapter, merged_model
from tests.support.models import VOCAB_SIZE, make_random_model
from tests.support.oracle import TransformersOracle

MAX_TOKENS = 12
NAMES = ["one", "two", "three", "four"]
Expected = Callable[[str | None, int], list[int]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def adapters(model_path: Path) -> dict[str, Path]:
    targets = TARGET_MODULES["llama"]
    return {
        name: make_random_adapter(
            model_path, model_path.parent / name, seed=seed, r=2 + seed, lora_alpha=8, target_modules=targets[seed:]
        )
        for seed, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def expected(model_path: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """(adapter or None, length of the prompt) → the greedy tokens of PEFT's merged model."""
    folder = tmp_path_factory.mktemp("merged")

    @cache
    def oracle(name: str | None) -> TransformersOracle:
        if name is None:
            return TransformersOracle(model_path)
        path = folder / name
        model: Any = merged_model(model_path, adapters[name])
        model.save_pretrained(path)
        return TransformersOracle(path)

    @cache
    def tokens(name: str | None, length: int) -> list[int]:
        return oracle(name).greedy(random_prompt(length), MAX_TOKENS, ignore_eos=True)

    return tokens


def random_prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def params(name: str | None, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "lora_name": name, **fields}
    )


def open_llm(model_path: Path, adapters: dict[str, Path], **engine_args: Any) -> LLM:
    modules = {name: str(folder) for name, folder in adapters.items()}
    return LLM(str(model_path), dtype="float32", lora_modules=modules, **engine_args)


def generate(llm: LLM, cases: list[tuple[str | None, int]]) -> list[list[int]]:
    completions = llm.complete(
        prompt_token_ids=[random_prompt(length) for _, length in cases],
        sampling_params=[params(name) for name, _ in cases],
        use_tqdm=False,
    )
    return [completion.sequences[0].token_ids for completion in completions]


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"zero_overhead_scheduling": False, "max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 38, "block_size": 3},
        {"max_num_seqs": 2},
    ],
    ids=["defaults", "no zos, small chunks", "few blocks", "two places"],
)
def test_batch_of_base_and_adapters_gets_the_tokens_of_merged_models(
    model_path: Path, adapters: dict[str, Path], expected: Expected, engine_args: dict[str, Any]
) -> None:
    cases: list[tuple[str | None, int]] = [
        (name, length) for length in (1, 30, 100) for name in (None, "one", "two", "three")
    ]
    random.Random(1).shuffle(cases)
    with open_llm(model_path, adapters, **engine_args) as llm:
        assert generate(llm, cases) == [expected(*case) for case in cases]
        assert (llm.llm_engine.scheduler.num_preemptions > 0) == ("num_gpu_blocks_override" in engine_args)
    assert len({tuple(expected(name, 30)) for name in (None, "one", "two", "three")}) == 4


def test_more_adapters_than_fit_in_memory_take_turns(
    model_path: Path, adapters: dict[str, Path], expected: Expected
) -> None:
    with open_llm(model_path, adapters, max_loras=2) as llm:
        for pair in (["one", "two"], ["three", "two"], ["four", "one"], ["three", "four"], ["one", "two"]):
            cases: list[tuple[str | None, int]] = [(name, 30) for name in [*pair, None, *pair]]
            assert generate(llm, cases) == [expected(*case) for case in cases]


def test_requests_for_more_adapters_than_fit_at_once_wait_for_a_place(
    model_path: Path, adapters: dict[str, Path], expected: Expected
) -> None:
    modules = {name: str(folder) for name, folder in adapters.items()}
    with EngineDriver(model_path, lora_modules=modules, max_loras=2) as driver:
        names = ["one", "two", "three", "four", "one", "three"]
        answers: list[Any] = driver.run(
            [
                engine_request(random_prompt(30), request_id=str(index), **params(name).model_dump(exclude_unset=True))
                for index, name in enumerate(names)
            ]
        )
        assert [answer[0].token_ids for answer in answers] == [expected(name, 30) for name in names]
        driver.check_nothing_is_left()


@pytest.mark.parametrize("names", [[None, "one", "two"], ["one", None, "two", "one"]], ids=str)
def test_what_the_prefix_cache_holds_of_one_adapter_is_not_used_for_another(
    model_path: Path, adapters: dict[str, Path], expected: Expected, names: list[str | None]
) -> None:
    prompt = random_prompt(100)
    with open_llm(model_path, adapters) as llm:
        seen: set[str | None] = set()
        for name in names:
            (completion,) = llm.complete(prompt_token_ids=[prompt], sampling_params=params(name), use_tqdm=False)
            assert completion.sequences[0].token_ids == expected(name, 100)
            assert (completion.num_cached_tokens > 0) == (name in seen)
            seen.add(name)


def test_an_adapter_that_was_unloaded_and_changed_is_not_found_in_the_prefix_cache(
    model_path: Path, adapters: dict[str, Path], expected: Expected, tmp_path: Path
) -> None:
    changing = tmp_path / "changing"
    shutil.copytree(adapters["one"], changing)
    with open_llm(model_path, {"changing": changing, "two": adapters["two"]}, max_loras=1) as llm:
        assert generate(llm, [("changing", 100)]) == [expected("one", 100)]
        assert generate(llm, [("two", 100)]) == [expected("two", 100)]
        shutil.rmtree(changing)
        shutil.copytree(adapters["three"], changing)
        assert generate(llm, [("changing", 100)]) == [expected("three", 100)]


@pytest.mark.parametrize(
    "kind", [{"n": 3, "temperature": 1.0, "seed": 5}, {"beam_width": 3, "n": 3}, {"logprobs": 2}], ids=str
)
def test_adapter_works_with_sequences_beams_and_logprobs(
    model_path: Path, adapters: dict[str, Path], tmp_path: Path, kind: dict[str, Any]
) -> None:
    merged: Any = merged_model(model_path, adapters["two"])
    merged.save_pretrained(tmp_path)
    prompts = [random_prompt(20), random_prompt(5)]
    with LLM(str(tmp_path), dtype="float32") as llm:
        expected = llm.complete(prompt_token_ids=prompts, sampling_params=params(None, **kind), use_tqdm=False)
    with open_llm(model_path, adapters) as llm:
        found = llm.complete(prompt_token_ids=prompts, sampling_params=params("two", **kind), use_tqdm=False)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours.sequences) == kind.get("n", 1)
        for our_sequence, their_sequence in zip(ours.sequences, theirs.sequences, strict=True):
            assert our_sequence.token_ids == their_sequence.token_ids
            assert our_sequence.cumulative_logprob == pytest.approx(their_sequence.cumulative_logprob, abs=1e-3)


def test_unknown_adapter_is_refused_with_the_known_ones(model_path: Path, adapters: dict[str, Path]) -> None:
    with open_llm(model_path, adapters) as llm:
        with pytest.raises(InvalidRequestError, match="lora_name is 'onee': must be one of 'one', 'two'"):
            generate(llm, [(None, 5), ("onee", 5)])
        assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_adapter_that_can_no_longer_be_read_fails_its_request_alone(
    model_path: Path, adapters: dict[str, Path], expected: Expected, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(adapters["one"], gone)
    modules = {"gone": str(gone), "two": str(adapters["two"])}
    with EngineDriver(model_path, lora_modules=modules, max_loras=1) as driver:
        shutil.rmtree(gone)
        for _ in range(2):  # the failed one has taken no place
            failed, answer, base = driver.run(
                [
                    engine_request(
                        random_prompt(30), request_id=str(index), **params(name).model_dump(exclude_unset=True)
                    )
                    for index, name in enumerate(["gone", "two", None])
                ]
            )
            assert isinstance(failed, EngineError)
            assert "lora_name 'gone' cannot be loaded" in failed.message
            assert isinstance(answer, list)
            assert isinstance(base, list)
            assert answer[0].token_ids == expected("two", 30)
            assert base[0].token_ids == expected(None, 30)
            driver.check_nothing_is_left()
