"""Which of several equal engines (data-parallel ranks) a request goes to."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from deepinfer_backend.engine.messages import EngineRequest, Prompted

T = TypeVar("T")

_CHUNK_TOKENS = 64
_MAX_KNOWN_CHUNKS = 65_536
_SEQUENCE_WORK = 64  # a sequence that decodes is worth so many tokens of prefill


@dataclass(frozen=True, slots=True)
class _Assignment:
    """prompt_rank: the engine that prefilled the request and keeps its blocks, because `rank` may not have them yet."""

    rank: int
    work: int
    request: EngineRequest
    prompt_rank: int | None = None
    prompted: Prompted | None = None


@dataclass(frozen=True, slots=True)
class RankLoss:
    """What an engine that ended had: requests that end with it, and those whose hand-over begins anew."""

    request_ids: list[str]
    prompted: list[Prompted]


class RequestRouter:
    """Gives each request to the rank with the least outstanding work, prompt tokens in its cache considered.

    Work is counted in tokens of prefill: those of a request that the rank has not computed before, until its first
    token is there, and a fixed number for each of its sequences, until it has ended. What a rank has computed is
    remembered by chunks of prompts, those used last; it is a guess, since a rank forgets too. (The idea is that of
    SGLang's cache-aware router.)

    The first `num_prompt_ranks` only prefill. A request of one sequence goes to one of them, if there is one, and from
    there to one of the others, which get all other requests at once.

    All methods may be called from any thread.
    """

    def __init__(self, num_ranks: int, num_prompt_ranks: int = 0) -> None:
        self._num_prompt_ranks = num_prompt_ranks
        self._lock = threading.Lock()
        self._work = [0] * num_ranks
        self._assignments: dict[str, _Assignment] = {}
        self._ranks_with: OrderedDict[bytes, int] = OrderedDict()  # chunk → a bit for each rank that computed it

    def assign(self, request: EngineRequest, available: Collection[int]) -> int:
        """The rank, one of those available, one of which decodes; it has the request until that is released."""
        keys = _chunk_keys(request)
        num_tokens, num_sequences = len(request.prompt_token_ids), _num_sequences(request)
        prompt_ranks = [rank for rank in available if rank < self._num_prompt_ranks] if num_sequences == 1 else []
        with self._lock:
            num_known = self._num_known_tokens(keys)
            candidates = prompt_ranks or self.decoding(available)
            rank = min(candidates, key=lambda each: (self._work[each] - num_known[each], each))
            work = num_tokens - num_known[rank] + _SEQUENCE_WORK * num_sequences
            # Media are sent once, and need not be kept.
            self._assign(_Assignment(rank, work, msgspec.structs.replace(request, media=None)))
            for key in keys:
                self._ranks_with[key] = self._ranks_with.pop(key, 0) | 1 << rank
            while len(self._ranks_with) > _MAX_KNOWN_CHUNKS:
                self._ranks_with.popitem(last=False)
        return rank

    @property
    def num_ranks(self) -> int:
        return len(self._work)

    def end_prefill(self, request_id: str) -> None:
        """The request has its first token."""
        with self._lock:
            assignment = self._assignments.get(request_id)
            if assignment is not None:
                work = _SEQUENCE_WORK * _num_sequences(assignment.request)
                self._work[assignment.rank] -= assignment.work - work
                self._assignments[request_id] = replace(assignment, work=work)

    def decoding(self, ranks: Iterable[int]) -> list[int]:
        """Those that do not only prefill."""
        return [rank for rank in ranks if rank >= self._num_prompt_ranks]

    def hand_over(self, prompted: Prompted, available: Iterable[int]) -> tuple[int, EngineRequest] | None:
        """To the rank that decodes and has the least to do; None if there is none, or the request has ended."""
        candidates = self.decoding(available)
        with self._lock:
            before = self._assignments.get(prompted.request_id)
            if before is None or not candidates:
                return None
            rank = min(candidates, key=lambda each: (self._work[each], each))
            self._work[before.rank] -= before.work
            prompt_rank = before.rank if before.prompt_rank is None else before.prompt_rank
            self._assign(_Assignment(rank, _SEQUENCE_WORK, before.request, prompt_rank, prompted))
            return rank, before.request

    def end_hand_over(self, request_id: str) -> int | None:
        """The request's rank has its blocks; returns the rank that need not keep them any more."""
        with self._lock:
            assignment = self._assignments.get(request_id)
            if assignment is None:
                return None
            self._assignments[request_id] = replace(assignment, prompt_rank=None, prompted=None)
            return assignment.prompt_rank

    def by_rank(self, items: Iterable[T], request_id_of: Callable[[T], str]) -> dict[int, list[T]]:
        """What each rank is to be told of what concerns its requests.

        Of a request that no rank is known to have all are told: it may just have ended, or be on its way.
        """
        items_of: defaultdict[int, list[T]] = defaultdict(list)
        for item in items:
            assignment = self._assignments.get(request_id_of(item))
            ranks: Iterable[int | None] = range(len(self._work))
            if assignment is not None:
                ranks = (assignment.rank, assignment.prompt_rank)
            for rank in ranks:
                if rank is not None:
                    items_of[rank].append(item)
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

    def release_rank(self, rank: int) -> RankLoss:
        """The rank's engine has ended, and with it its cache."""
        with self._lock:
            request_ids, prompted = [], []
            for request_id, assignment in list(self._assignments.items()):
                if assignment.prompt_rank == rank:
                    self._assignments[request_id] = replace(assignment, prompt_rank=None, prompted=None)
                elif assignment.rank == rank and assignment.prompted is not None:
                    prompted.append(assignment.prompted)
                    self._assignments[request_id] = replace(assignment, work=0)
                elif assignment.rank == rank:
                    del self._assignments[request_id]
                    request_ids.append(request_id)
            self._work[rank] = 0
            for key, ranks in self._ranks_with.items():
                self._ranks_with[key] = ranks & ~(1 << rank)
            return RankLoss(request_ids, prompted)

    def _assign(self, assignment: _Assignment) -> None:
        self._assignments[assignment.request.request_id] = assignment
        self._work[assignment.rank] += assignment.work

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
