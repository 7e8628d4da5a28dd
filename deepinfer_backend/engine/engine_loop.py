"""EngineLoop: the one thread that owns an engine, between its clients' sockets. Runs as the engine process's main.

`python -m deepinfer_backend.engine.engine_loop REQUESTS_ADDRESS OUTPUTS_ADDRESS OWNER_ID` reads three lines of JSON
from its standard input: the engine's configuration, its place in a group of ranks (null: it is alone), and which of the
model's engines it is. It ends when that is closed: so it never outlives its parent. The parent is the client OWNER_ID,
whose outputs go to OUTPUTS_ADDRESS; others attach at REQUESTS_ADDRESS.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import zmq

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.block_hand_over import BlockHandOver
from deepinfer_backend.engine.client_sockets import OWNER_INDEX, ClientSockets
from deepinfer_backend.engine.llm_engine import Handles, LLMEngine
from deepinfer_backend.engine.messages import (
    AbortRequests,
    AbortSequences,
    AddRequest,
    Attach,
    BlockContents,
    BlockSource,
    Detach,
    EngineFailed,
    EngineReady,
    EngineRequest,
    FetchBlocks,
    Prompted,
    RequestResult,
    Shutdown,
    StepOutputs,
    ToEngine,
    decode_to_engine,
    request_failed,
)
from deepinfer_backend.engine.stats import StatsLine
from deepinfer_backend.errors import DeepInferError, EngineError, not_taken_in_error
from deepinfer_backend.rank_place import RankPlace
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.worker.tensor_ranks import TensorRanks, join_world
from deepinfer_backend.worker.worker import NO_HANDLES

logger = logging.getLogger(__name__)

_MAX_SILENCE_S = 0.25
_IDLE_VOTE_INTERVAL_S = 0.01  # of ranks in lockstep that all have nothing to do; as long a request may wait
_STALLED_WAIT_S = 0.02  # for a message that lets an engine with work go on; deadlines are looked at between two


class EngineLoop:
    """Takes requests in, steps while there is work, flushes when drained, sleeps when idle.

    One that is in lockstep with others steps always, but slowly while nobody has work: each step begins with a vote,
    and who does not vote holds the others up.
    """

    def __init__(
        self,
        engine: LLMEngine,
        requests: zmq.Socket[bytes],
        clients: ClientSockets,
        hand_over: BlockHandOver,
        stats_interval_s: float,
        *,
        in_lockstep: bool,
    ) -> None:
        self._engine = engine
        self._in_lockstep = in_lockstep
        self._requests = requests
        self._clients = clients
        self._hand_over = hand_over
        self._stats_line = StatsLine(stats_interval_s)
        self._last_report_s = 0.0
        self._is_shut_down = False

    def run(self) -> None:
        """Returns after a Shutdown message."""
        engine = self._engine
        self._report([], NO_HANDLES)  # the owner's gauges are there before the first request
        while True:
            is_busy = engine.has_unfinished_requests() or engine.has_inflight_step()
            if is_busy or engine.is_group_busy:
                self._take_in(wait_s=_STALLED_WAIT_S if engine.is_stalled and not self._in_lockstep else 0.0)
            else:
                self._take_in(wait_s=_IDLE_VOTE_INTERVAL_S if self._in_lockstep else None)
            if self._is_shut_down:
                return
            if not is_busy and engine.has_unfinished_requests():
                self._report([], NO_HANDLES)  # the owner must know of the work, to miss what does not come of it
            is_drained = is_busy and not engine.has_unfinished_requests()
            if self._in_lockstep or engine.has_unfinished_requests():
                handles = engine.step()
            else:
                handles = engine.flush_inflight_reqs()
            results = [*engine.take_results(), *self._hand_over.go_on()]
            # Told also without outputs: the frontend's gauges must not stay where work left them, and there are steps
            # without any for a long time (beam search, a prompt in chunks, a grammar that is compiled).
            is_silent = time.monotonic() - self._last_report_s > _MAX_SILENCE_S
            engine.abort_clients(self._clients.remove_dead())
            if len(handles) or results or is_drained or is_silent:
                self._report(results, handles)

    def _take_in(self, *, wait_s: float | None) -> None:
        """Handles every message that is there; sleeps until there is one, but no longer than that (None: for ever)."""
        self._requests.poll(None if wait_s is None else round(wait_s * 1e3))
        while not self._is_shut_down:
            try:
                frame = self._requests.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            contents = []
            while self._requests.getsockopt(zmq.RCVMORE):
                contents.append(self._requests.recv(copy=False).buffer)
            self._handle(decode_to_engine(frame.buffer), contents)

    def _handle(self, message: ToEngine, contents: list[memoryview]) -> None:
        match message:
            case AddRequest() as message:
                self._add(message, contents)
            case AbortRequests(request_ids):
                self._engine.abort_request(request_ids)
            case AbortSequences(sequences):
                self._engine.abort_sequences(sequences)
            case Attach(client_id, outputs_address, process_id):
                with suppress(ProcessLookupError):
                    client_index = self._clients.add(client_id, outputs_address, process_id)
                    self._clients.send(client_index, EngineReady(self._engine.info, os.getpid()))
            case Detach(client_id):
                self._engine.abort_clients(self._clients.remove(client_id))
            case FetchBlocks() as fetch:
                self._hand_over.answer(fetch)
            case BlockContents() as blocks:
                self._hand_over.take(blocks, contents[0] if contents else memoryview(b""))
            case Shutdown():
                self._is_shut_down = True

    def _add(self, message: AddRequest, contents: list[memoryview]) -> None:
        client_index = self._clients.index_of(message.client_id)
        if client_index is None:
            return  # of a client that is gone
        request = EngineRequest(
            message.request_id,
            np.frombuffer(message.prompt_token_ids, dtype=np.int32),
            SamplingParams(**message.sampling_params),
            message.priority,
            message.bad_words_token_ids,
            message.embedding,
            message.queue_timeout_s,
            client_index,
            message.arrival_s,
            self._with_source(message.prompted),
            None if message.media is None else message.media.with_contents(contents),
        )
        try:
            self._engine.add_request(request)
        except DeepInferError as error:
            self._report([request_failed(request, error)], NO_HANDLES)
        except Exception:
            logger.exception("request %s: cannot be taken in", request.request_id)
            self._engine.abort_request([request.request_id])
            self._report([request_failed(request, not_taken_in_error(request.request_id))], NO_HANDLES)

    def _with_source(self, prompted: Prompted | None) -> Prompted | None:
        if prompted is None:
            return None
        return msgspec.structs.replace(prompted, source_index=self._hand_over.index_of(prompted.source))

    def _report(self, results: list[RequestResult], handles: Handles) -> None:
        """To each client what is its own, and to the owner how things stand in any case."""
        self._last_report_s = time.monotonic()
        stats = self._engine.stats()
        outputs_of = self._engine.request_output_pool.pack(handles)
        results_of: defaultdict[int, list[RequestResult]] = defaultdict(list)
        for result in results:
            results_of[result.client_index].append(result)
        for client_index in {OWNER_INDEX, *outputs_of, *results_of}:
            outputs = outputs_of.get(client_index, b"")
            told_stats = stats if client_index == OWNER_INDEX else None
            self._clients.send(client_index, StepOutputs(results_of[client_index], outputs, told_stats))
        self._stats_line.update(stats, self._engine.timers)


def _end_with_parent(folder: Path) -> None:
    """Ends this process when the parent does: its end of our standard input closes then.

    A parent that was killed has left the folder of its sockets behind.
    """
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> int:
    requests_address, outputs_address, owner_id = sys.argv[1:]
    config, place, number = (json.loads(sys.stdin.buffer.readline()) for _ in range(3))
    folder = Path(requests_address.removeprefix("ipc://")).parent
    threading.Thread(target=_end_with_parent, args=(folder,), name="deepinfer-parent-watch", daemon=True).start()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s deepinfer engine {number} %(levelname)s: %(message)s")
    faulthandler.enable()  # SIGABRT, which an owner sends to an engine that is stuck, shows where
    context = zmq.Context()
    requests: zmq.Socket[bytes] = context.socket(zmq.PULL)
    requests.set_hwm(0)
    requests.bind(requests_address)
    clients = ClientSockets(context)
    clients.add(owner_id, outputs_address, os.getppid())
    try:
        engine_config = EngineConfig(**config)
        ranks, world = None, None
        if place is not None:
            ranks = TensorRanks(engine_config, RankPlace(**place))
            world = join_world(engine_config, RankPlace(**place))
        is_prompt_engine = number < engine_config.num_prompt_engines
        prompts_at = BlockSource(requests_address, os.getpid()) if is_prompt_engine else None
        engine = LLMEngine(engine_config, world, prompts_at)
        hand_over = BlockHandOver(engine.scheduler, engine.kv_cache, engine.stream, context, requests_address)
        clients.send(OWNER_INDEX, EngineReady(engine.info, os.getpid()))
        in_lockstep = engine_config.data_parallel_lockstep and engine_config.data_parallel_size > 1
        loop = EngineLoop(engine, requests, clients, hand_over, engine_config.stats_interval_s, in_lockstep=in_lockstep)
        loop.run()
        engine.close()
        if ranks is not None:
            ranks.close()
    except Exception as error:
        logger.exception("the engine cannot go on")
        shown = "the engine failed; its log has the traceback"
        if isinstance(error, DeepInferError):
            shown = error.message if isinstance(error, EngineError) else str(error)
        clients.send_all(EngineFailed(shown))
        return 1
    finally:
        context.destroy(linger=1000)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Nothing is left to save, and threads of libraries must not hold the process.
    os._exit(code)
