"""Embeddings of media, computed once for each content; on the device's stream."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

import torch

from deepinfer_backend.media.prompt import MediumFeatures, as_array
from deepinfer_backend.models.interface import MediaEncoder
from deepinfer_backend.worker.media_state import MediaPart

logger = logging.getLogger(__name__)


class MediaEmbeddings:
    """Owns the embeddings of the media used last, up to `max_bytes`; those of one that is gone are computed again.

    A medium that cannot be encoded has zeros instead, and the request that brought it fails alone: `take_failed`, when
    the step is known to be done. All else is for the device's stream.
    """

    def __init__(
        self, encoder: MediaEncoder, *, hidden_size: int, dtype: torch.dtype, device: torch.device, max_bytes: int
    ) -> None:
        self._encoder = encoder
        self._device = device
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._embeddings: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._failed: set[int] = set()
        self.num_computed = 0
        self._none = torch.empty(0, hidden_size, dtype=dtype, device=device)

    def gather(self, parts: Sequence[MediaPart]) -> torch.Tensor:
        """[num_rows, hidden_size], the parts' rows in order."""
        rows = [self._rows_of(part) for part in parts]
        return torch.cat(rows) if rows else self._none

    def take_failed(self) -> set[int]:
        """The media_ids of requests whose media could not be encoded since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _rows_of(self, part: MediaPart) -> torch.Tensor:
        try:
            return self._embedding_of(part.medium)[part.begin : part.end]
        except torch.AcceleratorError:
            raise
        except Exception:
            logger.exception("an image or a video cannot be encoded")
            self._failed.add(part.media_id)
            return self._none.new_zeros(part.end - part.begin, self._none.shape[1])

    def _embedding_of(self, medium: MediumFeatures) -> torch.Tensor:
        embedding = self._embeddings.get(medium.digest)
        if embedding is not None:
            self._embeddings.move_to_end(medium.digest)
            return embedding
        tensors = {name: torch.tensor(as_array(tensor), device=self._device) for name, tensor in medium.tensors.items()}
        embedding = self._encoder.encode(tensors)
        num_tokens = medium.positions.shape[0]
        if len(embedding) != num_tokens:
            raise ValueError(f"a medium has {len(embedding)} embeddings: must have {num_tokens}, as many as tokens")
        self.num_computed += 1
        self._embeddings[medium.digest] = embedding
        self._num_bytes += embedding.nbytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._embeddings.popitem(last=False)
            self._num_bytes -= dropped.nbytes
        return embedding
