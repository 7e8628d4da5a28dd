"""The engine's counters count tokens: what comes out without one is not among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_backend.engine.messages import EmbeddingParams
from deepinfer_backend.errors import EngineError
from tests.support.engine_driver import EngineDriver, engine_request
from tests.support.models import FAMILIES, make_random_model

PROMPT = list(range(3, 103))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(next(iter(FAMILIES)), tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[True, False], ids=["zos", "no zos"])
def driver(model: Path, request: pytest.FixtureRequest) -> Iterator[EngineDriver]:
    # The prompt takes several steps.
    with EngineDriver(model, max_num_batched_tokens=32, zero_overhead_scheduling=request.param) as driver:
        yield driver


def test_generated_tokens_are_those_that_came_out(driver: EngineDriver) -> None:
    answers = driver.run(
        [
            engine_request(PROMPT, request_id="plain", max_tokens=5, ignore_eos=True),
            engine_request(PROMPT[::-1], request_id="two", max_tokens=4, ignore_eos=True, n=2),
            engine_request(PROMPT[:9], request_id="beams", max_tokens=3, ignore_eos=True, beam_width=3, n=2),
            engine_request(PROMPT[5:], request_id="logprobs", max_tokens=2, ignore_eos=True, logprobs=2),
        ]
    )
    num_tokens = sum(len(sequence.token_ids) for answer in answers if isinstance(answer, list) for sequence in answer)
    assert num_tokens == 5 + 2 * 4 + 2 * 3 + 2
    assert driver.engine.stats().num_generation_tokens == num_tokens


def test_the_token_that_an_embedding_samples_is_not_counted(driver: EngineDriver) -> None:
    answers = driver.run(
        [
            engine_request(PROMPT, request_id="embedding", embedding=EmbeddingParams()),
            engine_request(PROMPT[:7], request_id="short", embedding=EmbeddingParams()),
            engine_request([9, 8, 7], request_id="tokens", max_tokens=3, ignore_eos=True),
        ]
    )
    assert all(isinstance(answer, list) for answer in answers)
    assert driver.engine.stats().num_generation_tokens == 3
    assert driver.engine.stats().num_prompt_tokens == 100 + 7 + 3


def test_outputs_of_a_failed_step_are_not_counted(driver: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise RuntimeError("injected")

    driver.add(engine_request([3, 4, 5], request_id="failed", max_tokens=50, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.worker._runner._model, "forward", out_of_memory)
        driver.drain()
    assert isinstance(driver.answer("failed"), EngineError)
    assert driver.engine.stats().num_generation_tokens == 0
    driver.run([engine_request([3, 4, 5], request_id="next", max_tokens=2, ignore_eos=True)])
    assert driver.engine.stats().num_generation_tokens == 2


def test_an_owner_learns_the_engines_sizes_with_its_counts(driver: EngineDriver) -> None:
    stats, info = driver.engine.stats(), driver.engine.info
    assert (stats.num_blocks, stats.block_size) == (info.num_blocks, info.block_size)
    assert stats.max_num_seqs == info.config["max_num_seqs"]
