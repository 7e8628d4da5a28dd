"""Engines that prefill and engines that decode: the tokens of one engine, whatever becomes of a hand-over."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.block_hand_over import BlockHandOver
from deepinfer_backend.engine.llm_engine import LLMEngine
from deepinfer_backend.engine.messages import (
    BlockContents,
    BlocksArrived,
    BlockSource,
    EngineRequest,
    FetchBlocks,
    Prompted,
    ToEngine,
    decode_to_engine,
)
from deepinfer_backend.errors import ConfigError
from tests.engine.test_same_tokens import ModelAndCases, blocks_for_the_longest
from tests.support.models import make_similar_model
from tests.support.oracle import TransformersOracle
from tests.support.triton_server import wait_until

RandomModel = Callable[[str], ModelAndCases]
PROMPT = list(range(5, 105))


def split(model: Path, num_prompt: int, num_decode: int, **engine_args: Any) -> LLM:
    args = {"num_gpu_blocks_override": 64, "dtype": "float32", "device": "cpu", **engine_args}
    return LLM(
        str(model),
        decode_sequence=False,
        data_parallel_size=num_prompt + num_decode,
        num_prompt_engines=num_prompt,
        **args,
    )


def check_nothing_is_left(llm: LLM) -> None:
    client: Any = llm._client
    assert not client._router._assignments and set(client._router._work) == {0}

    def is_idle() -> bool:
        client.get_outputs(0.3)
        return all(stats.num_used_blocks == 0 for stats in client._stats.values())

    wait_until(is_idle, 10, "all blocks are free")


@pytest.mark.parametrize(
    ("num_prompt", "num_decode", "engine_args"),
    [
        (1, 1, {}),
        (2, 1, {"zero_overhead_scheduling": False}),
        (1, 2, {"enable_prefix_caching": False, "max_num_batched_tokens": 48}),
        (1, 1, {"num_gpu_blocks_override": 0}),
        (1, 1, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}),
    ],
    ids=["1 + 1", "2 + 1, no zos", "1 + 2, chunks, no prefix cache", "few blocks", "n-grams"],
)
def test_tokens_equal_transformers(
    random_model: RandomModel, num_prompt: int, num_decode: int, engine_args: dict[str, Any]
) -> None:
    path, cases, expected = random_model("llama")
    if engine_args.get("num_gpu_blocks_override") == 0:
        engine_args = {**engine_args, "num_gpu_blocks_override": blocks_for_the_longest(cases)}
    with split(path, num_prompt, num_decode, **engine_args) as llm:
        results: Any = llm.generate(
            prompt_token_ids=[prompt for prompt, _ in cases],
            sampling_params=[SamplingParams(temperature=0, max_tokens=limit) for _, limit in cases],
            use_tqdm=False,
        )
        check_nothing_is_left(llm)
        stats: Any = llm._client._stats  # type: ignore[attr-defined]
        assert all(stats[rank].num_generation_tokens <= len(cases) for rank in range(num_prompt))
        assert stats[num_prompt].num_prompt_tokens == 0
    assert [[output.token_id for output in result] for result in results] == expected


@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
def test_what_is_preempted_where_it_is_decoded_is_computed_again_there(
    random_model: RandomModel, zero_overhead_scheduling: bool
) -> None:
    path, _, _ = random_model("llama")
    prompts, oracle = [[index + 3, *PROMPT[:20]] for index in range(10)], TransformersOracle(path)
    args = {"num_gpu_blocks_override": 20, "zero_overhead_scheduling": zero_overhead_scheduling}
    with split(path, 1, 1, **args) as llm:
        results: Any = llm.generate(
            prompt_token_ids=prompts,
            sampling_params=SamplingParams(temperature=0, max_tokens=90, ignore_eos=True),
            use_tqdm=False,
        )
        check_nothing_is_left(llm)
        stats: Any = llm._client._stats  # type: ignore[attr-defined]
        assert stats[0].num_preemptions == 0 and stats[1].num_preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert [output.token_id for output in result] == oracle.greedy(prompt, 90, ignore_eos=True)


def test_a_draft_model_goes_on_with_what_was_handed_over(random_model: RandomModel, tmp_path: Path) -> None:
    path, cases, expected = random_model("llama")
    similar = make_similar_model(path, tmp_path)
    speculation = {"method": "draft_model", "model": str(similar), "num_speculative_tokens": 2}
    with split(path, 1, 1, speculative_config=speculation) as llm:
        results: Any = llm.generate(
            prompt_token_ids=[prompt for prompt, _ in cases],
            sampling_params=[SamplingParams(temperature=0, max_tokens=limit) for _, limit in cases],
            use_tqdm=False,
        )
        stats: Any = llm._client._stats  # type: ignore[attr-defined]
        assert stats[1].num_accepted_draft_tokens > 0
    assert [[output.token_id for output in result] for result in results] == expected


@dataclass
class End:
    """An engine in this process with its end of the hand-overs, and what was sent to it."""

    engine: LLMEngine
    hand_over: BlockHandOver
    inbox: zmq.Socket[bytes]

    def receive(self) -> tuple[ToEngine, bytes]:
        """A message, and the content that comes with it."""
        assert self.inbox.poll(10_000)
        message, *content = self.inbox.recv_multipart()
        return decode_to_engine(message), b"".join(content)


@contextmanager
def two_ends(model: Path, folder: Path, **engine_args: Any) -> Iterator[tuple[End, End]]:
    """One that prefills, one that decodes."""
    args = {"num_gpu_blocks_override": 64, "dtype": "float32", "device": "cpu", **engine_args}
    context = zmq.Context()
    ends = []
    with ExitStack() as stack:
        for name in ("prompt", "decode"):
            address = f"ipc://{folder}/{name}"
            source = BlockSource(address, os.getpid())
            inbox = context.socket(zmq.PULL)
            inbox.bind(address)
            engine = LLMEngine(EngineConfig(model=str(model), **args), None, source if name == "prompt" else None)
            stack.callback(engine.close)
            hand_over = BlockHandOver(engine.scheduler, engine.kv_cache, engine.stream, context, address)
            ends.append(End(engine, hand_over, inbox))
        yield ends[0], ends[1]
    context.destroy(linger=0)


def hand_over_one(
    prefilling: End, decoding: End, prompt: list[int], max_tokens: int, process_id: int | None = None
) -> list[int]:
    """The first token is there, and the blocks are asked for. process_id: said to be that of who has them."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = EngineRequest("one", np.array(prompt, np.int32), params)
    prefilling.engine.add_request(request)
    tokens = step(prefilling.engine)
    (prompted,) = prefilling.engine.take_results()
    assert isinstance(prompted, Prompted)
    source = msgspec.structs.replace(prompted.source, process_id=process_id or os.getpid())
    prompted = msgspec.structs.replace(prompted, source_index=decoding.hand_over.index_of(source))
    decoding.engine.add_request(msgspec.structs.replace(request, prompted=prompted))
    assert step(decoding.engine) == []
    decoding.hand_over.go_on()
    return tokens


def step(engine: LLMEngine) -> list[int]:
    handles = engine.step() if engine.has_unfinished_requests() else engine.flush_inflight_reqs()
    return [output.token_id for output in engine.request_output_pool.clone(handles)]


def finish(end: End) -> list[int]:
    tokens: list[int] = []
    while end.engine.has_unfinished_requests() or end.engine.has_inflight_step():
        tokens += step(end.engine)
    step(end.engine)
    assert end.engine.scheduler.num_used_blocks == 0
    return tokens


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_blocks_are_what_the_other_engine_computed(
    random_model: RandomModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    """In pieces of one block: each is asked for, and compared with where it came from."""
    monkeypatch.setattr("deepinfer_backend.engine.block_hand_over._PIECE_BYTES", 1)
    path, _, _ = random_model("llama")
    with two_ends(path, tmp_path, kv_cache_dtype=kv_cache_dtype) as (prefilling, decoding):
        hand_over_one(prefilling, decoding, PROMPT, 10)
        sent = exchange(prefilling, decoding)
        assert [contents.first_block for contents, _ in sent] == list(range(7))
        assert decoding.hand_over.go_on() == [BlocksArrived("one")]
        blocks = [end.engine.scheduler.prompted_blocks("one") for end in (prefilling, decoding)]
        contents = [
            end.engine.kv_cache.read_blocks(torch.from_numpy(each))
            for end, each in zip((prefilling, decoding), blocks, strict=True)
        ]
        assert contents[0].shape == (7 * prefilling.engine.kv_cache.block_bytes,)
        assert torch.equal(*contents)
        finish(decoding)


Sent = tuple[BlockContents, bytes]


def exchange(prefilling: End, decoding: End, spoil: Callable[[Sent], Sent] = lambda sent: sent) -> list[Sent]:
    """Until nothing is asked for any more; what was sent."""
    all_sent = []
    while prefilling.inbox.poll(200):
        fetch, _ = prefilling.receive()
        assert isinstance(fetch, FetchBlocks)
        prefilling.hand_over.answer(fetch)
        contents, content = decoding.receive()
        assert isinstance(contents, BlockContents)
        all_sent.append((contents, content))
        contents, content = spoil(all_sent[-1])
        decoding.hand_over.take(contents, memoryview(content))
    return all_sent


def damaged(sent: Sent) -> Sent:
    contents, content = sent
    return contents, bytes([content[0] ^ 1]) + content[1:]


def test_damaged_content_is_asked_for_again(random_model: RandomModel, tmp_path: Path) -> None:
    path, _, _ = random_model("llama")
    spoiling = iter([damaged, damaged])

    def spoil(sent: Sent) -> Sent:
        return next(spoiling, lambda each: each)(sent)

    with two_ends(path, tmp_path) as (prefilling, decoding):
        tokens = hand_over_one(prefilling, decoding, PROMPT, 10)
        assert len(exchange(prefilling, decoding, spoil)) == 3
        assert decoding.hand_over.go_on() == [BlocksArrived("one")]
        assert decoding.engine.scheduler.num_waiting == 0
        assert tokens + finish(decoding) == TransformersOracle(path).greedy(PROMPT, 10, ignore_eos=True)


@pytest.mark.parametrize("reason", ["damaged", "cut", "gone"])
def test_what_does_not_come_is_computed_again(
    random_model: RandomModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr("deepinfer_backend.engine.block_hand_over._PIECE_BYTES", 1)
    path, _, _ = random_model("llama")

    def spoil(sent: Sent) -> Sent:
        contents, content = sent
        if contents.first_block < 3:
            return sent
        return {"damaged": damaged(sent), "cut": (contents, content[:-1]), "gone": (contents, b"")}[reason]

    with two_ends(path, tmp_path) as (prefilling, decoding):
        tokens = hand_over_one(prefilling, decoding, PROMPT, 10)
        exchange(prefilling, decoding, spoil)
        assert decoding.hand_over.go_on() == [BlocksArrived("one")]
        assert decoding.engine.scheduler.num_waiting == 1
        assert tokens + finish(decoding) == TransformersOracle(path).greedy(PROMPT, 10, ignore_eos=True)


def test_what_arrives_for_one_that_was_aborted_is_dropped(random_model: RandomModel, tmp_path: Path) -> None:
    path, _, _ = random_model("llama")
    with two_ends(path, tmp_path) as (prefilling, decoding):
        hand_over_one(prefilling, decoding, PROMPT, 10)
        decoding.engine.abort_request(["one"])
        exchange(prefilling, decoding)
        assert decoding.hand_over.go_on() == []
        finish(decoding)
        prefilling.engine.abort_request(["one"])
        finish(prefilling)


def test_several_sequences_are_refused_by_an_engine_that_only_prefills(
    random_model: RandomModel, tmp_path: Path
) -> None:
    path, _, _ = random_model("llama")
    with two_ends(path, tmp_path) as (prefilling, _):
        request = EngineRequest("many", np.array([5], np.int32), SamplingParams(n=2))
        with pytest.raises(ValueError, match="n: an engine that only prefills takes requests of one sequence"):
            prefilling.engine.add_request(request)


def test_what_an_engine_that_has_died_does_not_give_is_computed_again(
    random_model: RandomModel, tmp_path: Path
) -> None:
    path, _, _ = random_model("llama")
    with two_ends(path, tmp_path) as (prefilling, decoding), subprocess.Popen(["sleep", "600"]) as process:
        tokens = hand_over_one(prefilling, decoding, PROMPT, 10, process_id=process.pid)
        process.kill()
        process.wait()
        assert decoding.hand_over.go_on() == [BlocksArrived("one")]
        assert tokens + finish(decoding) == TransformersOracle(path).greedy(PROMPT, 10, ignore_eos=True)


def test_one_that_died_before_it_was_known_gives_nothing(random_model: RandomModel, tmp_path: Path) -> None:
    path, _, _ = random_model("llama")
    process = subprocess.Popen(["true"])
    process.wait()
    with two_ends(path, tmp_path) as (prefilling, decoding):
        tokens = hand_over_one(prefilling, decoding, PROMPT, 10, process_id=process.pid)
        assert tokens + finish(decoding) == TransformersOracle(path).greedy(PROMPT, 10, ignore_eos=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_prompt_engines": 2}, "num_prompt_engines is 2: must be below data_parallel_size, 2"),
        ({"num_prompt_engines": 1, "data_parallel_lockstep": True}, "num_prompt_engines is 1: must be 0 with data_par"),
        (
            {"num_prompt_engines": 1, "tensor_parallel_size": 2},
            "num_prompt_engines is 1: must be 0 with data_parallel_",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(data_parallel_size=2, **arguments)
