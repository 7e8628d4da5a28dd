"""Which of several equal engines (data-parallel ranks) a request goes to."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deepinfer_backend.engine.messages import EngineRequest

T = TypeVar("T")

_CHUNK_TOKENS = 64
_MAX_KNOWN_CHUNKS = 65_536
_SEQUENCE_WORK = 64  # a sequence that decodes is worth so many tokens of prefill


@dataclass(frozen=True, slots=True)
class _Assignment:
    rank: int
    work: int


class RequestRouter:
    """Gives each request to the rank with the least outstanding work, prompt tokens in its cache considered.

    Work is counted in tokens of prefill: those of a request that the rank has not computed before, and a fixed number
    for each of its sequences, until it has ended. What a rank has computed is remembered by chunks of prompts, those
    used last; it is a guess, since a rank forgets too. (The idea is that of SGLang's cache-aware router.)

    All methods may be called from any thread.
    """

    def __init__(self, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._work = [0] * num_ranks
        self._assignments: dict[str, _Assignment] = {}
        self._ranks_with: OrderedDict[bytes, int] = OrderedDict()  # chunk → a bit for each rank that computed it

    def assign(self, request: EngineRequest, available: Collection[int]) -> int:
        """The rank, one of those available, of which there is one; it has the request until that is released."""
        keys = _chunk_keys(request)
        num_tokens = len(request.prompt_token_ids)
        with self._lock:
            num_known = self._num_known_tokens(keys)
            rank = min(available, key=lambda each: (self._work[each] - num_known[each], each))
            work = num_tokens - num_known[rank] + _SEQUENCE_WORK * _num_sequences(request)
            self._assignments[request.request_id] = _Assignment(rank, work)
            self._work[rank] += work
            for key in keys:
                self._ranks_with[key] = self._ranks_with.pop(key, 0) | 1 << rank
            while len(self._ranks_with) > _MAX_KNOWN_CHUNKS:
                self._ranks_with.popitem(last=False)
        return rank

    def by_rank(self, items: Iterable[T], request_id_of: Callable[[T], str]) -> dict[int, list[T]]:
        """What each rank is to be told of what concerns its requests.

        Of a request that no rank is known to have all are told: it may just have ended, or be on its way.
        """
        items_of: defaultdict[int, list[T]] = defaultdict(list)
        for item in items:
            rank = self.rank_of(request_id_of(item))
            for each in range(len(self._work)) if rank is None else [rank]:
                items_of[each].append(item)
        return items_of

    def rank_of(self, request_id: str) -> int | None:
        """None if it is not assigned."""
        assignment = self._assignments.get(request_id)
        return None if assignment is None else assignment.rank

    def release(self, request_id: str) -> bool:
        """The request has ended; false if it was not assigned."""
        with self._lock:
            assignment = self._assignments.pop(request_id, None)
            if assignment is not None:
                self._work[assignment.rank] -= assignment.work
            return assignment is not None

    def release_rank(self, rank: int) -> list[str]:
        """The rank's engine has ended, and with it its cache; returns what it had."""
        with self._lock:
            request_ids = [each for each, assignment in self._assignments.items() if assignment.rank == rank]
            for request_id in request_ids:
                del self._assignments[request_id]
            self._work[rank] = 0
            for key, ranks in self._ranks_with.items():
                self._ranks_with[key] = ranks & ~(1 << rank)
            return request_ids

    def _num_known_tokens(self, keys: Sequence[bytes]) -> list[int]:
        """By rank: how much of the prompt it has computed before."""
        num_known, ranks = [0] * len(self._work), (1 << len(self._work)) - 1
        for num_chunks, key in enumerate(keys, start=1):
            ranks &= self._ranks_with.get(key, 0)
            if not ranks:
                break
            for rank in range(len(num_known)):
                if ranks >> rank & 1:
                    num_known[rank] = num_chunks * _CHUNK_TOKENS
        return num_known


def _chunk_keys(request: EngineRequest) -> list[bytes]:
    """Of the prompt's whole chunks, each with all before it; of one adapter and one salt."""
    params = request.sampling_params
    digest = hashlib.blake2b(repr((params.lora_name, params.cache_salt)).encode(), digest_size=16)
    keys = []
    for begin in range(0, len(request.prompt_token_ids) - _CHUNK_TOKENS + 1, _CHUNK_TOKENS):
        digest.update(request.prompt_token_ids[begin : begin + _CHUNK_TOKENS].tobytes())
        keys.append(digest.digest())
    return keys


def _num_sequences(request: EngineRequest) -> int:
    return max(request.sampling_params.n, request.sampling_params.beam_width)
