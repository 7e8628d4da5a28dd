"""The supervisor with fake engines: one that is stuck is missed, ended and replaced, and nobody else is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import numpy as np
import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineOutputs
from deepinfer_backend.engine.messages import EngineRequest, EngineStats
from deepinfer_backend.errors import EngineDeadError, UnavailableError
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.triton import engine_supervisor
from deepinfer_backend.triton.engine_supervisor import EngineSupervisor
from tests.support.fake_engine import FakeEngine
from tests.support.triton_server import wait_until

STEP_TIMEOUT_S = 0.2
NOTICED_S = 2.0  # on a machine with other work
BUSY, IDLE = EngineStats(num_running=1), EngineStats()


class StubbornEngine(FakeEngine):
    """Ends only when the test lets it, as a process in an uninterruptible call."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.kills: SimpleQueue[float] = SimpleQueue()
        self.may_end = threading.Event()
        self.may_end.set()

    def kill(self) -> None:
        self.kills.put(time.monotonic())
        assert self.may_end.wait(10)
        self.die()

    def tell(self, stats: EngineStats | None) -> None:
        self._rounds.put(EngineOutputs([], [], stats))


class Supervised:
    """A supervisor, what it said, and its engines in order."""

    def __init__(self, max_restarts: int) -> None:
        self._config = EngineConfig(step_timeout_s=STEP_TIMEOUT_S, max_engine_restarts=max_restarts)
        self.engines: list[StubbornEngine] = []
        self.deaths: list[EngineDeadError] = []
        self.gave_up = threading.Event()
        self.supervisor = EngineSupervisor(
            self._start,
            name="engine 0",
            on_outputs=lambda outputs: None,
            on_death=self._note_death,
            on_failed=self.gave_up.set,
        )
        self.supervisor.start()

    def _note_death(self, error: EngineDeadError) -> None:
        self.deaths.append(error)

    def _start(self) -> StubbornEngine:
        self.engines.append(StubbornEngine(self._config))
        return self.engines[-1]

    def add(self) -> None:
        prompt = np.array([1], dtype=np.int32)
        self.supervisor.add_request(EngineRequest("a", prompt, SamplingParams()))

    def wait_replaced(self, num_engines: int) -> None:
        wait_until(lambda: len(self.engines) == num_engines and self.is_available(), 10, "another engine")

    def is_available(self) -> bool:
        try:
            self.supervisor.check_available()
        except UnavailableError:
            return False
        return True

    def is_killed(self, timeout_s: float) -> bool:
        try:
            self.engines[-1].kills.get(timeout=timeout_s)
        except Empty:
            return False
        return True


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    monkeypatch.setattr(engine_supervisor, "_POLL_TIMEOUT_S", 0.01)
    each = Supervised(max_restarts=2)
    yield each
    each.supervisor.stop()


def test_an_engine_with_work_that_says_nothing_is_ended_and_replaced(supervised: Supervised) -> None:
    engine = supervised.engines[0]
    engine.tell(BUSY)
    started_s = time.monotonic()
    killed_s = engine.kills.get(timeout=10)
    assert STEP_TIMEOUT_S < killed_s - started_s < STEP_TIMEOUT_S + NOTICED_S
    supervised.wait_replaced(2)
    assert len(supervised.deaths) == 1 and engine.is_closed
    supervised.add()
    assert supervised.engines[1].next_request().request_id == "a"


def test_an_engine_that_was_idle_is_missed_once_it_is_given_work(supervised: Supervised) -> None:
    """As one that was stopped while it slept: nothing it said tells of the request."""
    engine = supervised.engines[0]
    engine.tell(IDLE)
    wait_until(lambda: engine.num_rounds_left == 0, 5, "it is read")
    assert not supervised.is_killed(2 * STEP_TIMEOUT_S)
    supervised.add()
    given_s = time.monotonic()
    killed_s = engine.kills.get(timeout=10)
    assert STEP_TIMEOUT_S / 2 < killed_s - given_s < STEP_TIMEOUT_S + NOTICED_S


def test_a_slow_engine_that_tells_of_its_steps_is_left_alone(supervised: Supervised) -> None:
    engine = supervised.engines[0]
    for _ in range(6):
        engine.tell(BUSY)
        assert not supervised.is_killed(STEP_TIMEOUT_S / 2)
    engine.tell(IDLE)
    assert not supervised.is_killed(3 * STEP_TIMEOUT_S)


def test_an_engine_that_others_own_is_theirs_to_watch(supervised: Supervised) -> None:
    engine = supervised.engines[0]
    engine.tell(None)
    supervised.add()
    assert not supervised.is_killed(3 * STEP_TIMEOUT_S)
    assert supervised.is_available()


def test_a_stuck_engine_takes_no_requests_while_it_is_being_ended(supervised: Supervised) -> None:
    engine = supervised.engines[0]
    engine.may_end.clear()
    engine.tell(BUSY)
    engine.kills.get(timeout=10)
    assert not supervised.is_available()
    with pytest.raises(UnavailableError, match="restarting"):
        supervised.add()
    engine.may_end.set()
    supervised.wait_replaced(2)


def test_a_new_engine_is_not_blamed_for_the_silence_of_the_old(supervised: Supervised) -> None:
    supervised.engines[0].tell(BUSY)
    supervised.wait_replaced(2)
    supervised.engines[1].tell(IDLE)
    assert not supervised.is_killed(3 * STEP_TIMEOUT_S)
    assert len(supervised.deaths) == 1


def test_engines_that_get_stuck_too_often_are_given_up(supervised: Supervised) -> None:
    for index in range(3):
        wait_until(lambda index=index: len(supervised.engines) > index, 10, "an engine")  # type: ignore[misc]
        supervised.engines[index].tell(BUSY)
    assert supervised.gave_up.wait(10)
    assert len(supervised.deaths) == len(supervised.engines) == 3
    with pytest.raises(UnavailableError, match="not restarted any more"):
        supervised.add()
