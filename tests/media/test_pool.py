"""The media processes: what dies is replaced, what is slow ends, and what waits is bounded."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import DeepInferError, UnavailableError
from deepinfer_backend.media.medium import Medium
from deepinfer_backend.media.pool import MultiModalProcessor
from deepinfer_backend.media.prompt import MediaPrompt, ProcessedPrompt, as_array
from tests.support.media import encoded, picture
from tests.support.vision_models import VisionOracle, make_vision_model

IMAGE = encoded(picture(120, 90))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("llava", tmp_path_factory.mktemp("vision"))


@contextmanager
def open_pool(model: Path, **config: Any) -> Iterator[MultiModalProcessor]:
    processor = MultiModalProcessor(model, EngineConfig(model=str(model), **config))
    try:
        yield processor
    finally:
        process_ids = processor.process_ids
        processor.close()
        wait_until(lambda: not any(Path(f"/proc/{process_id}").exists() for process_id in process_ids))


def prompt(data: bytes = IMAGE) -> MediaPrompt:
    return MediaPrompt([Medium("image.0", "image", data)], text="<image> What?")


def wait_until(is_done: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def collect(processor: MultiModalProcessor, num_requests: int) -> dict[str, ProcessedPrompt | DeepInferError]:
    results: dict[str, ProcessedPrompt | DeepInferError] = {}
    deadline_s = time.monotonic() + 60
    while len(results) < num_requests:
        assert select.select([processor], [], [], deadline_s - time.monotonic())[0], "nothing came"
        results |= dict(processor.fetch())
        results |= dict(processor.fetch_to_abort_requests())
    return results


def test_a_prompt_is_what_the_models_processor_makes_of_it(model: Path) -> None:
    expected = VisionOracle(model).processor(text=["<image> What?"], images=[picture(120, 90)], return_tensors="pt")
    with open_pool(model) as processor:
        processor.submit("a", prompt())
        result = collect(processor, 1)["a"]
        assert isinstance(result, ProcessedPrompt)
        assert as_array(result.token_ids).tolist() == expected["input_ids"][0].tolist()
        (medium,) = result.media
        assert (as_array(medium.tensors["pixel_values"]) == expected["pixel_values"].numpy()).all()
        assert as_array(medium.positions).tolist() == (expected["input_ids"][0] == 259).nonzero()[:, 0].tolist()
        assert processor.num_held_bytes == result.num_bytes > 0
        processor.release(result)
        assert processor.num_held_bytes == 0


def kill_while_it_reads(processor: MultiModalProcessor, request_id: str) -> None:
    (process_id,) = processor.process_ids
    os.kill(process_id, signal.SIGSTOP)
    processor.submit(request_id, prompt())
    time.sleep(0.2)
    os.kill(process_id, signal.SIGKILL)
    wait_until(lambda: process_id not in processor.process_ids)


def test_a_process_that_dies_is_replaced_and_its_request_tried_again(model: Path) -> None:
    with open_pool(model, num_media_workers=1) as processor:
        processor.submit("before", prompt())
        assert isinstance(collect(processor, 1)["before"], ProcessedPrompt)
        kill_while_it_reads(processor, "struck")
        assert isinstance(collect(processor, 1)["struck"], ProcessedPrompt)


def test_a_request_whose_processes_die_fails_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(model, num_media_workers=1) as processor:
        processor.submit("before", prompt())
        collect(processor, 1)
        monkeypatch.setattr("deepinfer_backend.media.pool._MAX_TRIES", 1)
        kill_while_it_reads(processor, "struck")
        failure = collect(processor, 1)["struck"]
        assert isinstance(failure, DeepInferError)
        assert failure.message == "image.0: media processes end with signal 9 while they read its request's media"
        processor.submit("after", prompt())
        assert isinstance(collect(processor, 1)["after"], ProcessedPrompt)


def test_a_process_that_died_idle_is_replaced_and_costs_no_request(model: Path) -> None:
    with open_pool(model, num_media_workers=1) as processor:
        processor.submit("before", prompt())
        collect(processor, 1)
        (process_id,) = processor.process_ids
        os.kill(process_id, signal.SIGKILL)
        wait_until(lambda: not processor.process_ids)
        processor.submit("after", prompt())
        assert isinstance(collect(processor, 1)["after"], ProcessedPrompt)


def test_what_takes_too_long_ends_and_others_go_on(model: Path) -> None:
    with open_pool(model, num_media_workers=2, media_timeout_s=0.5) as processor:
        processor.submit("first", prompt())
        collect(processor, 1)
        (process_id,) = processor.process_ids
        os.kill(process_id, signal.SIGSTOP)
        for number in range(4):
            processor.submit(f"request {number}", prompt())
        results = collect(processor, 4)
        failures = [result.message for result in results.values() if isinstance(result, DeepInferError)]
        assert failures == ["image.0: its request's media took longer than 0.5 s (media_timeout_s)"]


def test_what_needs_too_much_memory_is_refused(model: Path) -> None:
    with open_pool(model, max_image_pixels=10**10) as processor:
        medium = Medium("image.0", "image", b"", (50_000, 50_000, 3))
        processor.submit("a", MediaPrompt([medium], text="<image>"))
        processor.submit("b", prompt())
        results = collect(processor, 2)
        assert isinstance(results["a"], DeepInferError)
        assert isinstance(results["b"], ProcessedPrompt)


def test_waiting_media_are_bounded(model: Path) -> None:
    with open_pool(model, num_media_workers=1, max_queued_media_bytes=3 * len(IMAGE)) as processor:
        for number in range(3):
            processor.submit(f"{number}", prompt())
        with pytest.raises(UnavailableError, match="max_queued_media_bytes"):
            for number in range(3, 6):
                processor.submit(f"{number}", prompt())
        for number in range(6):
            processor.cancel(f"{number}")


def test_no_more_is_begun_than_may_be_held(model: Path) -> None:
    num_bytes = 3 * 336 * 336 * 4
    with open_pool(model, num_media_workers=2, max_queued_media_bytes=2 * num_bytes) as processor:
        for number in range(8):
            processor.submit(f"{number}", prompt())
        held = [result for result in collect(processor, 3).values() if isinstance(result, ProcessedPrompt)]
        time.sleep(0.5)
        assert processor.num_held_bytes <= 5 * num_bytes  # what is allowed, and one more of each process
        num_come = len(held)
        assert num_come < 8
        while num_come < 8:
            while held:
                processor.release(held.pop())
            held += [result for _, result in processor.fetch()]
            num_come += len(held)
            time.sleep(0.01)


def test_a_cancelled_request_never_comes_out(model: Path) -> None:
    with open_pool(model, num_media_workers=1) as processor:
        for request_id in ("a", "b", "c"):
            processor.submit(request_id, prompt())
        processor.cancel("a")
        processor.cancel("b")
        processor.cancel("unknown")
        results = collect(processor, 1)
        assert list(results) == ["c"]
        processor.cancel("c")
        wait_until(lambda: processor.num_held_bytes == results["c"].num_bytes)  # type: ignore[union-attr]
