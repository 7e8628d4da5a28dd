"""The ranks of a tensor-parallel engine but the first: processes that run each step's forward on their part of it.

`python -m deepinfer_backend.worker.tensor_ranks` reads the engine's configuration and its own place as two lines of
JSON from its standard input, and ends when that is closed: so it never outlives the engine. The leader does all the
rest: it schedules, samples and knows the requests.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import NoReturn

import torch

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.models.interface import Model
from deepinfer_backend.models.loader import resolve_dtype, resolve_model
from deepinfer_backend.models.runnable_model import load_engine_model
from deepinfer_backend.ops.heartbeat import answer_heartbeats
from deepinfer_backend.ops.rank_world import RankWorld, TensorGroup
from deepinfer_backend.ops.rendezvous import open_store
from deepinfer_backend.rank_place import RankPlace
from deepinfer_backend.worker.kv_cache import KVCache, resolve_kv_cache_dtype
from deepinfer_backend.worker.limits import resolve_block_size, resolve_device
from deepinfer_backend.worker.shared_step import receive_step

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_PR_SET_PDEATHSIG = 1
CONFIG_KEY = "engine_config"
"""Of the rendezvous, for ranks on other machines: JSON."""

_LEADER_ENDS_FIRST_S = 5.0  # what is wrong for one is mostly wrong for all, and the leader says it better


class TensorRanks:
    """Owns the processes of an engine's other ranks. When one of them ends, so does this process."""

    def __init__(self, config: EngineConfig, place: RankPlace) -> None:
        self._is_closing = threading.Event()
        self._processes = [
            _start(config, replace(place, tensor_rank=rank)) for rank in range(1, config.num_local_ranks)
        ]
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def close(self) -> None:
        self._is_closing.set()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._is_closing.is_set():
            logger.error("tensor-parallel rank %d ended with status %d: the engine cannot go on", rank, status)
            sys.stderr.flush()
            os._exit(1)


def _start(config: EngineConfig, place: RankPlace) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if devices := [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]:
        environment["CUDA_VISIBLE_DEVICES"] = devices[place.tensor_rank]
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer_backend.worker.tensor_ranks"], stdin=subprocess.PIPE, env=environment
    )
    assert process.stdin is not None
    process.stdin.write(config.model_dump_json().encode() + b"\n" + json.dumps(asdict(place)).encode() + b"\n")
    process.stdin.flush()
    return process


def join_world(config: EngineConfig, place: RankPlace) -> RankWorld:
    """The leader's part; ranks on other machines learn the configuration."""
    store = open_store(place)
    if config.master_addr is not None and config.nnodes > 1:
        answer_heartbeats(store, config.master_addr, range(config.num_local_ranks, config.tensor_parallel_size))
        store.set(CONFIG_KEY, config.model_dump_json())
        logger.info(
            "waiting for %d ranks on %d other machines at %s:%d",
            config.tensor_parallel_size - config.num_local_ranks,
            config.nnodes - 1,
            config.master_addr,
            config.master_port,
        )
    return RankWorld(place, config.step_timeout_s, store)


def _end_with_leader() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _be_killed_with_leader() -> None:
    """Also when this process is stopped, and cannot see that its standard input is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_steps(model: Model, kv_cache: KVCache, group: TensorGroup) -> NoReturn:
    model.use_caches(kv_cache.layers)
    while True:
        step = receive_step(group, model.device, model.dtype)
        if step.block_copies is not None:
            kv_cache.copy_blocks(step.block_copies)
        model.forward(
            step.token_ids,
            step.positions,
            step.attention,
            step.logits_indices,
            wants_token_states=step.wants_token_states,
            media=step.media,
        )


def _run(config: EngineConfig, place: RankPlace) -> NoReturn:
    world = RankWorld(place, config.step_timeout_s, open_store(place))
    assert world.tensor is not None
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    model = load_engine_model(config, resolve_model(config.model), dtype, device, world.tensor)
    world.wait_for_all()
    (num_blocks,), _ = world.tensor.receive(1, device)
    kv_cache = KVCache(
        model.layers,
        num_blocks=num_blocks,
        block_size=resolve_block_size(config.block_size, device),
        dtype=resolve_kv_cache_dtype(config.kv_cache_dtype, dtype, device),
        device=device,
    )
    with torch.inference_mode():
        _run_steps(model, kv_cache, world.tensor)


def run_rank(config: EngineConfig, place: RankPlace) -> int:
    """Until it cannot go on; the process's exit status."""
    rank = place.tensor_rank
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s deepinfer rank {rank} %(levelname)s: %(message)s")
    faulthandler.enable()
    try:
        _run(config, place)
    except Exception:
        logger.exception("tensor-parallel rank %d cannot go on", rank)
    return 1


def end_process(status: int) -> NoReturn:
    """At once: nothing is left to save, and threads of libraries must not hold it."""
    sys.stderr.flush()
    os._exit(status)


def main() -> NoReturn:
    config, place = (json.loads(sys.stdin.buffer.readline()) for _ in range(2))
    _be_killed_with_leader()
    threading.Thread(target=_end_with_leader, name="deepinfer-leader-watch", daemon=True).start()
    status = run_rank(EngineConfig(**config), RankPlace(**place))
    time.sleep(_LEADER_ENDS_FIRST_S)
    end_process(status)


if __name__ == "__main__":
    main()
