"""A request that fails or is aborted goes as a whole, at any moment, and takes nothing of the others with it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deepinfer_backend.engine.messages import EmbeddingParams, EngineRequest
from deepinfer_backend.errors import EngineError
from tests.support.engine_driver import EngineDriver, assert_same_answer, engine_request
from tests.support.lora import TARGET_MODULES, make_random_adapter
from tests.support.models import VOCAB_SIZE, make_random_model

KINDS: dict[str, dict[str, Any]] = {
    "sequences": {"n": 4, "seed": 1, "temperature": 1.0},
    "edited sequences": {"n": 3, "seed": 2, "temperature": 1.0, "frequency_penalty": 1.0, "logprobs": 2},
    "beams": {"beam_width": 4, "n": 2},
    "edited beams": {"beam_width": 3, "repetition_penalty": 1.2, "lora_name": "adapter"},
    "prompt logprobs": {"prompt_logprobs": 2, "lora_name": "adapter"},
    "embedding": {"embedding": EmbeddingParams()},
}
# Three chunks of prompt, then tokens.
ENGINE_ARGS: dict[str, Any] = {
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": False,
}
NUM_MOMENTS = 9


@pytest.fixture(scope="module")
def model_args(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    path = make_random_model("llama", folder)
    targets = TARGET_MODULES["llama"]
    # Two adapters and room for one: a request that has ended and still holds its own would show.
    modules = {
        name: str(make_random_adapter(path, folder / name, seed=seed, r=4, target_modules=targets))
        for seed, name in enumerate(["adapter", "other"])
    }
    return {"model": path, "lora_modules": modules, "max_loras": 1}


def request_of(kind: str, request_id: str, length: int = 70) -> EngineRequest:
    rng = random.Random(length)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    fields = {**KINDS[kind]}
    if "embedding" not in fields:
        fields = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}
    return engine_request(prompt, request_id=request_id, **fields)


def bystanders() -> list[EngineRequest]:
    return [request_of("sequences", "by 1", 20), request_of("beams", "by 2", 11)]


def check_adapter_is_not_in_use(driver: EngineDriver) -> None:
    (answer,) = driver.run([engine_request([5, 6], request_id="after", lora_name="other", max_tokens=2)])
    assert isinstance(answer, list), answer


@contextmanager
def broken_model(driver: EngineDriver) -> Iterator[None]:
    """Every step that is launched meanwhile fails; one that is in flight before does not."""

    def out_of_memory(*_: object) -> torch.Tensor:
        raise RuntimeError("injected")

    worker = driver.engine.worker
    if worker.prev_step_state is not None:
        worker.prev_step_state.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker._runner._model, "forward", out_of_memory)
        yield


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize("kind", KINDS)
def test_abort_at_any_moment_leaves_nothing_behind_and_disturbs_nobody(
    model_args: dict[str, Any], kind: str, zero_overhead_scheduling: bool
) -> None:
    with EngineDriver(**model_args, **ENGINE_ARGS, zero_overhead_scheduling=zero_overhead_scheduling) as driver:
        expected = driver.run(bystanders())
        for num_rounds, others in itertools.product(range(NUM_MOMENTS), [[], bystanders()]):
            for request in [request_of(kind, "aborted"), *others]:
                driver.add(request)
            for _ in range(num_rounds):
                driver.round()
            driver.abort("aborted")
            driver.drain()
            for request, answer in zip(others, expected, strict=False):
                assert_same_answer(driver.answer(request.request_id), answer)
            driver.check_nothing_is_left()
        check_adapter_is_not_in_use(driver)


@pytest.mark.parametrize("kind", KINDS)
def test_aborted_while_preempted_or_waiting_leaves_nothing_behind(model_args: dict[str, Any], kind: str) -> None:
    args = {**ENGINE_ARGS, "num_gpu_blocks_override": 24, "max_num_seqs": 5, "enable_prefix_caching": True}
    with EngineDriver(**model_args, **args) as driver:
        for num_rounds in range(1, 40, 5):
            for index in range(3):
                driver.add(request_of(kind, str(index)))
            for _ in range(num_rounds):
                driver.round()
            for index in (2, 0, 1):
                driver.abort(str(index))
                driver.round()
            driver.drain()
            driver.check_nothing_is_left()
        check_adapter_is_not_in_use(driver)


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize("kind", ["sequences", "edited sequences"])
def test_one_sequence_that_is_ended_from_outside_leaves_the_others_alone(
    model_args: dict[str, Any], kind: str, zero_overhead_scheduling: bool
) -> None:
    """As a stop string ends it."""
    with EngineDriver(**model_args, **ENGINE_ARGS, zero_overhead_scheduling=zero_overhead_scheduling) as driver:
        (whole,) = driver.run([request_of(kind, "whole")])
        assert isinstance(whole, list)
        expected = [sequence for sequence in whole if sequence.sequence_index != 1]
        for num_rounds in range(3, NUM_MOMENTS):
            request_id = f"a {num_rounds}"
            driver.add(request_of(kind, request_id))
            for _ in range(num_rounds):
                driver.round()
            driver.end_sequence(request_id, 1)
            driver.drain()
            answer = driver.answer(request_id)
            assert isinstance(answer, list)
            assert_same_answer([sequence for sequence in answer if sequence.sequence_index != 1], expected)
            driver.check_nothing_is_left()


@contextmanager
def broken_host(driver: EngineDriver, part: str) -> Iterator[None]:
    """The host's share in steps with tracked requests fails meanwhile."""

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    target, name = {
        "forward": (driver.engine.worker, "_launch_forward"),
        "plan": (driver.engine.worker, "_plan_sampling"),
        "after_step": (driver.engine._tracked, "after_step"),
    }[part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, fail)
        yield


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize("kind", ["edited sequences", "edited beams", "prompt logprobs", "embedding"])
@pytest.mark.parametrize("part", ["forward", "plan", "after_step"])
def test_what_fails_on_the_host_around_a_step_fails_its_requests_and_the_engine_goes_on(
    model_args: dict[str, Any], part: str, kind: str, zero_overhead_scheduling: bool
) -> None:
    with EngineDriver(**model_args, **ENGINE_ARGS, zero_overhead_scheduling=zero_overhead_scheduling) as driver:
        expected = driver.run(bystanders())
        num_failed = 0
        for num_rounds in range(0, NUM_MOMENTS, 2):
            driver.add(request_of(kind, "failed"))
            for _ in range(num_rounds):
                driver.round()
            with broken_host(driver, part):
                driver.round()
                driver.round()
            for request in bystanders():
                driver.add(request)
            driver.drain()
            error = driver.answer("failed")
            if isinstance(error, EngineError):
                num_failed += 1
                assert "request failed: a step of the engine failed" in str(error)
            for request, answer in zip(bystanders(), expected, strict=True):
                assert_same_answer(driver.answer(request.request_id), answer)
            driver.check_nothing_is_left()
        assert num_failed >= 1
        check_adapter_is_not_in_use(driver)


def test_a_request_that_cannot_be_admitted_when_its_turn_comes_fails_alone(model_args: dict[str, Any]) -> None:
    """It waited for its adapter's place, and half of what it needs is there when something goes wrong."""

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    with EngineDriver(**model_args, **ENGINE_ARGS) as driver:
        (expected,) = driver.run([request_of("edited beams", "alone")])
        driver.add(request_of("edited beams", "first"))
        driver.round()
        driver.add(engine_request([5, 6], request_id="waits", lora_name="other", max_tokens=2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver.engine._tracked._prompt_logprobs, "add", fail)
            driver.drain()
        assert str(driver.answer("waits")).startswith("INTERNAL: request waits: cannot be taken in")
        assert_same_answer(driver.answer("first"), expected)
        driver.check_nothing_is_left()
        check_adapter_is_not_in_use(driver)


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize("kind", KINDS)
def test_failed_step_fails_whole_requests_once_and_the_engine_goes_on(
    model_args: dict[str, Any], kind: str, zero_overhead_scheduling: bool
) -> None:
    with EngineDriver(**model_args, **ENGINE_ARGS, zero_overhead_scheduling=zero_overhead_scheduling) as driver:
        expected = driver.run(bystanders())
        num_failed = 0
        for num_rounds in range(NUM_MOMENTS):
            driver.add(request_of(kind, "failed"))
            for _ in range(num_rounds):
                driver.round()
            if not driver.engine.has_unfinished_requests():
                driver.drain()
                continue
            with broken_model(driver):
                driver.round()
                driver.round()
            # Those that come after the fault are not of the step.
            for request in bystanders():
                driver.add(request)
            driver.drain()
            error = driver.answer("failed")
            num_failed += isinstance(error, EngineError)
            for request, answer in zip(bystanders(), expected, strict=True):
                assert_same_answer(driver.answer(request.request_id), answer)
            driver.check_nothing_is_left()
        assert num_failed >= 3
        check_adapter_is_not_in_use(driver)


def test_requests_that_had_no_part_in_the_failed_step_go_on(model_args: dict[str, Any]) -> None:
    """It is a prefill, and they decode."""
    with EngineDriver(**model_args, **ENGINE_ARGS) as driver:
        expected = driver.run(bystanders())
        for request in bystanders():
            driver.add(request)
        for _ in range(4):
            driver.round()
        for kind in KINDS:
            driver.add(request_of(kind, kind))
        with broken_model(driver):
            driver.round()
        driver.drain()
        failed = [kind for kind in KINDS if isinstance(driver.answer(kind), EngineError)]
        assert failed == ["sequences"]  # 32 tokens of the first prompt
        for request, answer in zip(bystanders(), expected, strict=True):
            assert_same_answer(driver.answer(request.request_id), answer)
        driver.check_nothing_is_left()
        check_adapter_is_not_in_use(driver)


@pytest.mark.parametrize("kind", ["sequences", "edited sequences", "beams", "edited beams"])
def test_failed_step_with_a_part_of_a_requests_sequences_ends_all_of_them(
    model_args: dict[str, Any], kind: str
) -> None:
    with EngineDriver(**model_args, **ENGINE_ARGS, max_num_seqs=2) as driver:
        driver.add(request_of(kind, "failed"))
        # Into a decode step of two sequences, while others of the request have no place.
        while driver.engine.scheduler.num_running < 2 or driver.engine.scheduler.num_waiting == 0:
            driver.round()
        with broken_model(driver):
            driver.round()
            driver.round()
        assert isinstance(driver.answer("failed"), EngineError)
        assert not driver.engine.has_unfinished_requests()
        driver.drain()
        driver.check_nothing_is_left()
        check_adapter_is_not_in_use(driver)


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bad_words_token_ids": [[9]]}, "allowed_token_ids and bad_words"),
        ({"min_tokens": 3, "stop_token_ids": [9]}, "allowed_token_ids and min_tokens"),
        ({"bad_words_token_ids": [[9, 9]], "n": 3, "temperature": 1.0}, "allowed_token_ids and bad_words"),
        ({"bad_words_token_ids": [[9]], "beam_width": 2}, "allowed_token_ids and bad_words"),
    ],
)
def test_a_request_that_leaves_no_token_fails_alone_and_says_why(
    model_args: dict[str, Any], fields: dict[str, Any], named: str, zero_overhead_scheduling: bool
) -> None:
    impossible = {"allowed_token_ids": [9], "temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}
    with EngineDriver(**model_args, **ENGINE_ARGS, zero_overhead_scheduling=zero_overhead_scheduling) as driver:
        expected = driver.run(bystanders())
        answers = driver.run([engine_request([5, 6], request_id="impossible", **impossible), *bystanders()])
        assert str(answers[0]) == f"INVALID_ARG: {named}: together they leave no token to go on with"
        for answer, alone in zip(answers[1:], expected, strict=True):
            assert_same_answer(answer, alone)
        driver.check_nothing_is_left()
