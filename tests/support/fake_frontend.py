"""A frontend with a fake engine and a fake Triton."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from deepinfer_backend.config import EngineConfig
from tests.support import fake_triton
from tests.support.fake_engine import FakeEngine, output
from tests.support.fake_triton import Request

from deepinfer_backend.triton.frontend import Frontend  # isort: skip (after fake_triton)

assert fake_triton


class Engines:
    """Starts fake engines; keeps them in order."""

    def __init__(self) -> None:
        self.started: SimpleQueue[FakeEngine] = SimpleQueue()
        self.may_start = threading.Event()
        self.may_start.set()
        self.start_error: Exception | None = None
        self.gave_up = threading.Event()

    def start(self, config: EngineConfig, rank: int) -> FakeEngine:
        """As partial(…, config) it takes the place of what starts a real one."""
        assert self.may_start.wait(10)
        if self.start_error is not None:
            raise self.start_error
        engine = FakeEngine(config)
        self.started.put(engine)
        return engine

    def next(self) -> FakeEngine:
        return self.started.get(timeout=10)


@contextmanager
def running_frontend(engines: Engines, **config: Any) -> Iterator[Frontend]:
    frontend = Frontend(
        model_name="fake",
        model_version="1",
        start_engine=partial(engines.start, EngineConfig(**config)),
        load_tokenizer=lambda info: None,
        give_up=engines.gave_up.set,
    )
    try:
        yield frontend
    finally:
        frontend.close()


def start_request(frontend: Frontend, engine: FakeEngine, **request: Any) -> tuple[str, Request]:
    """(the engine's id of it, the request) once the engine has it."""
    sent = Request(input_ids=[1], **request)
    frontend.accept([sent])
    return engine.next_request().request_id, sent


def assert_served(frontend: Frontend, engine: FakeEngine) -> None:
    request_id, request = start_request(frontend, engine)
    engine.step(output(request_id, 5, "LENGTH"))
    request.sender.wait()
    assert request.sender.outputs("token_ids") == [[5]]


def assert_failed(request: Request, code: int, *parts: str) -> None:
    """Failed with one error, in the one FINAL."""
    request.sender.wait()
    assert request.sender.num_finals == 1
    assert request.sender.error is not None
    assert request.sender.error.code == code
    for part in parts:
        assert part in request.sender.error.message
