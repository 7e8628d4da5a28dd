"""By when a step must have begun to compute a request, for requests that must not wait for ever."""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer_backend.engine.messages import EngineRequest, RequestFailed
from deepinfer_backend.errors import RequestCancelledError

_MIN_ENTRIES_TO_COMPACT = 1024


@dataclass(frozen=True, slots=True)
class QueueDeadline:
    """What it takes to fail the request; the request itself may be long gone."""

    request_id: str
    client_index: int
    timeout_s: float

    def failure(self) -> RequestFailed:
        error = queue_timeout_error(self.timeout_s)
        return RequestFailed(self.request_id, error.word, error.message, error.reason, self.client_index)


class _Entry(NamedTuple):
    deadline_s: float  # of time.monotonic
    number: int
    deadline: QueueDeadline


def queue_timeout_error(timeout_s: float) -> RequestCancelledError:
    return RequestCancelledError(
        f"queue_timeout of {timeout_s:g} s passed before a step began to compute it", reason="queue_timeout"
    )


class QueueDeadlines:
    """Owns the deadline of each request that was added with one. Taking the expired ones is O(expired · log(all)).

    It is not told when a request begins or ends: whoever takes an expired one looks whether it still waits. What was
    `discard`ed is not given out, so that an id may come again.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # a heap
        self._numbers: dict[str, int] = {}  # of the request's entry that counts
        self._next_number = itertools.count()

    def add(self, request: EngineRequest) -> None:
        """Without effect for a request without a queue_timeout_s, but that an older one of its id is forgotten."""
        self.discard(request.request_id)
        if request.queue_timeout_s is None:
            return
        number = next(self._next_number)
        self._numbers[request.request_id] = number
        deadline = QueueDeadline(request.request_id, request.client_index, request.queue_timeout_s)
        arrival_s = request.arrival_s or time.monotonic()
        heapq.heappush(self._entries, _Entry(arrival_s + request.queue_timeout_s, number, deadline))
        if len(self._entries) > _MIN_ENTRIES_TO_COMPACT and len(self._entries) > 2 * len(self._numbers):
            self._entries = [entry for entry in self._entries if self._counts(entry)]
            heapq.heapify(self._entries)

    def discard(self, request_id: str) -> None:
        """An unknown id is no error."""
        self._numbers.pop(request_id, None)

    def take_expired(self) -> list[QueueDeadline]:
        if not self._entries or self._entries[0].deadline_s > (now_s := time.monotonic()):
            return []
        expired = []
        while self._entries and self._entries[0].deadline_s <= now_s:
            entry = heapq.heappop(self._entries)
            if self._counts(entry):
                self.discard(entry.deadline.request_id)
                expired.append(entry.deadline)
        return expired

    def __len__(self) -> int:
        return len(self._entries)

    def _counts(self, entry: _Entry) -> bool:
        return self._numbers.get(entry.deadline.request_id) == entry.number
