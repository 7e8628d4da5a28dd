"""The engines of one model: data-parallel ranks, each with a supervisor, and which of them a request goes to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter

from deepinfer_backend.engine.engine_client import EngineClient, EngineOutputs, RequestFailure
from deepinfer_backend.engine.hand_overs import HandOvers
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.engine.request_router import RequestRouter
from deepinfer_backend.errors import DeepInferError, UnavailableError
from deepinfer_backend.triton.engine_supervisor import EngineSupervisor

logger = logging.getLogger(__name__)

_NO_ENGINE = "no engine is running; try again in a few seconds"


class EngineRanks:
    """Owns the supervisors. A rank that dies takes its own requests with it; the others go on, and take new ones.

    `add_request`, `forget_request` and the aborts may be called from any thread. The callbacks run on the supervisors'
    threads: `on_outputs` with the rank, `on_death` with the rank and the ids of the requests that it had; `on_failed`
    when all ranks have given up.
    """

    def __init__(
        self,
        start_engine: Callable[[int], EngineClient],
        *,
        on_outputs: Callable[[int, EngineOutputs], None],
        on_death: Callable[[int, list[str], DeepInferError], None],
        on_failed: Callable[[], None],
    ) -> None:
        """`start_engine`: of a rank. The first one's configuration says how many there are. Raises what that raises."""
        self._start_engine = start_engine
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_failed = on_failed
        self._lock = threading.Lock()  # guards _num_failed
        self._num_failed = 0
        first = self._start_rank(0)
        self.info = first.info
        self._supervisors = [first]
        try:
            self._supervisors += self._start_others(int(self.info.config["data_parallel_size"]))
        except BaseException:
            first.stop()
            raise
        self._router = RequestRouter(len(self._supervisors), int(self.info.config["num_prompt_engines"]))
        self._hand_overs = HandOvers(self._router, self, self._fail_alone)

    def start(self) -> None:
        for supervisor in self._supervisors:
            supervisor.start()

    def stop(self) -> None:
        """Ends all engines at once, in bounded time."""
        with ThreadPoolExecutor(len(self._supervisors)) as pool:
            list(pool.map(EngineSupervisor.stop, self._supervisors))

    def check_available(self) -> None:
        """Raises UnavailableError while there is no engine, or none that decodes."""
        if self._router.decoding(self.available()):
            return
        decoding = [self._supervisors[rank] for rank in self._router.decoding(range(len(self._supervisors)))]
        # As long as one comes back, that is what clients are told.
        min(decoding, key=EngineSupervisor.is_given_up).check_available()

    def add_request(self, request: EngineRequest) -> None:
        """Raises UnavailableError while there is no engine to take it."""
        candidates = self.available()
        error = UnavailableError(_NO_ENGINE)
        while self._router.decoding(candidates):
            rank = self._router.assign(request, candidates)
            try:
                self._supervisors[rank].add_request(request)
            except UnavailableError as rank_error:
                # It has just died. If it took the request with it, that has been answered.
                if not self._router.release(request.request_id):
                    return
                candidates.remove(rank)
                error = rank_error
            else:
                return
        self.check_available()
        raise error

    def forget_request(self, request_id: str) -> None:
        """The request has ended."""
        rank = self._router.rank_of(request_id)
        if rank is not None:
            self._hand_overs.release(request_id)
            self._supervisors[rank].forget_request(request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        ids_of = self._router.by_rank(request_ids, str)
        for request_id in request_ids:
            self._router.release(request_id)
        for rank, ids in ids_of.items():
            self._supervisors[rank].abort_requests(ids)

    def abort_sequences(self, sequences: list[tuple[str, int]]) -> None:
        """(request id, sequence index) of each; the rest of their requests goes on."""
        for rank, each in self._router.by_rank(sequences, itemgetter(0)).items():
            self._supervisors[rank].abort_sequences(each)

    def _start_rank(self, rank: int) -> EngineSupervisor:
        return EngineSupervisor(
            partial(self._start_engine, rank),
            name=f"engine {rank}",
            on_outputs=partial(self._take_outputs, rank),
            on_death=partial(self._answer_for, rank),
            on_failed=partial(self._give_up, rank),
        )

    def _start_others(self, num_ranks: int) -> list[EngineSupervisor]:
        """All or none."""
        if num_ranks == 1:
            return []
        with ThreadPoolExecutor(num_ranks - 1) as pool:
            starts = [pool.submit(self._start_rank, rank) for rank in range(1, num_ranks)]
        errors = [error for start in starts if (error := start.exception()) is not None]
        if errors:
            for start in starts:
                if start.exception() is None:
                    start.result().stop()
            raise errors[0]
        return [start.result() for start in starts]

    def available(self) -> list[int]:
        """The ranks whose engines are there."""
        return [rank for rank, supervisor in enumerate(self._supervisors) if supervisor.is_available()]

    def add(self, rank: int, request: EngineRequest) -> None:
        self._supervisors[rank].add_request(request)

    def abort(self, rank: int, request_ids: list[str]) -> None:
        self._supervisors[rank].abort_requests(request_ids)

    def _take_outputs(self, rank: int, outputs: EngineOutputs) -> None:
        self._hand_overs.take(outputs, partial(self._on_outputs, rank))

    def _answer_for(self, rank: int, error: DeepInferError) -> None:
        loss = self._router.release_rank(rank)
        self._on_death(rank, loss.request_ids, error)
        for prompted in loss.prompted:
            self._hand_overs.hand_over(prompted)

    def _fail_alone(self, request_id: str) -> None:
        self.abort_requests([request_id])
        self._on_outputs(0, EngineOutputs([], [RequestFailure(request_id, UnavailableError(_NO_ENGINE))], None))

    def _give_up(self, rank: int) -> None:
        with self._lock:
            self._num_failed += 1
            is_last = self._num_failed == len(self._supervisors)
        if is_last:
            self._on_failed()
        else:
            logger.error("the model's other engines go on without engine %d", rank)
