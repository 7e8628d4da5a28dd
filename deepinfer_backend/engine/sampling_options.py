"""What the scheduler must know of how a request samples."""

from __future__ import annotations

import random

from deepinfer_backend._core import SamplingOptions
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.engine.tracked_requests import is_tracked


def sampling_options(
    request: EngineRequest, lora_id: int, media_id: int, eos_token_ids: list[int], seeds: random.Random
) -> SamplingOptions:
    """seeds: for a request that has none."""
    params = request.sampling_params
    if request.embedding is not None:
        # Its one token is of no use to anybody: the cheapest, and always with the same end.
        return SamplingOptions(max_tokens=1, ignore_eos=True, is_tracked=True, lora_id=lora_id, media_id=media_id)
    is_beam = params.beam_width > 1
    return SamplingOptions(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        eos_token_ids=eos_token_ids,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seeds.getrandbits(64) if params.seed is None else params.seed % 2**64,
        n=1 if is_beam else params.n,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=params.prompt_logprobs is not None,
        is_tracked=is_tracked(request),
        is_beam=is_beam,
        lora_id=lora_id,
        media_id=media_id,
    )
