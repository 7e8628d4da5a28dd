"""Random arrivals and aborts on every layout: nobody waits for ever, the rest is right, and nothing is left."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.engine.messages import EngineRequest
from tests.engine.test_same_tokens import ModelAndCases
from tests.support.oracle import TransformersOracle
from tests.support.triton_server import wait_until

NUM_EVENTS = 150
DRAIN_LIMIT_S = 30.0
FEW_BLOCKS = 24
LOCKSTEP = {"data_parallel_size": 3, "data_parallel_lockstep": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "three engines": ("llama", {"data_parallel_size": 3}),
    "three in lockstep": ("llama", LOCKSTEP),
    "three in lockstep, no zos": ("llama", {**LOCKSTEP, "zero_overhead_scheduling": False}),
    "two share experts": ("mixtral", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    "one prefills, two decode": ("llama", {"data_parallel_size": 3, "num_prompt_engines": 1}),
    "two ranks of one": ("llama", {"tensor_parallel_size": 2}),
}
"""Family of the model, and engine arguments."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_aborted_is_right_and_nothing_is_left(
    random_model: Callable[[str], ModelAndCases], layout: str, seed: int
) -> None:
    """There are moments in which a rank, or every one, has nothing to do."""
    family, engine_args = LAYOUTS[layout]
    path, _, _ = random_model(family)
    chance, oracle = random.Random(seed), TransformersOracle(path)
    tokens: dict[str, list[int]] = defaultdict(list)
    kept: dict[str, tuple[list[int], int]] = {}
    args = {"num_gpu_blocks_override": FEW_BLOCKS, "dtype": "float32", "device": "cpu", **engine_args}
    with LLM(str(path), decode_sequence=False, **args) as llm:
        client: Any = llm._client
        unfinished: set[str] = set()

        def take(timeout_s: float) -> None:
            round_ = client.get_outputs(timeout_s)
            for output in round_.outputs if round_ is not None else []:
                tokens[output.request_id].append(output.token_id)
                if output.finished:
                    unfinished.discard(output.request_id)
                    client.forget_request(output.request_id)

        for index in range(NUM_EVENTS):
            if chance.random() < 0.7:
                length, limit = chance.choice([1, 15, 16, 17, 100]), chance.choice([1, 2, 5, 40])
                prompt = [chance.randrange(3, 500) for _ in range(length)]
                kept[f"{index}"] = prompt, limit
                unfinished.add(f"{index}")
                params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
                client.add_request(EngineRequest(f"{index}", np.array(prompt, np.int32), params))
            elif unfinished:
                chosen = chance.choice(sorted(unfinished))
                del kept[chosen]
                unfinished.discard(chosen)
                client.abort_requests([chosen])
            take(chance.choice([0.0, 0.0, 0.01, 0.05]))
        deadline_s = time.monotonic() + DRAIN_LIMIT_S
        while unfinished:
            assert time.monotonic() < deadline_s, f"no end of {sorted(unfinished)}"
            take(0.5)
        wait_until(lambda: is_idle(client), 10, "all blocks are free, and in lockstep all made the same steps")
    for request_id, (prompt, limit) in kept.items():
        assert tokens[request_id] == oracle.greedy(prompt, limit, ignore_eos=True)


def is_idle(client: Any) -> bool:
    """As far as the engines have told."""
    client.get_outputs(0.3)
    stats = list(client._stats.values())
    is_lockstep = client._clients[0].info.config["data_parallel_lockstep"]
    return (
        not client._router._assignments
        and all(each.num_used_blocks == 0 for each in stats)
        and (not is_lockstep or len({each.num_steps for each in stats}) == 1)
    )
