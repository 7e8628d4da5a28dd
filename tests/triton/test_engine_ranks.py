"""Several fake engines behind one frontend: each request has one of them, and the death of one is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.messages import BlocksArrived, BlockSource, EngineStats, Prompted
from deepinfer_backend.errors import ConfigError, InvalidRequestError
from tests.support.fake_engine import FakeEngine, output
from tests.support.fake_frontend import Engines, assert_failed, running_frontend
from tests.support.fake_triton import MetricFamily, Request, TritonError
from tests.support.triton_server import wait_until

from deepinfer_backend.triton.frontend import Frontend  # isort: skip (after fake_triton)


@contextmanager
def ranks(num_ranks: int, **config: int) -> Iterator[tuple[Frontend, Engines, list[FakeEngine]]]:
    """A frontend, what starts its engines, and those that it has started, in no order of their ranks."""
    engines = Engines()
    with running_frontend(engines, data_parallel_size=num_ranks, **config) as frontend:
        yield frontend, engines, [engines.next() for _ in range(num_ranks)]


def send(frontend: Frontend, count: int) -> list[Request]:
    requests = [Request(input_ids=[index + 1]) for index in range(count)]
    frontend.accept(requests)
    return requests


def taken(engine: FakeEngine, count: int) -> list[str]:
    return [engine.next_request().request_id for _ in range(count)]


def test_requests_are_shared_and_each_is_answered() -> None:
    with ranks(3) as (frontend, _, engines):
        requests = send(frontend, 12)
        ids_of = [taken(engine, 4) for engine in engines]
        for engine, request_ids in zip(engines, ids_of, strict=True):
            engine.step(*(output(request_id, 5, "LENGTH") for request_id in request_ids))
        for request in requests:
            request.sender.wait()
            assert request.sender.num_finals == 1 and request.sender.error is None


def test_a_request_that_is_cancelled_is_aborted_where_it_is() -> None:
    with ranks(2) as (frontend, _, engines):
        requests = send(frontend, 2)
        ids = [taken(engine, 1)[0] for engine in engines]
        for request in requests:
            request.sender.cancelled = True
        for engine, request_id in zip(engines, ids, strict=True):
            wait_until(lambda engine=engine, request_id=request_id: request_id in engine.aborted, 5, "aborted")  # type: ignore[misc]
            assert len(set(engine.aborted)) == 1


def test_the_death_of_a_rank_is_that_of_its_own_requests_alone() -> None:
    with ranks(2) as (frontend, starter, engines):
        starter.may_start.clear()
        requests = send(frontend, 8)
        dying, other = engines
        taken(dying, 4)
        other_ids = taken(other, 4)
        dying.die()
        wait_until(lambda: sum(request.sender.num_finals for request in requests) == 4, 5, "half of them have failed")
        assert frontend.is_available()
        late = send(frontend, 3)
        for request_id in [*other_ids, *taken(other, 3)]:
            other.step(output(request_id, 5, "LENGTH"))
        for request in late:
            request.sender.wait()
            assert request.sender.error is None
        failed = [request for request in requests if request.sender.error is not None]
        assert len(failed) == 4
        for request in failed:
            assert_failed(request, TritonError.INTERNAL, "INTERNAL: ")
        starter.may_start.set()
        starter.next()


def test_with_all_ranks_gone_nothing_is_taken_and_the_model_is_given_up() -> None:
    with ranks(2, max_engine_restarts=0) as (frontend, starter, engines):
        engines[0].die()
        engines[1].die()
        assert starter.gave_up.wait(10)
        (request,) = send(frontend, 1)
        assert_failed(request, TritonError.UNAVAILABLE, "failed too often")


def test_clients_are_told_of_a_restart_as_long_as_one_engine_comes_back() -> None:
    with ranks(2, max_engine_restarts=1) as (frontend, starter, engines):
        supervisors = frontend._ranks._supervisors
        doomed: Any = supervisors[1]._client
        doomed.die()
        starter.next().die()
        wait_until(supervisors[1].is_given_up, 5, "one is given up")
        starter.may_start.clear()
        next(engine for engine in engines if engine is not doomed).die()
        wait_until(lambda: not frontend.is_available(), 5, "the other one has ended")
        (request,) = send(frontend, 1)
        assert_failed(request, TritonError.UNAVAILABLE, "restarting; try again")
        starter.may_start.set()
        starter.next()


def test_with_one_rank_given_up_the_others_go_on() -> None:
    with ranks(2, max_engine_restarts=0) as (frontend, starter, engines):
        engines[0].die()
        wait_until(lambda: len(frontend._ranks.available()) == 1, 5, "one is left")
        requests = send(frontend, 2)
        for request_id in taken(engines[1], 2):
            engines[1].step(output(request_id, 5, "LENGTH"))
        for request in requests:
            request.sender.wait()
            assert request.sender.error is None
        assert not starter.gave_up.is_set()


@contextmanager
def one_prefills(num_decoding: int) -> Iterator[tuple[Frontend, FakeEngine, list[FakeEngine]]]:
    """A frontend, the engine that prefills, and those that decode, whose next ones do not start."""
    with ranks(1 + num_decoding, num_prompt_engines=1, max_engine_restarts=0) as (frontend, _, engines):
        supervisors = frontend._ranks._supervisors
        by_rank: list[Any] = [supervisor._client for supervisor in supervisors]
        assert set(by_rank) == set(engines)
        yield frontend, by_rank[0], by_rank[1:]


def prompted(request_id: str) -> Prompted:
    return Prompted(request_id, 5, 0, 1, BlockSource("ipc://nowhere", 1))


def hand_over(frontend: Frontend, prefilling: FakeEngine) -> tuple[Request, str]:
    """A request whose first token is there."""
    (request,) = send(frontend, 1)
    (request_id,) = taken(prefilling, 1)
    prefilling.step(output(request_id, 5), results=[prompted(request_id)])
    return request, request_id


def test_a_request_is_handed_over_and_its_blocks_are_kept_until_they_have_arrived() -> None:
    with one_prefills(1) as (frontend, prefilling, (decoding,)):
        request, request_id = hand_over(frontend, prefilling)
        handed = decoding.next_request()
        assert handed.prompted == prompted(request_id)
        assert prefilling.aborted == []
        decoding.step(results=[BlocksArrived(request_id)])
        decoding.step(output(request_id, 6, "LENGTH", output_index=1))
        request.sender.wait()
        assert request.sender.num_finals == 1 and request.sender.error is None
        assert prefilling.aborted == [request_id]


def test_a_third_engine_gets_what_another_died_of_before_it_had_the_blocks() -> None:
    with one_prefills(2) as (frontend, prefilling, decoding):
        request, request_id = hand_over(frontend, prefilling)
        first = next(engine for engine in decoding if wait_for_request(engine))
        first.die()
        (other,) = (engine for engine in decoding if engine is not first)
        assert other.next_request().prompted == prompted(request_id)
        other.step(output(request_id, 6, "LENGTH", output_index=1), results=[BlocksArrived(request_id)])
        request.sender.wait()
        assert request.sender.error is None and prefilling.aborted == [request_id]


def wait_for_request(engine: FakeEngine) -> bool:
    try:
        engine.next_request(timeout_s=0.5)
    except Empty:
        return False
    return True


def test_without_an_engine_that_decodes_it_fails_and_nothing_is_kept() -> None:
    with one_prefills(1) as (frontend, prefilling, (decoding,)):
        request, request_id = hand_over(frontend, prefilling)
        decoding.next_request()
        decoding.die()
        assert_failed(request, TritonError.UNAVAILABLE, "no engine is running")
        wait_until(lambda: request_id in prefilling.aborted, 5, "its blocks are given back")
        assert not frontend.is_available()


def test_one_that_is_refused_where_it_was_to_be_decoded_leaves_nothing_behind() -> None:
    with one_prefills(1) as (frontend, prefilling, (decoding,)):
        request, request_id = hand_over(frontend, prefilling)
        decoding.next_request()
        decoding.refuse(request_id, InvalidRequestError("prompt_token_ids: too long"))
        assert_failed(request, TritonError.INVALID_ARG, "prompt_token_ids: too long")
        wait_until(lambda: request_id in prefilling.aborted, 5, "its blocks are given back")


def test_one_that_is_cancelled_on_its_way_is_aborted_at_both_ends() -> None:
    with one_prefills(1) as (frontend, prefilling, (decoding,)):
        request, request_id = hand_over(frontend, prefilling)
        decoding.next_request()
        request.sender.cancelled = True
        for engine in (prefilling, decoding):
            wait_until(lambda engine=engine: request_id in engine.aborted, 5, "aborted")  # type: ignore[misc]


def test_metrics_are_those_of_all_ranks() -> None:
    with ranks(2) as (_, _, engines):
        engines[0].step(stats=EngineStats(num_running=2, num_generation_tokens=10, block_size=16, num_blocks=50))
        engines[1].step(stats=EngineStats(num_running=1, num_generation_tokens=7, block_size=16, num_blocks=50))
        wait_until(lambda: MetricFamily.values.get("deepinfer_requests_running", [])[-1:] == [3], 5, "published")
        assert sum(MetricFamily.values["deepinfer_generation_tokens_total"]) == 17
        assert 16 in MetricFamily.values["nv_trt_llm_kv_cache_block_metrics"]


def test_a_rank_that_does_not_start_ends_the_others() -> None:
    engines = Engines()
    started: list[FakeEngine] = []

    def start(config: EngineConfig, rank: int) -> FakeEngine:
        if rank == 1:
            raise ConfigError("data_parallel_size is 3: too few devices")
        started.append(FakeEngine(config))
        return started[-1]

    engines.start = start  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="too few devices"), running_frontend(engines, data_parallel_size=3):
        pass
    assert all(engine.is_closed for engine in started) and len(started) == 2
