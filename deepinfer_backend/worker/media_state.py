"""What the running sequences have in images and videos, and where in a step it stands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend.media.prompt import MediumFeatures, ProcessedPrompt, as_array
from deepinfer_backend.models.vision_families import VisionFamily

_NUM_ROPE_PARTS = 3


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Rows [begin, end) of a medium's embeddings, for the request of this media_id."""

    media_id: int
    medium: MediumFeatures
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class MediaStep:
    """Of one step's tokens those that stand for media; on the host.

    rows: [num_rows] int64, which of the step's tokens, and `parts`, whose embeddings they get, in order.
    rope_offsets: [3, num_tokens] int64, by how much the parts of a token's rotary position differ from its place;
    None: not at all. key_ends: [num_tokens] int32, up to where in its sequence a token sees keys; None: up to itself.
    """

    rows: torch.Tensor
    parts: list[MediaPart]
    rope_offsets: torch.Tensor | None
    key_ends: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SequenceMedia:
    """positions: of each medium the tokens that it becomes, ascending; spans: [num_media, 2], the first and the end of
    those. rope_offsets: int64 [3, num_prompt_tokens + 1], the last ones those of all that follows."""

    processed: ProcessedPrompt
    positions: list[NDArray[np.int64]]
    spans: NDArray[np.int64]
    rope_offsets: NDArray[np.int64] | None


class MediaState:
    """Owns what each request with media has, from `add` to `remove`, by its media_id. Used by the engine's thread."""

    def __init__(self, family: VisionFamily | None) -> None:
        self._family = family
        self._media: dict[int, SequenceMedia] = {}

    def __len__(self) -> int:
        return len(self._media)

    def add(self, media_id: int, processed: ProcessedPrompt) -> SequenceMedia:
        assert self._family is not None
        positions = [as_array(medium.positions).astype(np.int64) for medium in processed.media]
        spans = np.array([(places[0], places[-1] + 1) for places in positions])
        media = SequenceMedia(processed, positions, spans, _rope_offsets(processed))
        self._media[media_id] = media
        return media

    def processed(self, media_id: int) -> ProcessedPrompt:
        return self._media[media_id].processed

    def remove(self, media_id: int) -> None:
        del self._media[media_id]

    def step(self, media_rows: NDArray[np.int64], positions: NDArray[np.int64]) -> MediaStep | None:
        """media_rows: a batch's; positions: [num_tokens] of its tokens. None: nothing is special in it."""
        rows: list[NDArray[np.int64]] = []
        parts: list[MediaPart] = []
        num_tokens = len(positions)
        rope_offsets = np.zeros((_NUM_ROPE_PARTS, num_tokens), np.int64) if self._has_rope_positions else None
        key_ends: NDArray[np.int32] | None = None
        for media_id, first_token, begin, num in media_rows.tolist():
            media, end = self._media[media_id], begin + num
            for medium, places in zip(media.processed.media, media.positions, strict=True):
                first, last = np.searchsorted(places, (begin, end)).tolist()
                if first < last:
                    parts.append(MediaPart(media_id, medium, first, last))
                    rows.append(places[first:last] + (first_token - begin))
            if rope_offsets is not None and media.rope_offsets is not None:
                places = np.minimum(np.arange(begin, end), media.rope_offsets.shape[1] - 1)
                rope_offsets[:, first_token : first_token + num] = media.rope_offsets[:, places]
            for span_begin, span_end in media.spans.tolist() if self._sees_whole_images else ():
                low, high = max(begin, span_begin), min(end, span_end)
                if low < high:
                    if key_ends is None:
                        key_ends = positions.astype(np.int32) + 1
                    key_ends[first_token + low - begin : first_token + high - begin] = span_end
        if not parts and rope_offsets is None:
            return None
        return MediaStep(
            torch.from_numpy(np.concatenate(rows) if rows else np.empty(0, np.int64)),
            parts,
            None if rope_offsets is None else torch.from_numpy(rope_offsets),
            None if key_ends is None else torch.from_numpy(key_ends),
        )

    @property
    def _has_rope_positions(self) -> bool:
        return self._family is not None and self._family.has_rope_positions

    @property
    def _sees_whole_images(self) -> bool:
        return self._family is not None and self._family.sees_whole_images


def _rope_offsets(processed: ProcessedPrompt) -> NDArray[np.int64] | None:
    if processed.rope_positions is None:
        return None
    positions = as_array(processed.rope_positions).astype(np.int64)
    num_tokens = positions.shape[1]
    after = np.full((_NUM_ROPE_PARTS, 1), processed.next_rope_position - num_tokens)
    offsets: NDArray[np.int64] = np.concatenate([positions - np.arange(num_tokens), after], axis=1)
    return offsets
