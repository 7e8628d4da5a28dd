"""Grammars of an engine: compiled one after another in a process of their own, then followed token by token."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.grammar_compiler import Answer, Compiled, Ready, Refused, Start, one_line
from deepinfer_backend.engine.grammar_spec import GrammarSource, to_source
from deepinfer_backend.errors import DeepInferError, EngineError, InvalidRequestError
from deepinfer_backend.helper_process import HelperProcess
from deepinfer_backend.sampling_params import StructuredOutputs

# xgrammar imports transformers; an engine without grammars starts without either.
if TYPE_CHECKING:
    import xgrammar as xgr

CompiledGrammar: TypeAlias = "xgr.CompiledGrammar"
Result: TypeAlias = "xgr.CompiledGrammar | DeepInferError"

# Time of the processor for one token. Most take a hundredth of a millisecond; with a grammar that has many readings of
# the same text, it grows with the cube of the text's length.
_MAX_TOKEN_TIME_S = 0.5
_CACHE_BYTES = 64 * 2**20
_START_TIMEOUT_S = 120.0
# The compiler keeps the time limit itself; this is for when it does not.
_ANSWER_GRACE_S = 10.0
_END_TIMEOUT_S = 10.0


class Grammar:
    """One sequence's place in its grammar.

    The same end tokens that end the model's texts end this one, and only where the grammar is complete. Not for
    several threads at a time.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        import xgrammar as xgr

        self._matcher = xgr.GrammarMatcher(compiled)
        self._accept_time_s = 0.0

    @property
    def is_terminated(self) -> bool:
        """An end token was accepted."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Goes on by one token; False, and no change, when the grammar does not allow it here."""
        started_at = time.thread_time()
        accepted = not self.is_terminated and bool(self._matcher.accept_token(token_id))
        self._accept_time_s = time.thread_time() - started_at
        return accepted

    def take_back(self, num_tokens: int) -> None:
        """Undoes the last accepts."""
        self._matcher.rollback(num_tokens)

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Writes which tokens may follow: bit i % 32 of row[i // 32] is set for an allowed token i.

        Bits from the vocabulary size on mean nothing. A terminated grammar allows the end tokens: a row is never empty.

        Args:
            row: [ceil(vocab_size / 32)], of the vocabulary size that the grammar was compiled for, contiguous.

        Raises:
            InvalidRequestError: no token may follow: the grammar (or the model's vocabulary) has no way on from here;
                or following the grammar has become so slow that it would hold up the others.
        """
        if self.is_terminated:
            row[:] = 0
            for token_id in self._matcher.stop_token_ids:
                row.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))
            return
        started_at = time.thread_time()
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1))
        token_time_s = self._accept_time_s + time.thread_time() - started_at
        if token_time_s > _MAX_TOKEN_TIME_S:
            raise InvalidRequestError(
                f"structured_outputs is too ambiguous: one token took {token_time_s:.2f} s, "
                f"must be at most {_MAX_TOKEN_TIME_S:g} s"
            )
        if not row.any():
            raise InvalidRequestError(
                "structured_outputs cannot be completed: no token of the model may follow this text"
            )

    def fork(self) -> Grammar:
        """A copy that goes its own way."""
        fork = Grammar.__new__(Grammar)
        fork._matcher = self._matcher.fork()
        fork._accept_time_s = 0.0
        return fork


class GrammarQueue:
    """Compiles specs in the order in which they came, without making the engine wait.

    Owns the compiler process and the thread `deepinfer-grammars` that talks to it; both start with the first spec
    that is not in the cache. Every submitted request comes out of `poll` exactly once, unless it is cancelled. All
    methods are for the engine's thread.
    """

    def __init__(
        self, tokenizer_path: Path, vocab_size: int, end_token_ids: Sequence[int], config: EngineConfig
    ) -> None:
        """`vocab_size` is that of the model's logits; all `end_token_ids` end a text."""
        self._start = Start(str(tokenizer_path), vocab_size, list(end_token_ids), config.grammar_compile_timeout_s)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Guards all below, which both threads use.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._waiting: OrderedDict[GrammarSource, list[str]] = OrderedDict()
        self._finished: deque[tuple[str, Result]] = deque()
        self._cache = _Cache(_CACHE_BYTES)
        self._compiler: HelperProcess | None = None
        self._tokenizer_info: xgr.TokenizerInfo | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def num_pending(self) -> int:
        """Requests that were submitted and have not come out of `poll`."""
        with self._lock:
            return sum(len(request_ids) for request_ids in self._waiting.values()) + len(self._finished)

    def fileno(self) -> int:
        """Readable while `poll` has something to return."""
        return self._wakeup

    def submit(self, request_id: str, spec: StructuredOutputs) -> None:
        """Queues a spec that `check_spec` has passed."""
        result: Result | None
        try:
            source = to_source(spec)
            result = (
                None
                if self._start.end_token_ids
                else InvalidRequestError(f"{source.field}: this model has no end token, so no grammar can end")
            )
        except InvalidRequestError as error:
            result = error
        with self._lock:
            if result is None:
                result = self._cache.get(source)
            if result is not None:
                self._finish([request_id], result)
                return
            self._waiting.setdefault(source, []).append(request_id)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deepinfer-grammars", daemon=True)
                self._thread.start()
            self._work.notify()

    def cancel(self, request_id: str) -> None:
        """Forgets a request wherever it is; an unknown one is no error. What is being compiled is compiled."""
        with self._lock:
            for source, request_ids in list(self._waiting.items()):
                if request_id in request_ids:
                    request_ids.remove(request_id)
                    if not request_ids and source is not next(iter(self._waiting)):
                        del self._waiting[source]
            self._finished = deque(item for item in self._finished if item[0] != request_id)

    def poll(self) -> list[tuple[str, Result]]:
        """What is finished since the last call, in that order: request id, and the grammar or why there is none."""
        with self._lock:
            finished = list(self._finished)
            self._finished.clear()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
        return finished

    def close(self) -> None:
        """Ends process and thread; safe to call twice. What is pending never comes out."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._work.notify()
            if self._compiler is not None:
                self._compiler.kill()
        if self._thread is not None:
            self._thread.join(_END_TIMEOUT_S)
        os.close(self._wakeup)

    def _finish(self, request_ids: list[str], result: Result) -> None:
        """With the lock held."""
        self._finished.extend((request_id, result) for request_id in request_ids)
        os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closed:
                    self._work.wait()
                if self._closed:
                    break
                source, request_ids = next(iter(self._waiting.items()))
                if not request_ids:
                    del self._waiting[source]
                    continue
            result: Result
            num_bytes = 0
            try:
                result, num_bytes = self._compile(source)
            except DeepInferError as error:
                result = error
            except Exception as error:
                result = EngineError(f"{source.field}: the grammar compiler failed: {one_line(error)}")
            with self._lock:
                if not isinstance(result, DeepInferError):
                    self._cache.put(source, result, num_bytes)
                self._finish(self._waiting.pop(source), result)
        if self._compiler is not None:
            self._compiler.stop()

    def _compile(self, source: GrammarSource) -> tuple[CompiledGrammar, int]:
        """The grammar and about how many bytes it takes.

        Raises:
            InvalidRequestError: what is wrong with the source.
            EngineError: the compiler does not start, or ended before it answered.
        """
        compiler, tokenizer_info = self._running_compiler()
        try:
            answer = _ask(compiler, source, self._start.compile_timeout_s + _ANSWER_GRACE_S)
        except (TimeoutError, EOFError):
            ending = compiler.stop()
            raise EngineError(f"{source.field} was not compiled: the grammar compiler ended with {ending}") from None
        if isinstance(answer, Refused):
            raise InvalidRequestError(f"{source.field} {answer.reason}")
        assert isinstance(answer, Compiled)
        import xgrammar as xgr

        compiled = xgr.CompiledGrammar.deserialize_json(answer.grammar, tokenizer_info)
        return compiled, int(compiled.memory_size_bytes) + len(source.text)

    def _running_compiler(self) -> tuple[HelperProcess, xgr.TokenizerInfo]:
        if self._compiler is not None and self._compiler.is_running and self._tokenizer_info is not None:
            return self._compiler, self._tokenizer_info
        with self._lock:
            if self._closed:
                raise EngineError("the engine is shutting down")
            compiler = self._compiler = HelperProcess("deepinfer_backend.engine.grammar_compiler")
        import xgrammar as xgr  # as the process does meanwhile

        try:
            answer = _ask(compiler, self._start, _START_TIMEOUT_S)
        except (TimeoutError, EOFError):
            ending = compiler.stop()
            raise EngineError(f"the grammar compiler did not start ({ending})") from None
        if isinstance(answer, Refused):
            compiler.stop()
            raise EngineError(answer.reason)
        assert isinstance(answer, Ready)
        if self._tokenizer_info is None:
            self._tokenizer_info = xgr.TokenizerInfo.deserialize_json(answer.tokenizer_info)
        return compiler, self._tokenizer_info


def _ask(compiler: HelperProcess, message: Start | GrammarSource, timeout_s: float) -> Answer:
    """Raises what `HelperProcess.ask` does."""
    answer: Answer = msgspec.msgpack.decode(compiler.ask(msgspec.msgpack.encode(message), timeout_s), type=Answer)
    return answer


class _Cache:
    """The grammars used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[GrammarSource, tuple[CompiledGrammar, int]] = OrderedDict()

    def get(self, source: GrammarSource) -> CompiledGrammar | None:
        entry = self._entries.get(source)
        if entry is None:
            return None
        self._entries.move_to_end(source)
        return entry[0]

    def put(self, source: GrammarSource, compiled: CompiledGrammar, num_bytes: int) -> None:
        self._entries[source] = (compiled, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self._num_bytes -= freed_bytes
