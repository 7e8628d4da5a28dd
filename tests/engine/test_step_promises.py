"""The promises of `LLMEngine.step` and its flush, as a driver sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deepinfer_backend import RequestOutput, SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.llm_engine import LLMEngine
from deepinfer_backend.engine.messages import EngineRequest
from tests.support.models import make_random_model
from tests.support.oracle import TransformersOracle

PROMPT = [5, 17, 40, 99, 7]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[int]:
    """The first 64 greedy tokens after PROMPT, past end tokens."""
    oracle = TransformersOracle(model_path)
    return oracle.greedy(PROMPT, 64, ignore_eos=True)


@pytest.fixture
def engine(model_path: Path, request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    engine = LLMEngine(engine_config(model_path))
    yield engine
    engine.close()


def engine_config(model_path: Path, **engine_args: Any) -> EngineConfig:
    return EngineConfig(model=str(model_path), dtype="float32", device="cpu", num_gpu_blocks_override=64, **engine_args)


def add(engine: LLMEngine, request_id: str, prompt: list[int] = PROMPT, **params: Any) -> None:
    params = {"temperature": 0, "ignore_eos": True, **params}
    engine.add_request(EngineRequest(request_id, np.array(prompt, dtype=np.int32), SamplingParams(**params)))


def token_ids(handles: NDArray[np.uint64]) -> list[int]:
    return [RequestOutput.clone(handle).token_id for handle in handles]


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)
    while engine.has_unfinished_requests():
        for handle in engine.step():
            output = RequestOutput.clone(handle)
            outputs[output.request_id].append(output)
        blocks_add_up(engine)
    assert len(engine.flush_inflight_reqs()) == 0
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_blocks
    return outputs


def blocks_add_up(engine: LLMEngine) -> None:
    scheduler = engine.scheduler
    assert scheduler.num_free_blocks + scheduler.num_used_blocks == scheduler.num_blocks
    scheduler.check_invariants()


def test_prefill_returns_its_token_at_once(engine: LLMEngine, expected: list[int]) -> None:
    add(engine, "a", max_tokens=8)
    assert token_ids(engine.step()) == expected[:1]


def test_decode_step_returns_the_tokens_of_the_step_before(engine: LLMEngine, expected: list[int]) -> None:
    add(engine, "a", max_tokens=8)
    assert [token_ids(engine.step()) for _ in range(4)] == [[expected[0]], [], [expected[1]], [expected[2]]]


def test_without_zero_overhead_scheduling_every_step_returns_its_own(model_path: Path, expected: list[int]) -> None:
    engine = LLMEngine(engine_config(model_path, zero_overhead_scheduling=False))
    add(engine, "a", max_tokens=8)
    assert [token_ids(engine.step()) for _ in range(3)] == [[expected[0]], [expected[1]], [expected[2]]]
    assert not engine.has_inflight_step()
    engine.close()


def test_loop_left_early_gets_its_last_tokens_from_the_flush(engine: LLMEngine, expected: list[int]) -> None:
    add(engine, "a", max_tokens=8)
    for _ in range(3):
        engine.step()
    assert token_ids(engine.flush_inflight_reqs()) == [expected[2]]
    assert len(engine.flush_inflight_reqs()) == 0
    assert token_ids(engine.step()) == []
    assert token_ids(engine.step()) == [expected[3]]


def test_flush_after_a_full_drain_returns_none(engine: LLMEngine, expected: list[int]) -> None:
    add(engine, "a", max_tokens=5)
    assert [output.token_id for output in drain(engine)["a"]] == expected[:5]


def test_certain_end_by_length_is_not_scheduled_again(engine: LLMEngine) -> None:
    add(engine, "a", max_tokens=3)
    drain(engine)
    assert engine.stats().num_steps == 4  # prefill, two decodes, and one that only post-processes


def test_what_a_sequence_sampled_after_its_end_never_comes_out(engine: LLMEngine, expected: list[int]) -> None:
    first_repeat = next(i for i in range(2, 64) if expected[i] not in expected[:i])
    stop = expected[first_repeat]
    add(engine, "a", max_tokens=60, stop_token_ids=[stop])
    add(engine, "b", max_tokens=60)
    outputs = drain(engine)
    assert [output.token_id for output in outputs["a"]] == expected[: first_repeat + 1]
    last = outputs["a"][-1]
    assert (last.finished, last.finish_reason.name, last.stop_token_id) == (True, "STOP", stop)
    assert [output.token_id for output in outputs["b"]] == expected[:60]
    assert not any(output.finished for output in outputs["b"][:-1])


def test_blocks_of_an_ended_sequence_stay_until_its_last_step_is_done(engine: LLMEngine, expected: list[int]) -> None:
    add(engine, "a", max_tokens=60)
    for _ in range(3):
        engine.step()
    engine.abort_request(["a"])
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.num_used_blocks > 0
    assert len(engine.flush_inflight_reqs()) == 0
    assert engine.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("zero_overhead_scheduling", [True, False])
def test_the_step_that_ends_the_last_request_frees_its_blocks(
    model_path: Path, max_tokens: int, zero_overhead_scheduling: bool
) -> None:
    engine = LLMEngine(engine_config(model_path, zero_overhead_scheduling=zero_overhead_scheduling))
    add(engine, "a", max_tokens=max_tokens)
    while engine.has_unfinished_requests() or engine.has_inflight_step():
        if engine.has_unfinished_requests():
            engine.step()
        else:
            engine.flush_inflight_reqs()
    assert engine.scheduler.num_used_blocks == 0
    engine.close()


def test_handle_is_valid_until_the_next_step_and_stale_afterwards(engine: LLMEngine, expected: list[int]) -> None:
    add(engine, "a", max_tokens=8)
    (handle,) = engine.step()
    kept = RequestOutput.clone(handle)
    assert RequestOutput.clone(handle).token_id == expected[0]
    engine.step()
    with pytest.raises(LookupError):
        RequestOutput.clone(handle)
    assert kept.token_id == expected[0]


def test_chunk_that_is_not_the_last_returns_no_token(model_path: Path) -> None:
    engine = LLMEngine(engine_config(model_path, max_num_batched_tokens=16))
    add(engine, "a", prompt=list(range(3, 43)), max_tokens=2)
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]
    engine.close()


def test_fault_in_a_step_ends_its_sequences_only(
    engine: LLMEngine, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(engine, "a", max_tokens=60)
    for _ in range(2):
        engine.step()
    assert engine.worker.prev_step_state is not None
    engine.worker.prev_step_state.wait()  # the step in flight is computed before the fault

    def out_of_memory(*_: object) -> torch.Tensor:
        raise RuntimeError("injected")

    with monkeypatch.context() as broken:
        broken.setattr(engine.worker._runner._model, "forward", out_of_memory)
        outputs = [RequestOutput.clone(handle) for handle in engine.step()]
        outputs += [RequestOutput.clone(handle) for handle in engine.flush_inflight_reqs()]
    assert outputs.pop(0).token_id == expected[1]
    assert [(output.request_id, output.finish_reason.name, output.token_id) for output in outputs] == [
        ("a", "ERROR", -1)
    ]
    blocks_add_up(engine)
    assert engine.scheduler.num_used_blocks == 0
    add(engine, "b", max_tokens=20)
    assert [output.token_id for output in drain(engine)["b"]] == expected[:20]


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
def test_seeded_request_gives_the_same_tokens_alone_and_in_any_batch(
    model_path: Path, zero_overhead_scheduling: bool
) -> None:
    engine = LLMEngine(engine_config(model_path, zero_overhead_scheduling=zero_overhead_scheduling))
    seeded: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 1234, "max_tokens": 40}
    add(engine, "alone", **seeded)
    alone = [output.token_id for output in drain(engine)["alone"]]
    for index in range(5):
        add(engine, f"other {index}", prompt=[9 + index] * (3 + index), temperature=1.0, max_tokens=20 + index)
    add(engine, "together", **seeded)
    assert [output.token_id for output in drain(engine)["together"]] == alone
    assert len(set(alone)) > 5
    engine.close()


def test_min_tokens_holds_end_tokens_back(engine: LLMEngine, expected: list[int]) -> None:
    add(engine, "a", max_tokens=10, min_tokens=4, stop_token_ids=expected[:3])
    outputs = drain(engine)["a"]
    assert not {output.token_id for output in outputs[:4]} & set(expected[:3])


def test_requests_join_and_leave_a_running_batch(engine: LLMEngine, expected: list[int]) -> None:
    outputs: defaultdict[str, list[int]] = defaultdict(list)
    for arrival in range(10):
        add(engine, str(arrival), max_tokens=10 + arrival)
        for handle in engine.step():
            output = RequestOutput.clone(handle)
            outputs[output.request_id].append(output.token_id)
    for request_id, rest in drain(engine).items():
        outputs[request_id] += [output.token_id for output in rest]
    assert outputs == {str(arrival): expected[: 10 + arrival] for arrival in range(10)}
