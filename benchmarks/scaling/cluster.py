"""Many simulated engines behind one router and one frontend: what happens, in the order of simulated time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.scaling.costs import Costs, DeviceCosts, FrontendCosts
from benchmarks.scaling.engine import Awaited, SimulatedEngine, StepResult
from benchmarks.scaling.figures import Figures, Record
from benchmarks.scaling.requests import SimulatedRequest
from deepinfer_backend.engine.messages import BlockSource, EngineRequest, Prompted
from deepinfer_backend.engine.request_router import RequestRouter
from deepinfer_backend.sampling_params import SamplingParams


class Frontend:
    """One interpreter that does one thing at a time, in the order in which it comes."""

    def __init__(self, costs: FrontendCosts, record: Record) -> None:
        self._costs, self._record = costs, record
        self._free_at_s = 0.0

    def route(self, now_s: float, num_ranks: int) -> float:
        """When a request that came now has its engine."""
        return self._work(now_s, self._costs.routing_s(num_ranks))

    def deliver(self, now_s: float, num_tokens: int) -> float:
        """When the clients have the tokens of a step that ended now."""
        return self._work(now_s, self._costs.delivery_s(num_tokens))

    def _work(self, now_s: float, cost_s: float) -> float:
        self._free_at_s = max(self._free_at_s, now_s) + cost_s
        if self._free_at_s in self._record.window:
            self._record.frontend_s += cost_s
        return self._free_at_s


class Pool:
    """The engines, and the real router that chooses among them; the first `num_prompt_engines` only prefill."""

    def __init__(self, costs: DeviceCosts, num_engines: int, num_prompt_engines: int) -> None:
        self.num_prompt_engines = num_prompt_engines
        self.engines = [
            SimulatedEngine(costs, is_prompt_engine=rank < num_prompt_engines) for rank in range(num_engines)
        ]
        self._router = RequestRouter(num_engines, num_prompt_engines)
        self._ranks = range(num_engines)

    def __len__(self) -> int:
        return len(self.engines)

    def assign(self, request: SimulatedRequest) -> SimulatedEngine:
        params = SamplingParams(max_tokens=request.num_outputs)
        return self.engines[self._router.assign(EngineRequest(request.request_id, request.prompt, params), self._ranks)]

    def end_prefill(self, request: SimulatedRequest) -> None:
        self._router.end_prefill(request.request_id)

    def hand_over(self, request: SimulatedRequest) -> SimulatedEngine:
        """The one that decodes a request whose prompt is computed."""
        prompted = Prompted(request.request_id, 0, 0, 0, BlockSource("", 0))
        handed_over = self._router.hand_over(prompted, self._ranks)
        assert handed_over is not None
        return self.engines[handed_over[0]]

    def end_hand_over(self, request: SimulatedRequest) -> SimulatedEngine:
        """The one that need not keep its blocks any more."""
        prompt_rank = self._router.end_hand_over(request.request_id)
        assert prompt_rank is not None
        return self.engines[prompt_rank]

    def release(self, request: SimulatedRequest) -> None:
        self._router.release(request.request_id)


class Cluster:
    """Engines that prefill and decode, each in steps of its own."""

    def __init__(
        self,
        num_devices: int,
        costs: Costs,
        arrivals: Iterator[SimulatedRequest],
        record: Record,
        num_prompt_engines: int = 0,
    ) -> None:
        self.now_s = 0.0
        self._costs, self._arrivals, self._record = costs, arrivals, record
        self._frontend = Frontend(costs.frontend, record)
        self._pool = Pool(costs.device, num_devices, num_prompt_engines)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0  # breaks ties: what was planned first happens first

    @property
    def engines(self) -> list[SimulatedEngine]:
        return self._pool.engines

    def run(self, until_s: float = math.inf) -> None:
        """By default until every request has all its tokens. What was planned for later is dropped."""
        self._await_arrival()
        while self._events and self._events[0][0] < until_s:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
        self._events.clear()  # they refer to this, which would live on with all its engines

    def figures(self) -> Figures:
        num_prompt_engines = self._pool.num_prompt_engines
        return self._record.figures(num_prompt_engines, len(self._pool) - num_prompt_engines)

    def _at(self, time_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, self._num_events, happens))
        self._num_events += 1

    # ---- one request, from top to bottom ----

    def _await_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._at(request.arrival_s, partial(self._arrive, request))

    def _arrive(self, request: SimulatedRequest) -> None:
        if self.now_s in self._record.window:
            self._record.num_offered += request.num_outputs
        self._at(self._frontend.route(self.now_s, len(self._pool)), partial(self._assign, request))
        self._await_arrival()

    def _assign(self, request: SimulatedRequest) -> None:
        engine = self._pool.assign(request)
        engine.add(request)
        self._wake(engine)

    def _wake(self, engine: SimulatedEngine) -> None:
        if not engine.is_stepping:
            self._begin_step(engine)

    def _begin_step(self, engine: SimulatedEngine) -> None:
        step_s = engine.begin_step()
        engine.is_stepping = step_s is not None
        if step_s is not None:
            self._at(self.now_s + step_s, partial(self._finish_step, engine, step_s))

    def _finish_step(self, engine: SimulatedEngine, step_s: float) -> None:
        self._deliver(engine, step_s)
        self._begin_step(engine)

    def _deliver(self, engine: SimulatedEngine, step_s: float) -> None:
        record, result = self._record, engine.finish_step()
        if self.now_s in record.window and engine.is_prompt_engine:
            record.prompt_engines_s += step_s
        elif self.now_s in record.window:
            record.engines_s += step_s
        if not result.num_tokens:
            return
        at_s = self._frontend.deliver(self.now_s, result.num_tokens)
        for request in result.prompted:
            request.first_token_s = at_s
            record.add_first_token(at_s, at_s - request.arrival_s)
        for request in result.joined:
            record.add_second_token(at_s, at_s - request.first_token_s)
        if result.num_decoded:
            record.add_gap(at_s, at_s - engine.last_decode_s, result.num_decoded - len(result.joined))
            engine.last_decode_s = at_s
        self._after_step(engine, result)

    def _after_step(self, engine: SimulatedEngine, result: StepResult) -> None:
        for request in result.prompted:
            self._pool.end_prefill(request)
        for request in result.ended:
            self._pool.release(request)


class LockstepCluster(Cluster):
    """All engines begin a step together, and the longest is everybody's; who has nothing computes a token of nobody."""

    _is_in_round = False

    def _wake(self, engine: SimulatedEngine) -> None:
        if not self._is_in_round:
            self._begin_round()

    def _begin_round(self) -> None:
        steps_s = [(engine, step_s) for engine in self.engines if (step_s := engine.begin_step()) is not None]
        self._is_in_round = bool(steps_s)
        if steps_s:
            longest_s = max(self._costs.device.decode_s(1, 1), *(step_s for _, step_s in steps_s))
            round_s = longest_s + self._costs.link.vote_s(len(self.engines))
            self._at(self.now_s + round_s, partial(self._finish_round, steps_s))

    def _finish_round(self, steps_s: list[tuple[SimulatedEngine, float]]) -> None:
        for engine, step_s in steps_s:
            self._deliver(engine, step_s)
        self._begin_round()


class SplitCluster(Cluster):
    """Some engines only prefill; what they computed travels to one that decodes, as soon as that has room for it."""

    def __init__(
        self,
        num_devices: int,
        costs: Costs,
        arrivals: Iterator[SimulatedRequest],
        record: Record,
        num_prompt_engines: int,
    ) -> None:
        super().__init__(num_devices, costs, arrivals, record, num_prompt_engines)
        self._source_of: dict[str, SimulatedEngine] = {}  # who computed the prompt, until the blocks travel
        self._link_free_at_s = dict.fromkeys(self.engines, 0.0)

    def _after_step(self, engine: SimulatedEngine, result: StepResult) -> None:
        super()._after_step(engine, result)
        for request in result.prompted:
            self._source_of[request.request_id] = engine
            self._at(self._frontend.route(self.now_s, len(self._pool)), partial(self._assign_prompted, request))

    def _assign_prompted(self, request: SimulatedRequest) -> None:
        engine = self._pool.hand_over(request)
        engine.add_prompted(request)
        self._wake(engine)

    def _begin_step(self, engine: SimulatedEngine) -> None:
        super()._begin_step(engine)
        for awaited in engine.take_awaited():
            self._transfer(self._source_of.pop(awaited.request.request_id), engine, awaited)

    def _transfer(self, source: SimulatedEngine, target: SimulatedEngine, awaited: Awaited) -> None:
        links = self._link_free_at_s
        transfer_s = self._costs.link.transfer_s(awaited.num_bytes)
        end_s = max(self.now_s, links[source], links[target]) + transfer_s
        links[source] = links[target] = end_s
        if end_s in self._record.window:
            self._record.transfers_s += transfer_s
            self._record.hand_overs_bytes.append(awaited.num_bytes)
        self._at(end_s, partial(self._finish_transfer, target, awaited))

    def _finish_transfer(self, target: SimulatedEngine, awaited: Awaited) -> None:
        target.blocks_arrived(awaited)
        source = self._pool.end_hand_over(awaited.request)
        source.hand_over(awaited.request)
        self._wake(target)
        self._wake(source)
