"""Requests on their way from the engines that only prefill to those that decode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from deepinfer_backend.engine.engine_client import EngineOutputs
from deepinfer_backend.engine.messages import BlocksArrived, EngineRequest, Prompted
from deepinfer_backend.engine.request_router import RequestRouter
from deepinfer_backend.errors import UnavailableError

logger = logging.getLogger(__name__)


class RankedEngines(Protocol):
    """The engines by rank, as whoever has them reaches them."""

    def available(self) -> Collection[int]: ...

    def add(self, rank: int, request: EngineRequest) -> None:
        """Raises UnavailableError if it has just ended."""

    def abort(self, rank: int, request_ids: list[str]) -> None: ...


class HandOvers:
    """Reads what engines tell about prompts, and gives each request with a prompt elsewhere to an engine that decodes.

    The one that prefilled keeps the blocks until the other has them: if that dies before, a third one gets the request.
    From any thread.
    """

    def __init__(
        self,
        router: RequestRouter,
        engines: RankedEngines,
        on_lost: Callable[[str], object],
    ) -> None:
        """on_lost: of a request that no engine takes."""
        self._router = router
        self._engines = engines
        self._on_lost = on_lost

    def take(self, outputs: EngineOutputs, pass_on: Callable[[EngineOutputs], None]) -> None:
        """What a round brought, the rest of which is passed on before any request goes on elsewhere."""
        if self._router.num_ranks > 1:
            for output in outputs.outputs:
                if output.output_index == 0 and output.sequence_index == 0:
                    self._router.end_prefill(output.request_id)
        prompted = [result for result in outputs.results if isinstance(result, Prompted)]
        arrived = [result for result in outputs.results if isinstance(result, BlocksArrived)]
        if prompted or arrived:
            others = [each for each in outputs.results if not isinstance(each, Prompted | BlocksArrived)]
            outputs = EngineOutputs(outputs.outputs, outputs.failures, outputs.stats, [*others])
        for request_id in (each.request_id for each in arrived):
            self._end(request_id)
        pass_on(outputs)
        for each in prompted:
            self.hand_over(each)

    def release(self, request_id: str) -> None:
        """The request has ended, on its way or where it was decoded."""
        self._end(request_id)
        self._router.release(request_id)

    def hand_over(self, prompted: Prompted) -> None:
        """To the decoding engine with the least to do; nothing if the request has ended."""
        request_id, candidates = prompted.request_id, set(self._engines.available())
        while (assigned := self._router.hand_over(prompted, candidates)) is not None:
            rank, request = assigned
            try:
                self._engines.add(rank, msgspec.structs.replace(request, prompted=prompted))
            except UnavailableError:
                candidates.remove(rank)
                continue
            # Ended between the two: the abort may have overtaken the request.
            if self._router.rank_of(request_id) is None:
                self._engines.abort(rank, [request_id])
            return
        if self._router.rank_of(request_id) is not None:
            logger.error("request %s: no engine that decodes is running", request_id)
            self._on_lost(request_id)

    def _end(self, request_id: str) -> None:
        rank = self._router.end_hand_over(request_id)
        if rank is not None:
            self._engines.abort(rank, [request_id])
