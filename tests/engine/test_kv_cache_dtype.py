"""A cache of narrower numbers moves log-probabilities by little more than its rounding, however it is used."""

from __future__ import annotations

import pytest
import torch

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.models.loader import resolve_model
from tests.support.oracle import TransformersOracle

NUM_SEQUENCES = 4
NUM_NEW_TOKENS = 48
TEXT = """The harbour lies on the northern side of the island, where the water is deep enough for ships of any size. In
winter the wind comes from the sea, and the fishermen stay at home to mend their nets and to tell each other stories of
the great storm, in which the old lighthouse fell. """

# Mean and largest distance of a token's log-probability from transformers' in float32.
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (0.01, 0.1), "int8": (0.05, 0.5)}


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return TransformersOracle(resolve_model(None))


@pytest.mark.parametrize("kv_cache_dtype", BOUNDS)
def test_logprobs_stay_near_transformers_with_chunks_preemption_and_cached_prefixes(
    oracle: TransformersOracle, kv_cache_dtype: str
) -> None:
    with LLM(
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=256,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=16,
    ) as llm:
        texts = [f"{TEXT}Chapter {number}." for number in range(NUM_SEQUENCES)]
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(text) for text in texts]
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=0)
        completions = llm.complete(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert llm.llm_engine.scheduler.num_cached_tokens > 0
    distances = []
    for prompt, completion in zip(prompts, completions, strict=True):
        (sequence,) = completion.sequences
        assert sequence.logprobs is not None
        ours = torch.tensor([entry[0].logprob for entry in sequence.logprobs])
        expected = oracle.logprobs([*prompt, *sequence.token_ids])[len(prompt) - 1 : -1]
        theirs = expected.gather(1, torch.tensor(sequence.token_ids)[:, None]).squeeze(1)
        distances.append((ours - theirs).abs())
    distance = torch.cat(distances)
    assert len(distance) == NUM_SEQUENCES * NUM_NEW_TOKENS
    mean, largest = BOUNDS[kv_cache_dtype]
    assert distance.mean() < mean
    assert distance.max() < largest
