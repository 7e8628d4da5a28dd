"""Everything between Triton and the engine: one object per loaded model.

Threads: Triton's own calls `accept`; the input thread tokenizes; the supervisor reads the engine's outputs; the
responder alone sends; the watcher looks for cancels, deadlines and the shutdown.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import msgspec

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import EngineClient, EngineOutputs
from deepinfer_backend.engine.input_processor import InputProcessor
from deepinfer_backend.engine.messages import EngineInfo
from deepinfer_backend.engine.output_processor import OutputProcessor
from deepinfer_backend.engine.queue_deadlines import queue_timeout_error
from deepinfer_backend.errors import DeepInferError, UnavailableError, request_failed_error
from deepinfer_backend.triton.engine_ranks import EngineRanks
from deepinfer_backend.triton.generate_request import CANCEL_INPUTS, CancelRequest, GenerateRequest, WireInterface
from deepinfer_backend.triton.metrics import ModelMetrics
from deepinfer_backend.triton.request import native_interface, new_request_id, read_utf8
from deepinfer_backend.triton.request_log import RequestLog
from deepinfer_backend.triton.responder import Responder
from deepinfer_backend.triton.response_stream import ResponseStream
from deepinfer_backend.triton.shutdown_signal import ShutdownSignal, drain_timeout_s
from deepinfer_backend.triton.tracing import read_trace_context, start_tracer
from deepinfer_backend.triton.watcher import Watcher

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0


class Frontend:
    """Owns the engine and the four threads of one model, from construction to `close`.

    Every request given to `accept` gets exactly one FINAL. `accept` never waits and never raises.
    """

    def __init__(
        self,
        *,
        model_name: str,
        model_version: str,
        start_engine: Callable[[int], EngineClient],
        load_tokenizer: Callable[[EngineInfo], Any],
        give_up: Callable[[], None],
        interface: WireInterface = native_interface,
    ) -> None:
        """Starts the engines and blocks until they are ready; raises DeepInferError if one cannot start.

        `start_engine`: of a data-parallel rank. `give_up` is called once if they die too often.
        """
        self._model_name = model_name
        self._is_draining = False
        self._input_queue: SimpleQueue[tuple[GenerateRequest, float] | None] = SimpleQueue()  # with its arrival
        self._ranks = EngineRanks(
            start_engine,
            on_outputs=self._on_outputs,
            on_death=self._on_engine_death,
            on_failed=give_up,
        )
        try:
            info = self._ranks.info
            config = EngineConfig(**info.config)
            tokenizer = load_tokenizer(info)
            self._parse_request = interface(tokenizer, info, config)
            self._tracer = start_tracer(config.otlp_traces_endpoint, model_name)
        except BaseException:
            self._ranks.stop()
            raise
        self._input_processor = InputProcessor(tokenizer, info, config)
        self._config = config
        self._request_log = RequestLog(config.enable_log_requests)
        self._metrics = ModelMetrics(model_name, model_version)
        self._responder = Responder(
            OutputProcessor(tokenizer),
            self._ranks.abort_requests,
            self._ranks.abort_sequences,
            self._ranks.forget_request,
            [
                self._metrics.record_request,
                self._request_log.log_end,
                *([self._tracer.record_request] if self._tracer else []),
            ],
            self._metrics.record_tokens,
            config.max_queue_size,
        )
        self._watcher = Watcher(
            self._responder,
            self._metrics,
            self._request_log,
            ShutdownSignal.from_environment(model_name, model_version, self.is_available),
            drain_timeout_s(),
            self._on_draining,
        )
        self._input_thread = threading.Thread(target=self._process_inputs, name="deepinfer-input", daemon=True)
        for part in (self._responder, self._ranks, self._watcher, self._input_thread):
            part.start()

    def close(self) -> None:
        """Ends what still runs with an error and a FINAL, then the threads and the engine; bounded."""
        self._is_draining = True
        self._input_queue.put(None)
        self._input_thread.join(_JOIN_TIMEOUT_S)
        self._watcher.stop()
        self._responder.stop()
        self._request_log.log_left_out(at_once=True)
        if self._tracer is not None:
            self._tracer.close()
        self._ranks.stop()
        self._metrics.publish()
        self._metrics.close()

    def accept(self, requests: list[Any]) -> None:
        """Takes Triton's InferenceRequests; each is answered through its own sender."""
        for request in requests:
            self._accept_one(request)

    def is_available(self) -> bool:
        """Whether a new request would be taken."""
        try:
            self._check_available()
        except UnavailableError:
            return False
        return True

    def _accept_one(self, request: Any) -> None:
        sender = request.get_response_sender()
        trace_context = read_trace_context(request) if self._tracer else ""
        request_id = ""
        try:
            client_request_id = read_utf8("id", request.request_id)
            request_id = new_request_id(client_request_id, self._model_name)
            self._check_available()
            self._check_room(request)
            parsed = self._parse_request(request, request_id, client_request_id)
            if isinstance(parsed, CancelRequest):
                stream = ResponseStream(request_id, sender, None, trace_context)
            else:
                parsed = self._with_defaults(parsed)
                # The answer needs nothing of the prompt, which may be large.
                stream = ResponseStream(request_id, sender, dataclasses.replace(parsed, prompt=""), trace_context)
                self._request_log.log_arrival(parsed)
            self._responder.open(stream)
        except Exception as error:
            request_id = request_id or new_request_id("", self._model_name)  # its own cannot be read
            if not isinstance(error, DeepInferError):
                logger.exception("request %s: cannot be read", request_id)
                error = request_failed_error(request_id)
            self._refuse(request_id, sender, trace_context, error)
        else:
            if isinstance(parsed, CancelRequest):
                self._responder.cancel(parsed)
            else:
                self._input_queue.put((parsed, stream.arrival_s))

    def _check_room(self, request: Any) -> None:
        """Before anything that costs time; a request that may only be there to cancel others is let through."""
        try:
            self._responder.check_room()
        except UnavailableError:
            if CANCEL_INPUTS.isdisjoint(tensor.name() for tensor in request.inputs()):
                raise

    def _with_defaults(self, request: GenerateRequest) -> GenerateRequest:
        config = self._config
        return dataclasses.replace(
            request,
            priority=request.priority or config.default_priority,
            timeout_s=request.timeout_s or config.request_timeout_s,
            queue_timeout_s=request.queue_timeout_s or config.queue_timeout_s,
        )

    def _check_available(self) -> None:
        if self._is_draining:
            raise UnavailableError("the server is shutting down")
        self._ranks.check_available()

    def _refuse(self, request_id: str, sender: Any, trace_context: str, error: DeepInferError) -> None:
        self._responder.open(ResponseStream(request_id, sender, None, trace_context))
        self._responder.fail(request_id, error)

    def _process_inputs(self) -> None:
        while (queued := self._input_queue.get()) is not None:
            request, arrival_s = queued
            try:
                self._process_input(request, arrival_s)
            except DeepInferError as error:
                self._responder.fail(request.request_id, error)
            except Exception:
                logger.exception("request %s: cannot be processed", request.request_id)
                self._responder.fail(request.request_id, request_failed_error(request.request_id))

    def _process_input(self, request: GenerateRequest, arrival_s: float) -> None:
        if not self._responder.is_open(request.request_id):
            return  # cancelled while it waited here
        queue_timeout_s = request.queue_timeout_s
        if queue_timeout_s is not None and time.monotonic() > arrival_s + queue_timeout_s:
            raise queue_timeout_error(queue_timeout_s)  # as the engine would say: no tokens are made for nobody
        engine_request = self._input_processor.process(
            request.request_id,
            request.prompt,
            request.sampling_params,
            priority=request.priority,
            stream=request.stream,
            embedding=request.embedding,
            bad_words_token_ids=request.bad_words_token_ids,
            wants_logprobs=request.wants_logprobs,
            wants_cumulative_logprob=request.wants_cumulative_logprob,
            wants_prompt_logprobs=request.wants_prompt_logprobs,
        )
        engine_request = msgspec.structs.replace(engine_request, queue_timeout_s=queue_timeout_s, arrival_s=arrival_s)
        self._responder.admit(engine_request)
        self._ranks.add_request(engine_request)
        # Ended between the two: the abort may have overtaken the request.
        if not self._responder.is_open(request.request_id):
            self._ranks.abort_requests([request.request_id])

    def _on_outputs(self, rank: int, outputs: EngineOutputs) -> None:
        if outputs.stats is not None:
            self._metrics.record_stats(rank, outputs.stats)
        self._responder.respond(outputs)

    def _on_engine_death(self, rank: int, request_ids: list[str], error: DeepInferError) -> None:
        self._metrics.record_engine_death(rank)
        for request_id in request_ids:
            self._responder.fail(request_id, error)

    def _on_draining(self) -> None:
        self._is_draining = True
