"""A request's answer depends on nothing but the request: not on its neighbours, nor on how the engine runs them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from deepinfer_backend.engine.messages import EmbeddingParams, EngineRequest
from tests.support.engine_driver import Answer, EngineDriver, assert_same_answer, engine_request
from tests.support.lora import TARGET_MODULES, make_random_adapter
from tests.support.models import VOCAB_SIZE, make_random_model

NUM_REQUESTS = 48
MAX_TOKENS = 20
LONGEST_PROMPT = 300
SHARED_PREFIX = 40

ALONE: dict[str, Any] = {"zero_overhead_scheduling": False, "enable_prefix_caching": False}
TOGETHER: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no zos": {"zero_overhead_scheduling": False},
    "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "few blocks": {"num_gpu_blocks_override": -(-(LONGEST_PROMPT + MAX_TOKENS) // 16)},
    "few small blocks, no zos": {
        "block_size": 3,
        "num_gpu_blocks_override": -(-(LONGEST_PROMPT + MAX_TOKENS) // 3),
        "zero_overhead_scheduling": False,
    },
    "small blocks": {"block_size": 3, "max_num_batched_tokens": 100},
    "fewer places than a request has sequences": {"max_num_seqs": 3},
}


def random_params(rng: random.Random) -> dict[str, Any]:
    """Fields of SamplingParams, each of them in about a third of all requests."""

    def tokens(num: int) -> list[int]:
        return rng.sample(range(VOCAB_SIZE), num)

    choices: dict[str, Callable[[], Any]] = {
        "top_k": lambda: rng.choice([2, 20, 200]),
        "top_p": lambda: rng.choice([0.3, 0.9]),
        "min_p": lambda: rng.choice([0.01, 0.2]),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.choice([0.7, 1.5]),
        "logit_bias": lambda: {token: rng.uniform(-20, 20) for token in tokens(30)},
        "allowed_token_ids": lambda: tokens(100),
        "bad_words_token_ids": lambda: [[token] for token in tokens(50)] + [tokens(2) for _ in range(10)],
        "stop_token_ids": lambda: tokens(40),
        "min_tokens": lambda: rng.choice([1, 6]),
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.choice([0, 3]),
        "prompt_logprobs": lambda: rng.choice([0, 2]),
        "lora_name": lambda: rng.choice(["one", "two"]),
        "n": lambda: rng.choice([2, 5]),
    }
    params = {name: choose() for name, choose in choices.items() if rng.random() < 1 / 3}
    params["temperature"] = rng.choice([0, 0.7, 1.0, 1.5])
    params["seed"] = rng.getrandbits(64)
    params["max_tokens"] = rng.choice([1, 7, MAX_TOKENS])
    params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
    if rng.random() < 1 / 4:
        params["beam_width"] = max(params.get("n", 1), rng.choice([2, 4]))
        params["length_penalty"] = rng.choice([0.0, 1.0, 2.0])
        params["early_stopping"] = rng.choice([False, True, "never"])
        params.pop("logprobs", None)
        params.pop("prompt_logprobs", None)
    return params


def random_requests() -> list[EngineRequest]:
    rng = random.Random(5)
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(SHARED_PREFIX)]
    requests = []
    for index in range(NUM_REQUESTS):
        length = round(LONGEST_PROMPT ** (index / (NUM_REQUESTS - 1)))
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        if rng.random() < 0.5:
            prompt[: len(prefix)] = prefix[:length]
        fields = random_params(rng)
        if rng.random() < 1 / 8:
            fields = {name: value for name, value in fields.items() if name == "lora_name"}
            fields["embedding"] = EmbeddingParams(rng.choice([None, 10]))
        requests.append(engine_request(prompt, request_id=str(index), priority=rng.choice([0, 0, 0, 1]), **fields))
    rng.shuffle(requests)
    return requests


REQUESTS = random_requests()


@pytest.fixture(scope="module")
def engine_args(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    path = make_random_model("qwen3", folder)
    targets = TARGET_MODULES["qwen3"]
    adapters = {
        "one": make_random_adapter(path, folder / "one", seed=1, r=8, lora_alpha=8, target_modules=targets),
        "two": make_random_adapter(path, folder / "two", seed=2, r=4, lora_alpha=4, target_modules=targets[:3]),
    }
    return {"model": path, "lora_modules": {name: str(adapter) for name, adapter in adapters.items()}}


@pytest.fixture(scope="module")
def expected(engine_args: dict[str, Any]) -> dict[str, Answer]:
    """Each request's answer when there is no other."""
    with EngineDriver(**engine_args, **ALONE) as driver:
        answers = {request.request_id: driver.run([request])[0] for request in REQUESTS}
    sequences = [sequence for answer in answers.values() if isinstance(answer, list) for sequence in answer]
    # Else there was little to compare.
    assert {sequence.finish_reason for sequence in sequences} == {"stop", "length"}
    assert len({tuple(sequence.token_ids) for sequence in sequences}) > len(sequences) / 2
    return answers


def check_same(driver: EngineDriver, requests: list[EngineRequest], expected: dict[str, Answer]) -> None:
    for request, answer in zip(requests, driver.run(requests), strict=True):
        try:
            assert_same_answer(answer, expected[request.request_id])
        except AssertionError as error:
            raise AssertionError(f"{error}\nof {request}") from None
    driver.check_nothing_is_left()


@pytest.mark.parametrize("how", TOGETHER)
def test_answers_are_the_same_together_as_alone(
    engine_args: dict[str, Any], expected: dict[str, Answer], how: str
) -> None:
    with EngineDriver(**engine_args, **TOGETHER[how]) as driver:
        check_same(driver, REQUESTS, expected)
        assert (driver.engine.scheduler.num_preemptions > 0) == ("few" in how)
        # What the first run left in the prefix cache.
        num_cached_tokens = driver.engine.scheduler.num_cached_tokens
        check_same(driver, REQUESTS[::-1], expected)
        assert driver.engine.scheduler.num_cached_tokens > num_cached_tokens


def test_answers_do_not_depend_on_who_came_when(engine_args: dict[str, Any], expected: dict[str, Answer]) -> None:
    rng = random.Random(1)
    with EngineDriver(**engine_args, max_num_seqs=24, max_num_batched_tokens=128) as driver:
        for attempt in range(2):
            requests = [replace(request, request_id=f"{attempt} {request.request_id}") for request in REQUESTS]
            rng.shuffle(requests)
            for request in requests:
                driver.add(request)
                for _ in range(rng.choice([0, 0, 1, 3])):
                    driver.round()
            driver.drain()
            for request in requests:
                assert_same_answer(driver.answer(request.request_id), expected[request.request_id.split()[1]])
            driver.check_nothing_is_left()
