"""Engines in processes of their own as one EngineClient: for work offline, and always when they are in lockstep."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineOutputs
from deepinfer_backend.engine.engine_process import ChildEngineClient
from deepinfer_backend.engine.hand_overs import HandOvers
from deepinfer_backend.engine.messages import EngineInfo, EngineRequest, EngineStats
from deepinfer_backend.engine.request_router import RequestRouter
from deepinfer_backend.errors import EngineDeadError

_POLL_TIMEOUT_S = 0.2
_AS_ONE_ENGINE = {
    "data_parallel_size": 1,
    "num_prompt_engines": 0,
    "data_parallel_lockstep": False,
    "enable_expert_parallel": False,
}


class ParallelEngineClient:
    """Owns `data_parallel_size` engine processes, and a thread for each that reads what it tells.

    When one of them dies, all of it has: whoever uses it closes it, and with that the others. To its user it is one
    engine, and so its info says.

    Raises (constructor):
        EngineError, ConfigError: one of them could not start.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, link: Callable[[int], Path] | None = None) -> None:
        """link: where others find a rank, see `AttachedEngineClient`; by default nobody does."""
        num_ranks = config.data_parallel_size
        self._rounds: SimpleQueue[EngineOutputs | Exception] = SimpleQueue()
        self._lock = threading.Lock()  # guards _stats
        self._stats: dict[int, EngineStats] = {}  # by rank
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._folder = tempfile.TemporaryDirectory(prefix="deepinfer-ranks-")
        rendezvous = Path(self._folder.name, "rendezvous") if config.data_parallel_lockstep else None
        with ThreadPoolExecutor(num_ranks) as pool:
            starts = [
                pool.submit(ChildEngineClient, config, link and link(rank), rank, rendezvous)
                for rank in range(num_ranks)
            ]
        self._clients = [start.result() for start in starts if start.exception() is None]
        errors = [error for start in starts if (error := start.exception()) is not None]
        if errors:
            self.close()
            raise errors[0]
        info = self._clients[0].info
        self.info = msgspec.structs.replace(info, config={**info.config, **_AS_ONE_ENGINE})
        self._router = RequestRouter(num_ranks, config.num_prompt_engines)
        self._hand_overs = HandOvers(self._router, self, self._router.release)
        self._threads = [
            threading.Thread(target=self._read, args=(rank,), name=f"deepinfer-rank-{rank}", daemon=True)
            for rank in range(num_ranks)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def process_ids(self) -> list[int]:
        """By rank."""
        return [client.pid for client in self._clients]

    def available(self) -> range:
        """The ranks."""
        return range(len(self._clients))

    def add(self, rank: int, request: EngineRequest) -> None:
        self._clients[rank].add_request(request)

    def abort(self, rank: int, request_ids: list[str]) -> None:
        self._clients[rank].abort_requests(request_ids)

    def add_request(self, request: EngineRequest) -> None:
        self.add(self._router.assign(request, self.available()), request)

    def abort_requests(self, request_ids: list[str]) -> None:
        ids_of = self._router.by_rank(request_ids, str)
        for request_id in request_ids:
            self._router.release(request_id)
        for rank, ids in ids_of.items():
            self._clients[rank].abort_requests(ids)

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        for rank, each in self._router.by_rank(sequences, itemgetter(0)).items():
            self._clients[rank].abort_sequences(each)

    def forget_request(self, request_id: str) -> None:
        self._hand_overs.release(request_id)

    def get_outputs(self, timeout_s: float) -> EngineOutputs | None:
        try:
            round_ = self._rounds.get(timeout=timeout_s)
        except Empty:
            return None
        if isinstance(round_, Exception):
            raise round_
        with self._lock:
            stats = sum(self._stats.values(), EngineStats())
        return EngineOutputs(round_.outputs, round_.failures, stats, round_.results)

    def kill(self) -> None:
        for client in self._clients:
            client.kill()

    def close(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        with ThreadPoolExecutor(len(self._clients) or 1) as pool:
            list(pool.map(ChildEngineClient.close, self._clients))
        self._folder.cleanup()

    def _read(self, rank: int) -> None:
        while not self._stopping.is_set():
            try:
                outputs = self._clients[rank].get_outputs(_POLL_TIMEOUT_S)
            except Exception as error:
                self._rounds.put(error)
                return
            if outputs is None:
                continue
            assert outputs.stats is not None
            with self._lock:
                self._stats[rank] = outputs.stats
            try:
                self._hand_overs.take(outputs, self._pass_on)
            except EngineDeadError as error:
                self._rounds.put(error)
                return

    def _pass_on(self, outputs: EngineOutputs) -> None:
        # What says nothing but stats is told by whatever is read next.
        if outputs.outputs or outputs.failures or outputs.results or self._rounds.empty():
            self._rounds.put(outputs)
