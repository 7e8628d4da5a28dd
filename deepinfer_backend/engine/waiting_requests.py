"""Requests that the scheduler does not have yet: their media are being processed, their grammar is being compiled, or
their adapter has no place.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from deepinfer_backend.engine.grammars import Grammar, GrammarQueue
from deepinfer_backend.engine.messages import EngineRequest, RequestFailed, request_failed
from deepinfer_backend.errors import DeepInferError, EngineError, InvalidRequestError, not_taken_in_error
from deepinfer_backend.media.pool import MultiModalProcessor
from deepinfer_backend.models.adapter_cache import AdapterCache

logger = logging.getLogger(__name__)

Admit = Callable[[EngineRequest, Grammar | None, int], None]
"""Gives the scheduler a request with its grammar and its lora_id (0: none); raises DeepInferError for a bad one."""

TakePrompt = Callable[[EngineRequest], EngineRequest]
"""A request whose media were processed → with its prompt; raises DeepInferError for a bad one."""

_PREPARATION_WAIT_S = 0.02  # of an engine with nothing else to do; as long a new request may have to wait
_MAX_OVERTAKEN_S = 2.0


@dataclass(order=True, slots=True)
class _WaitsForPlace:
    """`rank`, `number`: who is served first."""

    rank: float
    number: int
    since_s: float = field(compare=False)
    request: EngineRequest = field(compare=False)
    grammar: Grammar | None = field(compare=False)
    is_gone: bool = field(default=False, compare=False)


class WaitingRequests:
    """Owns requests from `add` until the scheduler gets them. Used by the engine's thread.

    1. A request waits for its media first, then for its grammar, then for a place for its adapter; one that needs
       nothing goes on at once.
    2. Places are given in the scheduler's order: priority (with age), then arrival. A request whose adapter is in
       memory needs none and goes on, but not for ever: once the first has waited _MAX_OVERTAKEN_S, every request
       with an adapter waits behind it, so that those in use come free.
    3. An acquired adapter belongs to the request that the scheduler took; `AdapterCache.release` is its owner's.
    4. What was made of a request's media is released, if the request ends here.
    """

    def __init__(
        self,
        media: MultiModalProcessor,
        grammars: GrammarQueue,
        adapters: AdapterCache,
        take_prompt: TakePrompt,
        admit: Admit,
        release_media: Callable[[EngineRequest], None],
        priority_aging_s: float,
    ) -> None:
        """`priority_aging_s`: the scheduler's own."""
        self._media = media
        self._take_prompt = take_prompt
        self._release_media = release_media
        self._for_media: dict[str, EngineRequest] = {}
        self._grammars = grammars
        self._adapters = adapters
        self._admit = admit
        self._priority_aging_s = priority_aging_s
        self._for_grammar: dict[str, EngineRequest] = {}
        self._for_place: dict[str, _WaitsForPlace] = {}
        self._order: list[_WaitsForPlace] = []  # a heap of those, and of some that are gone
        self._next_number = itertools.count()

    def __len__(self) -> int:
        return len(self._for_media) + len(self._for_grammar) + len(self._for_place)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in waiting for waiting in (self._for_media, self._for_grammar, self._for_place))

    def add(self, request: EngineRequest) -> None:
        """
        Raises:
            InvalidRequestError: another of its id waits, its adapter is unknown, or the scheduler refuses it.
            UnavailableError: too many bytes of media wait.
            EngineError: its adapter cannot be loaded.
        """
        params = request.sampling_params
        if request.request_id in self:
            raise InvalidRequestError(f"request_id: '{request.request_id}' is that of an unfinished request")
        if params.lora_name is not None:
            self._adapters.check_known(params.lora_name)
        if request.media is None:
            self._add_with_prompt(request)
        else:
            self._media.submit(request.request_id, request.media)
            self._for_media[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        """Forgets it; false if it does not wait here."""
        request = self._remove(request_id)
        if request is not None:
            self._release_media(request)
        return request is not None

    def _remove(self, request_id: str) -> EngineRequest | None:
        if (request := self._for_media.pop(request_id, None)) is not None:
            self._media.cancel(request_id)
            return request
        if (request := self._for_grammar.pop(request_id, None)) is not None:
            self._grammars.cancel(request_id)
            return request
        waiting = self._for_place.pop(request_id, None)
        if waiting is None:
            return None
        waiting.is_gone = True
        return waiting.request

    def abort_client(self, client_index: int) -> None:
        """The same for every request of this client."""
        requests = [
            *self._for_media.values(),
            *self._for_grammar.values(),
            *(each.request for each in self._for_place.values()),
        ]
        for request in requests:
            if request.client_index == client_index:
                self.abort(request.request_id)

    def admit_ready(self, *, may_sleep: bool) -> list[RequestFailed]:
        """Gives the scheduler what need not wait any more; what cannot go on comes back: the scheduler may have it.

        may_sleep: there is nothing else to do, so that media and grammars may be waited for, a little.
        """
        failures: list[RequestFailed] = []
        if may_sleep and (self._for_media or self._for_grammar) and not self._for_place:
            select.select([self._media.fileno(), self._grammars.fileno()], [], [], _PREPARATION_WAIT_S)
        if self._for_media:
            self._take_media(failures)
        if self._for_grammar:
            self._take_grammars(failures)
        while (first := self._first_for_place()) is not None:
            try:
                if not self._try_to_admit(first.request, first.grammar):
                    break
            except Exception as error:
                failures.append(self._fail(first.request, error))
            self._remove(first.request.request_id)
        return failures

    def _take_media(self, failures: list[RequestFailed]) -> None:
        for request_id, processed in self._media.fetch():
            request = msgspec.structs.replace(self._for_media.pop(request_id), media=None, processed=processed)
            try:
                self._add_with_prompt(self._take_prompt(request))
            except Exception as error:
                failures.append(self._fail(request, error))
        for request_id, reason in self._media.fetch_to_abort_requests():
            failures.append(self._fail(self._for_media.pop(request_id), reason))

    def _take_grammars(self, failures: list[RequestFailed]) -> None:
        for request_id, compiled in self._grammars.poll():
            request = self._for_grammar.pop(request_id)
            try:
                if isinstance(compiled, DeepInferError):
                    raise compiled
                self._add_with_grammar(request, Grammar(compiled))
            except Exception as error:
                failures.append(self._fail(request, error))

    def _add_with_prompt(self, request: EngineRequest) -> None:
        if request.sampling_params.structured_outputs is None:
            self._add_with_grammar(request, None)
        else:
            self._for_grammar[request.request_id] = request
            self._grammars.submit(request.request_id, request.sampling_params.structured_outputs)

    def _add_with_grammar(self, request: EngineRequest, grammar: Grammar | None) -> None:
        if self._may_go_on(request.sampling_params.lora_name) and self._try_to_admit(request, grammar):
            return
        now_s = time.monotonic()
        # As the scheduler ranks its own.
        aging_s = self._priority_aging_s
        rank = now_s + request.priority * aging_s if aging_s else float(request.priority)
        waiting = _WaitsForPlace(rank, next(self._next_number), now_s, request, grammar)
        self._for_place[request.request_id] = waiting
        heapq.heappush(self._order, waiting)

    def _may_go_on(self, lora_name: str | None) -> bool:
        """Whether nobody is before it."""
        first = self._first_for_place()
        if lora_name is None or first is None:
            return True
        return self._adapters.is_loaded(lora_name) and time.monotonic() - first.since_s < _MAX_OVERTAKEN_S

    def _try_to_admit(self, request: EngineRequest, grammar: Grammar | None) -> bool:
        """False if there is no place for its adapter."""
        name = request.sampling_params.lora_name
        if name is None:
            self._admit(request, grammar, 0)
            return True
        lora_id = self._adapters.acquire(name)
        if lora_id is None:
            return False
        try:
            self._admit(request, grammar, lora_id)
        except DeepInferError:
            self._adapters.release(name)
            raise
        return True

    def _first_for_place(self) -> _WaitsForPlace | None:
        while self._order and self._order[0].is_gone:
            heapq.heappop(self._order)
        return self._order[0] if self._order else None

    def _fail(self, request: EngineRequest, error: Exception) -> RequestFailed:
        self._release_media(request)
        return _failure(request, error)


def _failure(request: EngineRequest, error: Exception) -> RequestFailed:
    if not isinstance(error, DeepInferError):
        logger.error("request %s: cannot be taken in", request.request_id, exc_info=error)
        return request_failed(request, not_taken_in_error(request.request_id))
    if isinstance(error, EngineError):
        logger.error("request %s: %s", request.request_id, error)
    return request_failed(request, error)
