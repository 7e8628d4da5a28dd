"""An embedding is transformers' last hidden state of the prompt's last token, scaled to length 1."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_backend import LLM
from deepinfer_backend.engine.messages import EmbeddingParams, EngineRequest
from deepinfer_backend.models.loader import resolve_model
from tests.support.engine_driver import Answer, EngineDriver, engine_request
from tests.support.lora import TARGET_MODULES, make_random_adapter, merged_model
from tests.support.models import FAMILIES, VOCAB_SIZE, make_random_model
from tests.support.oracle import TransformersOracle

LENGTHS = (1, 2, 16, 17, 40, 300)


def random_prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def scaled(hidden_state: torch.Tensor, dimensions: int | None = None) -> list[float]:
    numbers: list[float] = torch.nn.functional.normalize(hidden_state[:dimensions], dim=0).tolist()
    return numbers


def embedding_of(answer: Answer) -> list[float]:
    assert isinstance(answer, list), answer
    (sequence,) = answer
    assert sequence.ends_request
    assert (sequence.token_ids, sequence.finish_reason) == ([], "stop")
    assert sequence.embedding is not None
    return sequence.embedding


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_transformers(family: str, tmp_path: Path) -> None:
    path = make_random_model(family, tmp_path)
    oracle = TransformersOracle(path)
    prompts = [random_prompt(length) for length in LENGTHS]
    with LLM(str(path), dtype="float32") as llm:
        embeddings = llm.embed(prompts, use_tqdm=False)
    for prompt, embedding in zip(prompts, embeddings, strict=True):
        assert embedding == pytest.approx(scaled(oracle.last_hidden_state(prompt)), abs=1e-5)


def test_embeddings_of_texts_equal_transformers() -> None:
    path = resolve_model(None)
    oracle = TransformersOracle(path)
    texts = ["Paris", "The capital of France is Paris.", "A recipe for bread"]
    with LLM(str(path), dtype="float32") as llm:
        embeddings = llm.embed(texts, use_tqdm=False)
        token_ids = [llm.tokenizer(text)["input_ids"] for text in texts]  # type: ignore[misc]
    for prompt, embedding in zip(token_ids, embeddings, strict=True):
        assert embedding == pytest.approx(scaled(oracle.last_hidden_state(prompt)), abs=1e-4)


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"max_num_batched_tokens": 16, "zero_overhead_scheduling": False},
        {"num_gpu_blocks_override": 20},
        {"max_num_seqs": 1, "block_size": 3},
    ],
    ids=["defaults", "small chunks, no zos", "few blocks", "one place"],
)
def test_embeddings_and_generated_tokens_do_not_disturb_each_other(tmp_path: Path, engine_args: dict[str, Any]) -> None:
    path = make_random_model("gemma3", tmp_path)
    oracle = TransformersOracle(path)
    requests: list[EngineRequest] = []
    for length in LENGTHS:
        for dimensions in (None, 1, 10):
            requests.append(
                engine_request(
                    random_prompt(length), request_id=str(len(requests)), embedding=EmbeddingParams(dimensions)
                )
            )
        requests.append(
            engine_request(
                random_prompt(length), request_id=str(len(requests)), temperature=0, max_tokens=12, ignore_eos=True
            )
        )
    with EngineDriver(path, **engine_args) as driver:
        for _ in range(2):  # the second time from the prefix cache
            for request, answer in zip(requests, driver.run(requests), strict=True):
                prompt = request.prompt_token_ids.tolist()
                if request.embedding is None:
                    assert isinstance(answer, list)
                    assert answer[0].token_ids == oracle.greedy(prompt, 12, ignore_eos=True)
                else:
                    expected = scaled(oracle.last_hidden_state(prompt), request.embedding.dimensions)
                    assert embedding_of(answer) == pytest.approx(expected, abs=1e-5)
            driver.check_nothing_is_left()


def test_embeddings_with_an_adapter_are_those_of_the_merged_model(tmp_path: Path) -> None:
    path = make_random_model("llama", tmp_path)
    adapter = make_random_adapter(path, tmp_path / "adapter", seed=1, r=4, target_modules=TARGET_MODULES["llama"])
    merged: Any = merged_model(path, adapter)
    merged.save_pretrained(tmp_path / "merged")
    oracles = {None: TransformersOracle(path), "adapter": TransformersOracle(tmp_path / "merged")}
    cases = [(name, length) for length in LENGTHS for name in oracles]
    with EngineDriver(path, lora_modules={"adapter": str(adapter)}) as driver:
        answers = driver.run(
            [
                engine_request(
                    random_prompt(length), request_id=str(index), embedding=EmbeddingParams(), lora_name=name
                )
                for index, (name, length) in enumerate(cases)
            ]
        )
        driver.check_nothing_is_left()
    for (name, length), answer in zip(cases, answers, strict=True):
        expected = scaled(oracles[name].last_hidden_state(random_prompt(length)))
        assert embedding_of(answer) == pytest.approx(expected, abs=1e-5)
