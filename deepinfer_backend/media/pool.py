"""The media processes of an engine: what has media goes in, and comes out as tokens and features, or as an error."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict, deque
from pathlib import Path

import msgspec

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import DeepInferError, EngineError, InvalidRequestError, UnavailableError
from deepinfer_backend.helper_process import HelperProcess
from deepinfer_backend.media.prompt import (
    MediaAnswer,
    MediaPrompt,
    MediaRefused,
    MediaWorkerReady,
    MediaWorkerStart,
    ProcessedPrompt,
)

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0
_MAX_TRIES = 2

_decoder = msgspec.msgpack.Decoder(MediaAnswer)


class MultiModalProcessor:
    """Makes prompts of requests with media, without making the engine wait.

    1. Every submitted request comes out of `fetch` or `fetch_to_abort_requests` exactly once, unless it is cancelled.
    2. Each of `num_media_workers` threads `deepinfer-media-…`, which start when they are needed, talks to a process of
       its own. It ends that when a request takes longer than `media_timeout_s`, and replaces it when it has ended. A
       request whose process ended is tried once more, and then fails alone.
    3. What is known of a request is held by whoever fetched it until `release`. While that is more than
       `max_queued_media_bytes`, no further request is begun.

    All methods are for the engine's thread.
    """

    def __init__(self, model_path: Path, config: EngineConfig, *, starts_now: bool = False) -> None:
        """starts_now: one process is ready, or soon, when the first request comes."""
        self._start = MediaWorkerStart(
            str(model_path), config.max_image_pixels, config.max_video_frames, config.num_video_frames
        )
        self._timeout_s = config.media_timeout_s
        self._max_bytes = config.max_queued_media_bytes
        self._num_workers = config.num_media_workers
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Guards all below, which the threads use too.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._waiting: OrderedDict[str, MediaPrompt] = OrderedDict()
        self._begun: set[str] = set()
        self._num_waiting_bytes = 0
        self._num_held_bytes = 0
        self._fetched: deque[tuple[str, ProcessedPrompt]] = deque()
        self._failed: deque[tuple[str, DeepInferError]] = deque()
        self._processes: dict[int, HelperProcess] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        if starts_now:
            self._start_thread()

    def fileno(self) -> int:
        """Readable while there is something to fetch."""
        return self._wakeup

    def submit(self, request_id: str, prompt: MediaPrompt) -> None:
        """
        Raises:
            UnavailableError: the media that wait are too many bytes already.
        """
        with self._lock:
            num_bytes = self._num_waiting_bytes + prompt.num_bytes
            if self._waiting and num_bytes > self._max_bytes:
                raise UnavailableError(
                    f"the queue is full: media of {self._num_waiting_bytes} bytes wait (max_queued_media_bytes is "
                    f"{self._max_bytes})",
                    reason="queue_full",
                )
            self._num_waiting_bytes = num_bytes
            self._waiting[request_id] = prompt
            if len(self._threads) < min(self._num_workers, len(self._waiting) + len(self._begun)):
                self._start_thread()
            self._work.notify()

    def cancel(self, request_id: str) -> None:
        """Forgets a request wherever it is; an unknown one is no error."""
        with self._lock:
            prompt = self._waiting.pop(request_id, None)
            if prompt is not None:
                self._num_waiting_bytes -= prompt.num_bytes
            self._begun.discard(request_id)
            for fetched_id, processed in self._fetched:
                if fetched_id == request_id:
                    self._num_held_bytes -= processed.num_bytes
            self._fetched = deque(item for item in self._fetched if item[0] != request_id)
            self._failed = deque(item for item in self._failed if item[0] != request_id)

    def fetch(self) -> list[tuple[str, ProcessedPrompt]]:
        """What is ready since the last call: (request id, its prompt)."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            fetched = list(self._fetched)
            self._fetched.clear()
        return fetched

    def fetch_to_abort_requests(self) -> list[tuple[str, DeepInferError]]:
        """What has failed since the last call: (request id, why)."""
        with self._lock:
            failed = list(self._failed)
            self._failed.clear()
        return failed

    def release(self, processed: ProcessedPrompt) -> None:
        """Nothing that was fetched with this prompt is needed any more."""
        with self._lock:
            self._num_held_bytes -= processed.num_bytes
            self._work.notify()

    @property
    def num_held_bytes(self) -> int:
        """Of features that were made and not released."""
        return self._num_held_bytes

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that run."""
        with self._lock:
            return [process.pid for process in self._processes.values() if process.is_running]

    def close(self) -> None:
        """Ends processes and threads; safe to call twice. What is pending never comes out."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._work.notify_all()
            for process in self._processes.values():
                process.kill()
        for thread in self._threads:
            thread.join(_END_TIMEOUT_S)
        os.close(self._wakeup)

    def _start_thread(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._run, args=(number,), name=f"deepinfer-media-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, number: int) -> None:
        try:
            self._running_process(number)
        except DeepInferError as error:
            if not self._is_closed:
                logger.error("images and videos cannot be taken: %s", error.message)
        while (next_one := self._next()) is not None:
            request_id, prompt = next_one
            try:
                answer: ProcessedPrompt | DeepInferError = self._process(number, prompt)
            except DeepInferError as error:
                answer = error
            except Exception:
                logger.exception("request %s: its media cannot be processed", request_id)
                self._end(number)  # nobody knows what it would answer next
                answer = EngineError(f"request {request_id}: its media cannot be processed; the log has the traceback")
            self._finish(request_id, answer)
        self._end(number)

    def _next(self) -> tuple[str, MediaPrompt] | None:
        with self._lock:
            while not self._is_closed and (not self._waiting or self._num_held_bytes > self._max_bytes):
                self._work.wait()
            if self._is_closed:
                return None
            request_id, prompt = self._waiting.popitem(last=False)
            self._num_waiting_bytes -= prompt.num_bytes
            self._begun.add(request_id)
            return request_id, prompt

    def _finish(self, request_id: str, answer: ProcessedPrompt | DeepInferError) -> None:
        with self._lock:
            if request_id not in self._begun or self._is_closed:
                return
            self._begun.discard(request_id)
            if isinstance(answer, DeepInferError):
                self._failed.append((request_id, answer))
            else:
                self._num_held_bytes += answer.num_bytes
                self._fetched.append((request_id, answer))
            os.eventfd_write(self._wakeup, 1)

    def _process(self, number: int, prompt: MediaPrompt) -> ProcessedPrompt:
        answer = None
        for _ in range(_MAX_TRIES):
            process = self._running_process(number)
            try:
                answer = _decoder.decode(process.ask(msgspec.msgpack.encode(prompt), self._timeout_s))
                break
            except TimeoutError:
                self._end(number)
                raise InvalidRequestError(
                    f"{prompt.media[0].field}: its request's media took longer than {self._timeout_s:g} s "
                    "(media_timeout_s)"
                ) from None
            except EOFError:
                ending = self._end(number)
                if not self._is_closed:
                    logger.error("a media process ended with %s", ending)
        if answer is None:
            raise InvalidRequestError(
                f"{prompt.media[0].field}: media processes end with {ending} while they read its request's media"
            )
        if isinstance(answer, MediaRefused):
            raise InvalidRequestError(answer.message)
        assert isinstance(answer, ProcessedPrompt)
        return answer

    def _running_process(self, number: int) -> HelperProcess:
        with self._lock:
            process = self._processes.get(number)
            if process is not None and process.is_running:
                return process
            if self._is_closed:
                raise EngineError("the engine is shutting down")
            if process is not None:
                logger.error("a media process ended with %s; another one takes its place", process.stop())
            process = self._processes[number] = HelperProcess("deepinfer_backend.media.worker")
        try:
            answer = _decoder.decode(process.ask(msgspec.msgpack.encode(self._start), _START_TIMEOUT_S))
        except (TimeoutError, EOFError):
            raise EngineError(f"a media process did not start ({self._end(number)})") from None
        if not isinstance(answer, MediaWorkerReady):
            self._end(number)
            assert isinstance(answer, MediaRefused)
            raise EngineError(f"the model's processor cannot be loaded: {answer.message}")
        return process

    def _end(self, number: int) -> str:
        """How it ended."""
        with self._lock:
            process = self._processes.pop(number, None)
        return "" if process is None else process.stop()
