"""What requests change in their rows' logits before a token is chosen: packed on the host, applied on the device.

Each kind of edit touches only what it changes. Entries are numbered through the whole batch, row * vocab_size +
token_id, and no kind names an entry twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_backend.worker.device import host_to_device

BITS_PER_WORD = 32
_BITS_OF_A_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_EDIT_OF_A_BYTE = torch.from_numpy(np.where(_BITS_OF_A_BYTE, np.float32(0.0), np.float32(-np.inf)))


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """rows: [g] int64; bitmask: [g, ceil(vocab_size / 32)] int32, a set bit allows its token (xgrammar's layout)."""

    rows: NDArray[np.int64]
    bitmask: NDArray[np.int32]

    def apply(self, logits: torch.Tensor) -> None:
        # xgrammar's own CPU kernel goes bit by bit on one thread: 5 to 10 times slower.
        allowed = _upload(self.bitmask, logits.device).view(torch.uint8).view(-1).int()
        edits = _EDIT_OF_A_BYTE.to(logits.device, non_blocking=True).index_select(0, allowed)
        edits = edits.view(len(self.rows), -1)[:, : logits.shape[1]]
        logits.index_add_(0, _upload(self.rows, logits.device), edits)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """rows: [a] int64, in which nothing but `entries` may be sampled."""

    rows: NDArray[np.int64]
    entries: NDArray[np.int64]

    def apply(self, logits: torch.Tensor) -> None:
        entries, flat = _upload(self.entries, logits.device), logits.view(-1)
        values = flat.index_select(0, entries)
        logits.index_fill_(0, _upload(self.rows, logits.device), -torch.inf)
        flat.scatter_(0, entries, values)


@dataclass(frozen=True, slots=True)
class BannedTokens:
    """entries: [n] int64 that are not sampled."""

    entries: NDArray[np.int64]

    def apply(self, logits: torch.Tensor) -> None:
        logits.view(-1).index_fill_(0, _upload(self.entries, logits.device), -torch.inf)


@dataclass(frozen=True, slots=True)
class LogitBiases:
    """biases: [n] float32, added to their entries [n] int64."""

    entries: NDArray[np.int64]
    biases: NDArray[np.float32]

    def apply(self, logits: torch.Tensor) -> None:
        entries, flat = _upload(self.entries, logits.device), logits.view(-1)
        flat.scatter_(0, entries, flat.index_select(0, entries) + _upload(self.biases, logits.device))


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of tokens [n] that their sequence has had: first divided by repetition_penalties where positive, else multiplied
    with them (1: only new in presence and frequency); then less what presence and frequency cost them.
    """

    entries: NDArray[np.int64]
    repetition_penalties: NDArray[np.float32]
    costs: NDArray[np.float32]

    def apply(self, logits: torch.Tensor) -> None:
        entries, flat = _upload(self.entries, logits.device), logits.view(-1)
        repetition = _upload(self.repetition_penalties, logits.device)
        values = flat.index_select(0, entries)
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat.scatter_(0, entries, values - _upload(self.costs, logits.device))


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """One step's edits, by kind; None where no row has any. A row's edits change that row alone.

    Made on the host; `apply` runs on the device's stream.
    """

    grammar: GrammarMask | None = None
    allowed: AllowedTokens | None = None
    banned: BannedTokens | None = None
    biases: LogitBiases | None = None
    penalties: Penalties | None = None

    def limited_rows(self, device: torch.device) -> torch.Tensor | None:
        """[num_rows] int64, those that may have nothing left to sample; None if there is none."""
        rows = [edit.rows for edit in (self.grammar, self.allowed) if edit is not None]
        return _upload(np.unique(np.concatenate(rows)), device) if rows else None

    def apply(self, logits: torch.Tensor) -> None:
        """In place on float32 logits [num_rows, vocab_size], contiguous."""
        for edit in (self.grammar, self.allowed, self.banned, self.biases, self.penalties):
            if edit is not None:
                edit.apply(logits)


def _upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return host_to_device(torch.from_numpy(array), device)
