"""From a configuration to the drafter that it names."""

from __future__ import annotations

import torch

from deepinfer_backend.speculation.drafter import Drafter
from deepinfer_backend.speculation.ngram import NgramDrafter
from deepinfer_backend.speculative_config import SpeculativeConfig


def make_drafter(
    config: SpeculativeConfig | None, max_num_seqs: int, max_seq_len: int, device: torch.device
) -> Drafter | None:
    """max_seq_len: the most tokens of a sequence."""
    if config is None:
        return None
    return NgramDrafter(
        max_num_seqs=max_num_seqs,
        max_seq_len=max_seq_len,
        min_ngram=config.min_ngram,
        max_ngram=config.max_ngram,
        device=device,
    )
