"""Log-probabilities are those of transformers' own logits, for every token asked about, however it was chosen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.outputs import Completion, CompletionSequence, Logprobs
from tests.support.models import VOCAB_SIZE, make_random_model
from tests.support.oracle import TransformersOracle

TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 2, 17, 60)
LONG_PROMPT_LENGTH = 600

CHOOSING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "hot": {"temperature": 1.8, "seed": 1},
    "truncated": {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "min_p": 0.01, "seed": 2},
    "edited": {
        "temperature": 1.0,
        "seed": 3,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.7,
        "logit_bias": {token: 9.0 for token in range(100, 140)},
        "min_tokens": 5,
    },
    "few allowed": {"temperature": 1.0, "seed": 4, "allowed_token_ids": [4, 44, 444]},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("gemma3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> TransformersOracle:
    return TransformersOracle(model_path)


def random_prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def complete(llm: LLM, prompts: list[list[int]], params: Any) -> list[Completion]:
    return llm.complete(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def check_entry(entry: Logprobs, token_id: int, expected: torch.Tensor, num_best: int) -> None:
    """expected: [vocab_size] the log-softmax at this position."""
    chosen, *best = entry
    assert chosen.token_id == token_id
    assert [token.rank for token in best] == list(range(1, num_best + 1))
    assert len({token.token_id for token in best}) == num_best
    for token in entry:
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=TOLERANCE)
        # As far as rounding leaves it open.
        num_surely_better = int((expected > expected[token.token_id] + TOLERANCE).sum())
        num_perhaps_better = int((expected > expected[token.token_id] - TOLERANCE).sum())
        assert num_surely_better < token.rank <= max(num_perhaps_better, 1)
    assert [token.logprob for token in best] == pytest.approx(expected.topk(num_best).values.tolist(), abs=TOLERANCE)


def check_sequence(
    oracle: TransformersOracle, prompt: Sequence[int], sequence: CompletionSequence, num_best: int
) -> None:
    expected = oracle.logprobs([*prompt, *sequence.token_ids])
    assert sequence.logprobs is not None
    for index, (token_id, entry) in enumerate(zip(sequence.token_ids, sequence.logprobs, strict=True)):
        check_entry(entry, token_id, expected[len(prompt) + index - 1], num_best)
    assert sequence.cumulative_logprob == pytest.approx(
        sum(entry[0].logprob for entry in sequence.logprobs), abs=TOLERANCE
    )


def check_prompt(oracle: TransformersOracle, completion: Completion, num_best: int) -> None:
    prompt, table = completion.prompt_token_ids, completion.prompt_logprobs
    expected = oracle.logprobs(prompt)
    assert table is not None
    assert len(table) == len(prompt)
    assert table[0] is None
    for index in range(1, len(prompt)):
        entry = table[index]
        assert entry is not None
        check_entry(entry, prompt[index], expected[index - 1], num_best)


@pytest.mark.parametrize("num_best", [0, 1, 5])
def test_logprobs_are_those_of_the_models_own_distribution(
    model_path: Path, oracle: TransformersOracle, num_best: int
) -> None:
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS for _ in CHOOSING]
    params = [SamplingParams(**how, max_tokens=12, logprobs=num_best) for how in CHOOSING.values()]
    with LLM(str(model_path), dtype="float32") as llm:
        completions = complete(llm, prompts, params * len(PROMPT_LENGTHS))
    for completion in completions:
        (sequence,) = completion.sequences
        check_sequence(oracle, completion.prompt_token_ids, sequence, num_best)
    ranks = [entry[0].rank for completion in completions for entry in completion.sequences[0].logprobs or []]
    assert max(ranks) > 10  # else all were chosen as if greedily


def test_requests_of_one_batch_get_as_many_logprobs_as_each_asked_for(
    model_path: Path, oracle: TransformersOracle
) -> None:
    prompt = random_prompt(9)
    wanted = [None, 0, 20, 3, None, 1]
    params = [SamplingParams(temperature=0, max_tokens=6, logprobs=num_best) for num_best in wanted]
    with LLM(str(model_path), dtype="float32") as llm:
        completions = complete(llm, [prompt] * len(wanted), params)
    for num_best, completion in zip(wanted, completions, strict=True):
        (sequence,) = completion.sequences
        if num_best is None:
            assert sequence.logprobs is None
            assert sequence.cumulative_logprob is None
        else:
            check_sequence(oracle, prompt, sequence, num_best)


def test_a_token_that_was_banned_still_has_its_own_logprob(model_path: Path, oracle: TransformersOracle) -> None:
    prompt = random_prompt(9)
    likeliest = int(oracle.logprobs(prompt)[-1].argmax())
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3, logit_bias={likeliest: -100.0})
    with LLM(str(model_path), dtype="float32") as llm:
        (completion,) = complete(llm, [prompt], params)
    (sequence,) = completion.sequences
    assert sequence.logprobs is not None
    chosen, best, *_ = sequence.logprobs[0]
    assert (best.token_id, best.rank, chosen.rank) == (likeliest, 1, 2)
    check_sequence(oracle, prompt, sequence, 3)


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "zero_overhead_scheduling": False, "block_size": 3, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 39},
    ],
    ids=["defaults", "small chunks", "small chunks, small blocks, no zos", "few blocks"],
)
def test_prompt_logprobs_are_those_of_the_whole_prompt(
    model_path: Path, oracle: TransformersOracle, engine_args: dict[str, Any]
) -> None:
    # The long one comes twice, and the second time a part of it is in the prefix cache.
    lengths = [LONG_PROMPT_LENGTH, *PROMPT_LENGTHS, 16, 33, LONG_PROMPT_LENGTH]
    wanted = [2, 0, 1, 3, 0, 2, None, 0]
    prompts = [random_prompt(length) for length in lengths]
    params = [
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=num_best, logprobs=1, ignore_eos=True)
        for num_best in wanted
    ]
    with LLM(str(model_path), dtype="float32", **engine_args) as llm:
        for _ in range(2):
            completions = complete(llm, prompts, params)
            for num_best, completion in zip(wanted, completions, strict=True):
                if num_best is None:
                    assert completion.prompt_logprobs is None
                else:
                    check_prompt(oracle, completion, num_best)
                check_sequence(oracle, completion.prompt_token_ids, completion.sequences[0], 1)
        scheduler = llm.llm_engine.scheduler
        assert scheduler.num_free_blocks == scheduler.num_blocks
        assert llm.llm_engine.num_tracked == 0


def test_n_sequences_get_the_logprobs_of_their_own_tokens_and_the_prompts_once(
    model_path: Path, oracle: TransformersOracle
) -> None:
    prompt = random_prompt(40)
    params = SamplingParams(
        n=5, temperature=1.5, seed=8, max_tokens=10, logprobs=2, prompt_logprobs=1, frequency_penalty=1.0
    )
    with LLM(str(model_path), dtype="float32", max_num_batched_tokens=16) as llm:
        (completion,) = complete(llm, [prompt], params)
    check_prompt(oracle, completion, 1)
    assert len({tuple(sequence.token_ids) for sequence in completion.sequences}) == 5
    for sequence in completion.sequences:
        check_sequence(oracle, prompt, sequence, 2)
