"""What a step does besides computing: a steady decode step allocates nothing, no Python runs token by token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_backend import SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.llm_engine import LLMEngine
from deepinfer_backend.engine.messages import EngineRequest
from tests.support.models import make_random_model

NUM_SEQS = 5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    path = make_random_model("llama", tmp_path_factory.mktemp("models"))
    engine = LLMEngine(
        EngineConfig(
            model=str(path),
            dtype="float32",
            device="cpu",
            num_gpu_blocks_override=512,
            max_num_batched_tokens=2_000,
            enable_prefix_caching=False,
        )
    )
    yield engine
    engine.close()


def add(engine: LLMEngine, request_id: str, prompt_len: int, **params: Any) -> None:
    prompt = np.arange(prompt_len, dtype=np.int32) % 500 + 3
    engine.add_request(EngineRequest(request_id, prompt, SamplingParams(ignore_eos=True, **params)))


def drain(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()
    engine.flush_inflight_reqs()


def bytes_allocated_on_device_thread(engine: LLMEngine, work: Callable[[], object]) -> list[int]:
    """What torch's allocator gave out there meanwhile, one by one."""
    # It sees the thread that starts it.
    profiler: Any = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    engine.stream.submit(profiler.__enter__).result()
    work()
    engine.stream.submit(lambda: profiler.__exit__(None, None, None)).result()
    events = profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2},
]


@pytest.mark.parametrize("sampling", [*SAMPLING, None], ids=["greedy", "random", "truncated", "mixed"])
def test_steady_decode_step_allocates_nothing_on_the_device_thread(
    engine: LLMEngine, sampling: dict[str, Any] | None
) -> None:
    for index in range(NUM_SEQS):
        add(engine, f"{index}", 20 + index, max_tokens=100, **(sampling or SAMPLING[index % len(SAMPLING)]))
    for _ in range(NUM_SEQS + 3):
        engine.step()

    def steps() -> None:
        for _ in range(60):
            assert len(engine.step()) == NUM_SEQS

    assert bytes_allocated_on_device_thread(engine, steps) == []
    allocating = bytes_allocated_on_device_thread(engine, lambda: engine.stream.submit(lambda: torch.empty(7)).result())
    assert allocating == [28]
    drain(engine)


def num_opcodes(engine: LLMEngine, work: Callable[[], object]) -> int:
    """Instructions of Python that both threads ran meanwhile."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    engine.stream.submit(lambda: sys.settrace(trace)).result()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        engine.stream.submit(lambda: sys.settrace(None)).result()
    return count


def test_python_of_a_prefill_does_not_grow_with_the_prompt(engine: LLMEngine) -> None:
    counts = []
    for prompt_len in (16, 17, 2_000):

        def prefill(prompt_len: int = prompt_len) -> None:
            add(engine, "a", prompt_len, max_tokens=2, temperature=0.0)
            assert len(engine.step()) == 1

        counts.append(num_opcodes(engine, prefill))
        drain(engine)
    # Of the first one alone: what Python does only once.
    assert counts[1] == counts[2] > 500
