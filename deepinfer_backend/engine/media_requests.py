"""Requests whose images and videos were processed: their prompts, and what the device is given of their media."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.engine.messages import EngineRequest, MediaReady
from deepinfer_backend.media.pool import MultiModalProcessor
from deepinfer_backend.media.prompt import as_array
from deepinfer_backend.models.vision_families import VisionFamily
from deepinfer_backend.worker.media_state import MediaState

_MAX_NAMED_CONTENTS = 65_536


class MediaRequests:
    """Owns the media of requests from `place` until `release`. Used by the engine's thread.

    Each content has a negative number of its own, which stands in prompts instead of its tokens: so the prefix cache
    tells contents apart, and finds one again. The numbers of those seen last are remembered; none is used twice.
    """

    def __init__(self, family: VisionFamily | None, processor: MultiModalProcessor) -> None:
        self.state = MediaState(family)
        self.sees_whole_images = family is not None and family.sees_whole_images
        self._processor = processor
        self._media_ids: dict[str, int] = {}  # by request id
        self._next_media_id = itertools.count(1)
        self._names: OrderedDict[bytes, int] = OrderedDict()
        self._next_name = -1

    def take(self, request: EngineRequest) -> tuple[EngineRequest, MediaReady]:
        """The request with its prompt, and what its client is told of that."""
        assert request.processed is not None
        token_ids = as_array(request.processed.token_ids).astype(np.int32)
        ready = MediaReady(request.request_id, token_ids.tobytes(), request.client_index)
        return msgspec.structs.replace(request, prompt_token_ids=token_ids), ready

    def place(self, request: EngineRequest) -> tuple[int, NDArray[np.int32], list[tuple[int, int]]]:
        """→ (media_id, the prompt with its media's numbers, the span of each medium in it)."""
        assert request.processed is not None
        media_id = self._media_ids[request.request_id] = next(self._next_media_id)
        media = self.state.add(media_id, request.processed)
        prompt = request.prompt_token_ids.copy()
        for medium, positions in zip(request.processed.media, media.positions, strict=True):
            prompt[positions] = self._name_of(medium.digest)
        return media_id, prompt, [(begin, end) for begin, end in media.spans.tolist()]

    def release(self, request: EngineRequest) -> None:
        """The request has ended, wherever it was; nothing if it has no media."""
        if request.processed is None:
            return
        media_id = self._media_ids.pop(request.request_id, None)
        if media_id is not None:
            self.state.remove(media_id)
        self._processor.release(request.processed)

    def fail(self, media_ids: Iterable[int]) -> list[str]:
        """What steps computed of these requests' media is wrong: nobody finds it again. Returns the requests' ids."""
        failed = set(media_ids)
        for media_id in failed:
            for medium in self.state.processed(media_id).media:
                self._names.pop(medium.digest, None)
        return [request_id for request_id, media_id in self._media_ids.items() if media_id in failed]

    def _name_of(self, digest: bytes) -> int:
        name = self._names.pop(digest, None)
        if name is None:
            name, self._next_name = self._next_name, self._next_name - 1
        self._names[digest] = name
        if len(self._names) > _MAX_NAMED_CONTENTS:
            self._names.popitem(last=False)
        return name
