"""What a request waits for before a step computes it, in which order, and how long at most."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.engine.queue_deadlines import QueueDeadlines
from deepinfer_backend.errors import DeepInferError, EngineError, InvalidRequestError, RequestCancelledError
from tests.support.engine_driver import EngineDriver, engine_request
from tests.support.lora import TARGET_MODULES, make_random_adapter
from tests.support.models import VOCAB_SIZE, make_random_model

NAMES = ["one", "two", "three", "four"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def lora_modules(model_path: Path) -> dict[str, str]:
    targets = TARGET_MODULES["llama"]
    return {
        name: str(make_random_adapter(model_path, model_path.parent / name, seed=seed, r=4, target_modules=targets))
        for seed, name in enumerate(NAMES)
    }


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def request(
    request_id: str,
    *,
    queue_timeout_s: float | None = None,
    arrival_s: float = 0.0,
    length: int = 10,
    priority: int = 0,
    **params: Any,
) -> EngineRequest:
    fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **params}
    made = engine_request(prompt_of(length), request_id=request_id, priority=priority, **fields)
    return EngineRequest(
        made.request_id,
        made.prompt_token_ids,
        made.sampling_params,
        priority,
        queue_timeout_s=queue_timeout_s,
        arrival_s=arrival_s,
    )


def run_until(driver: EngineDriver, condition: Callable[[], bool], num_rounds: int = 2000) -> None:
    for _ in range(num_rounds):
        if condition():
            return
        driver.round()
    raise AssertionError(f"not within {num_rounds} rounds")


def has_begun(driver: EngineDriver, request_id: str) -> bool:
    """Whether it has an output, or has failed."""
    answer = driver.answer(request_id)
    return isinstance(answer, DeepInferError) or bool(answer)


def assert_expired(driver: EngineDriver, request_id: str, seconds: str) -> None:
    answer = driver.answer(request_id)
    assert isinstance(answer, RequestCancelledError), answer
    assert answer.reason == "queue_timeout"
    assert f"queue_timeout of {seconds} s passed before a step began" in answer.message


# ---- queue deadlines ----


def test_a_request_that_no_step_has_begun_fails_when_its_queue_timeout_has_passed(model_path: Path) -> None:
    """One place: the first runs, the second waits in the scheduler; who began in time goes on to the end."""
    with EngineDriver(model_path, max_num_seqs=1) as driver:
        driver.add(request("runs", max_tokens=1900, queue_timeout_s=0.05))
        driver.round()
        started_s = time.monotonic()
        driver.add(request("waits", queue_timeout_s=0.2))
        driver.add(request("patient", queue_timeout_s=1000.0))
        run_until(driver, lambda: has_begun(driver, "waits"))
        assert 0.2 <= time.monotonic() - started_s < 1.0
        assert_expired(driver, "waits", "0.2")
        driver.abort("runs")
        driver.drain()
        assert len(driver.answer("patient")[0].token_ids) == 4  # type: ignore[index]
        driver.check_nothing_is_left()


def test_a_queue_timeout_counts_from_the_arrival_at_the_frontend(model_path: Path) -> None:
    with EngineDriver(model_path) as driver:
        driver.add(request("late", queue_timeout_s=5.0, arrival_s=time.monotonic() - 6.0))
        driver.add(request("in time", queue_timeout_s=5.0, arrival_s=time.monotonic() - 1.0))
        driver.drain()
        assert_expired(driver, "late", "5")
        assert len(driver.answer("in time")[0].token_ids) == 4  # type: ignore[index]
        driver.check_nothing_is_left()


def test_a_request_that_was_preempted_has_begun(model_path: Path) -> None:
    args: dict[str, Any] = {"num_gpu_blocks_override": 12, "block_size": 4, "enable_prefix_caching": False}
    with EngineDriver(model_path, **args) as driver:
        for name in ("a", "b"):
            driver.add(request(name, length=12, max_tokens=30, queue_timeout_s=0.5))
        run_until(driver, lambda: driver.engine.scheduler.num_preemptions > 0)
        time.sleep(0.5)
        driver.drain()
        assert [len(driver.answer(name)[0].token_ids) for name in ("a", "b")] == [30, 30]  # type: ignore[index]


def test_a_request_that_waits_for_its_adapter_has_a_queue_timeout(
    model_path: Path, lora_modules: dict[str, str]
) -> None:
    with EngineDriver(model_path, lora_modules=lora_modules, max_loras=1) as driver:
        driver.add(request("runs", max_tokens=500, lora_name="one"))
        driver.add(request("waits", lora_name="two", queue_timeout_s=0.1))
        run_until(driver, lambda: has_begun(driver, "waits"))
        assert_expired(driver, "waits", "0.1")
        driver.abort("runs")
        driver.drain()
        driver.check_nothing_is_left()


def test_what_is_remembered_of_deadlines_is_bounded_by_the_requests_that_count() -> None:
    deadlines = QueueDeadlines()
    for number in range(10_000):
        deadlines.add(request_with_deadline(str(number), 1000.0))
        deadlines.discard(str(number))
    assert len(deadlines) <= 1024
    deadlines.add(request_with_deadline("again", 1e-9))
    deadlines.add(request_with_deadline("again", 1000.0))
    deadlines.add(request_with_deadline("due", 1e-9))
    time.sleep(0.001)
    assert [deadline.request_id for deadline in deadlines.take_expired()] == ["due"]
    assert deadlines.take_expired() == []


def request_with_deadline(request_id: str, timeout_s: float) -> EngineRequest:
    return EngineRequest(request_id, np.array([1], np.int32), SamplingParams(), queue_timeout_s=timeout_s)


# ---- adapters ----


def test_requests_for_more_adapters_than_fit_wait_in_order_and_hold_up_nobody_else(
    model_path: Path, lora_modules: dict[str, str]
) -> None:
    with EngineDriver(model_path, lora_modules=lora_modules, max_loras=1, max_num_seqs=8) as driver:
        driver.add(request("first", max_tokens=40, lora_name="one"))
        for name in ("two", "three", "four"):
            driver.add(request(name, max_tokens=20, lora_name=name))
        driver.add(request("base"))
        driver.add(request("in memory", lora_name="one"))
        run_until(driver, lambda: has_begun(driver, "base") and has_begun(driver, "in memory"))
        assert not has_begun(driver, "two")
        begun: list[str] = []
        while driver.engine.has_unfinished_requests():
            driver.round()
            begun += [name for name in NAMES if name not in begun and name != "one" and has_begun(driver, name)]
        driver.drain()
        assert begun == ["two", "three", "four"]
        driver.check_nothing_is_left()


def test_requests_whose_adapter_is_in_memory_do_not_overtake_for_ever(
    model_path: Path, lora_modules: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_backend.engine.waiting_requests._MAX_OVERTAKEN_S", 0.1)
    with EngineDriver(model_path, lora_modules=lora_modules, max_loras=1, max_num_seqs=4) as driver:
        driver.add(request("0", lora_name="one", max_tokens=8))
        driver.add(request("starving?", lora_name="two"))
        number = 0

        def keep_one_in_use() -> bool:
            nonlocal number
            if has_begun(driver, str(number)):
                number += 1
                driver.add(request(str(number), lora_name="one", max_tokens=8))
            return has_begun(driver, "starving?")

        run_until(driver, keep_one_in_use)
        assert number > 1, "nobody overtook: the test shows nothing"
        driver.drain()
        driver.check_nothing_is_left()


def test_an_urgent_request_gets_a_place_for_its_adapter_first(model_path: Path, lora_modules: dict[str, str]) -> None:
    with EngineDriver(model_path, lora_modules=lora_modules, max_loras=1) as driver:
        driver.add(request("first", max_tokens=20, lora_name="one"))
        driver.add(request("later", lora_name="two", priority=1))
        driver.add(request("urgent", lora_name="three", priority=-1))
        run_until(driver, lambda: has_begun(driver, "urgent"))
        assert not has_begun(driver, "later")
        driver.drain()


def test_a_request_can_be_aborted_while_it_waits_for_a_place(model_path: Path, lora_modules: dict[str, str]) -> None:
    with EngineDriver(model_path, lora_modules=lora_modules, max_loras=1) as driver:
        driver.add(request("runs", max_tokens=20, lora_name="one"))
        driver.add(request("aborted", lora_name="two"))
        driver.add(request("last", lora_name="three"))
        assert driver.engine.get_num_unfinished_requests() == 3
        assert driver.engine.stats().num_waiting == 3
        driver.abort("aborted")
        with pytest.raises(InvalidRequestError, match="'last' is that of an unfinished request"):
            driver.engine.add_request(request("last"))
        driver.drain()
        assert len(driver.answer("last")[0].token_ids) == 4  # type: ignore[index]
        driver.check_nothing_is_left()


def test_a_waiting_adapter_that_cannot_be_loaded_fails_its_request_and_the_next_one_goes_on(
    model_path: Path, lora_modules: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = make_random_adapter(model_path, tmp_path / "gone", seed=9, r=4, target_modules=["q_proj"])
    modules = {**lora_modules, "gone": str(gone)}
    with EngineDriver(model_path, lora_modules=modules, max_loras=1) as driver:
        (gone / "adapter_config.json").unlink()
        driver.add(request("runs", max_tokens=20, lora_name="one"))
        driver.add(request("fails", lora_name="gone"))
        driver.add(request("works", lora_name="two"))
        driver.drain()
        assert isinstance(driver.answer("fails"), EngineError)
        assert len(driver.answer("works")[0].token_ids) == 4  # type: ignore[index]
        assert any("request fails:" in record.getMessage() for record in caplog.records)
        driver.check_nothing_is_left()


# ---- the prefix cache's salt ----


def num_cached_tokens(llm: LLM, **params: Any) -> int:
    (completion,) = llm.complete(
        prompt_token_ids=[prompt_of(100)],
        sampling_params=SamplingParams(max_tokens=1, **params),
        use_tqdm=False,
    )
    return completion.num_cached_tokens


def test_a_tenant_finds_his_own_prefixes_in_the_cache_and_nobody_elses(
    model_path: Path, lora_modules: dict[str, str]
) -> None:
    with LLM(str(model_path), dtype="float32", lora_modules=lora_modules) as llm:
        # Salts that a careless joining of adapter and salt would mistake for one another.
        tenants: list[dict[str, Any]] = [
            {},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"cache_salt": "1:"},
            {"cache_salt": "1:a"},
            {"cache_salt": "lora 1"},
            {"lora_name": "one"},
            {"lora_name": "one", "cache_salt": "a"},
            {"lora_name": "one", "cache_salt": "1:a"},
            {"lora_name": "two", "cache_salt": "a"},
        ]
        assert [num_cached_tokens(llm, **tenant) for tenant in tenants] == [0] * len(tenants)
        assert all(num_cached_tokens(llm, **tenant) > 0 for tenant in tenants)
