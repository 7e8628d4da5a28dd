"""Input tokens that only the device knows, from what the step before sampled: one entry, CPU and CUDA behind it."""

from __future__ import annotations

import torch

from deepinfer_backend.ops.kernels import kernels


def take_inflight_tokens(token_ids: torch.Tensor, inflight_rows: torch.Tensor, sampled: torch.Tensor) -> None:
    """token_ids[i] = sampled[inflight_rows[i]] in place, where that row is not -1.

    token_ids: [num_tokens] int64; inflight_rows: [num_tokens] int32; sampled: [num_rows] int64, at least one. A row
    without a token (negative) has ended, and what is computed for it is dropped: it gives 0.
    """
    if token_ids.device.type == "cpu":
        kernels.take_inflight_tokens(token_ids, inflight_rows, sampled)
    else:
        take_inflight_tokens_in_torch(token_ids, inflight_rows, sampled)


def take_inflight_tokens_in_torch(token_ids: torch.Tensor, inflight_rows: torch.Tensor, sampled: torch.Tensor) -> None:
    """The same on any device; CUDA's way."""
    tokens = sampled[inflight_rows.clamp(min=0)].clamp(min=0)
    torch.where(inflight_rows >= 0, tokens, token_ids, out=token_ids)
