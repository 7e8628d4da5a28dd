"""Beam search finds what transformers finds, and each of n sequences is what its own seed gives, however they run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.models.loader import resolve_model
from deepinfer_backend.outputs import Completion
from tests.support.engine_driver import EngineDriver, engine_request
from tests.support.models import VOCAB_SIZE, make_random_model
from tests.support.oracle import TransformersOracle
from tests.support.tiny_gguf import write_tiny_gguf

LONGEST_PROMPT = 80
MAX_TOKENS = 10
NUM_SEQS = 8
SEED = 1000


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models"))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def open_llm(model: Path, **engine_args: Any) -> LLM:
    return LLM(str(model), **{"dtype": "float32", **engine_args})


def complete(llm: LLM, prompts: list[list[int]], params: Any) -> list[Completion]:
    completions = llm.complete(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_free_blocks == scheduler.num_blocks
    assert llm.llm_engine.num_tracked == 0
    return completions


def tokens_of(completion: Completion) -> list[list[int]]:
    assert [sequence.index for sequence in completion.sequences] == list(range(len(completion.sequences)))
    return [sequence.token_ids for sequence in completion.sequences]


# ---- beam search ----


@dataclass
class BeamCases:
    """Beam searches and ordinary greedy requests in turn, and what transformers answers."""

    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    expected: list[list[list[int]]] = field(default_factory=list)
    scores: list[list[float] | None] = field(default_factory=list)


@pytest.fixture(scope="module")
def beam_cases(model_path: Path) -> BeamCases:
    # In double precision: near ties, which may fall either way in single precision, are not in these cases.
    oracle = TransformersOracle(model_path, dtype=torch.float64)
    widths_and_ends: Any = itertools.product([2, 4, 8], [False, True, "never"])
    cases = BeamCases()
    for seed, (width, early_stopping) in enumerate(widths_and_ends):
        length_penalty = [0.0, 1.0, 2.0][(seed + width) % 3]
        prompt = random_prompt(LONGEST_PROMPT * seed // 8 + 1, seed)
        # Tokens that beams come by, so that some end early.
        likely = oracle.beam_search(prompt, num_beams=width, max_new_tokens=MAX_TOKENS, eos_token_id=None)[0][3:8:4]
        found = oracle.beam_search_answer(
            prompt,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=likely,
        )
        params = SamplingParams(
            beam_width=width,
            n=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_tokens=MAX_TOKENS,
            stop_token_ids=likely,
            ignore_eos=True,
        )
        greedy = SamplingParams(temperature=0, max_tokens=3 * seed + 1, ignore_eos=True)
        cases.prompts += [prompt, prompt]
        cases.params += [params, greedy]
        cases.expected += [found.sequences, [oracle.greedy(prompt, greedy.max_tokens, ignore_eos=True)]]
        cases.scores += [found.scores, None]
    return cases


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"zero_overhead_scheduling": False, "block_size": 3},
        {"num_gpu_blocks_override": 7},
        {"num_gpu_blocks_override": 36, "block_size": 3, "zero_overhead_scheduling": False},
        {"max_num_seqs": 3, "max_num_batched_tokens": 32},
        {"max_num_seqs": 1},
    ],
    ids=[
        "defaults",
        "no zos, small blocks",
        "few blocks",
        "few small blocks, no zos",
        "fewer places than beams",
        "one place",
    ],
)
def test_beams_equal_transformers_next_to_each_other_and_to_other_requests(
    model_path: Path, beam_cases: BeamCases, engine_args: dict[str, Any]
) -> None:
    with open_llm(model_path, **engine_args) as llm:
        completions = complete(llm, beam_cases.prompts, beam_cases.params)
        assert ("num_gpu_blocks_override" in engine_args) <= (llm.llm_engine.scheduler.num_preemptions > 0)
    for index, completion in enumerate(completions):
        assert tokens_of(completion) == beam_cases.expected[index], beam_cases.params[index]
        params, scores = beam_cases.params[index], beam_cases.scores[index]
        if scores is None:
            continue
        for sequence, score in zip(completion.sequences, scores, strict=True):
            assert sequence.cumulative_logprob is not None
            assert sequence.cumulative_logprob / len(sequence.token_ids) ** params.length_penalty == pytest.approx(
                score, abs=1e-4
            )
            stopped = sequence.token_ids[-1] in params.stop_token_ids
            assert sequence.finish_reason == ("stop" if stopped else "length")
            assert sequence.stop_reason == (sequence.token_ids[-1] if stopped else None)
    reasons = {sequence.finish_reason for completion in completions for sequence in completion.sequences}
    assert reasons == {"stop", "length"}


def test_beams_of_smollm2_equal_transformers() -> None:
    path = resolve_model(None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils when"]
    prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
    oracle = TransformersOracle(path)
    expected = [
        oracle.beam_search(prompt, num_beams=4, num_return_sequences=2, max_new_tokens=24) for prompt in prompts
    ]
    with open_llm(path) as llm:
        completions = complete(llm, prompts, SamplingParams(beam_width=4, n=2, max_tokens=24))
    assert [tokens_of(completion) for completion in completions] == expected
    for completion in completions:
        for sequence in completion.sequences:
            assert sequence.text == tokenizer.decode(sequence.token_ids, skip_special_tokens=True)


def test_beams_end_where_the_model_or_the_cache_ends(model_path: Path) -> None:
    oracle = TransformersOracle(model_path, dtype=torch.float64)
    prompt = random_prompt(27)
    expected = oracle.beam_search(prompt, num_beams=4, num_return_sequences=4, max_new_tokens=5, eos_token_id=None)
    params = SamplingParams(beam_width=4, n=4, max_tokens=50, ignore_eos=True)
    for engine_args in ({"max_model_len": 32}, {"num_gpu_blocks_override": 2}):
        with open_llm(model_path, **engine_args) as llm:
            (completion,) = complete(llm, [prompt], params)
        assert tokens_of(completion) == expected
        assert {sequence.finish_reason for sequence in completion.sequences} == {"length"}


def test_beam_search_without_any_allowed_token_fails_alone(model_path: Path) -> None:
    with EngineDriver(model_path) as driver:
        nothing_left = engine_request(
            [5, 6], request_id="a", beam_width=2, allowed_token_ids=[9], bad_words_token_ids=[[9]], max_tokens=4
        )
        other = engine_request([5, 6], request_id="b", beam_width=2, allowed_token_ids=[9], max_tokens=4)
        failed, answer = driver.run([nothing_left, other])
        assert "allowed_token_ids" in str(failed)
        assert isinstance(answer, list)
        assert answer[0].token_ids == [9] * 4
        driver.check_nothing_is_left()


# ---- n sequences ----


def sampling_params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "seed": SEED, **fields})


# Some of these want the sampler to remember their tokens, which forks with them.
N_PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": {7: 4.0}},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "greedy": {"temperature": 0},
}
N_PROMPTS = [random_prompt(length, length) for length in (1, 32, 75)]


@pytest.fixture(scope="module")
def expected_of_n(model_path: Path) -> dict[str, list[list[list[int]]]]:
    """For each of N_PARAMS and N_PROMPTS the tokens of NUM_SEQS requests with seeds one after the other."""
    expected = {}
    with open_llm(model_path, enable_prefix_caching=False) as llm:
        for name, fields in N_PARAMS.items():
            params = [sampling_params(**fields, seed=SEED + index) for index in range(NUM_SEQS)]
            expected[name] = [
                [
                    tokens
                    for completion in complete(llm, [prompt] * NUM_SEQS, params)
                    for tokens in tokens_of(completion)
                ]
                for prompt in N_PROMPTS
            ]
    assert all(len(set(map(tuple, sequences))) == NUM_SEQS for sequences in expected["plain"])
    return expected


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"zero_overhead_scheduling": False, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 6},
        {"block_size": 3, "num_gpu_blocks_override": 31, "zero_overhead_scheduling": False},
        {"max_num_seqs": 3, "max_num_batched_tokens": 32},
    ],
    ids=["defaults", "no zos, no cache", "few blocks", "few small blocks, no zos", "fewer places than sequences"],
)
def test_n_sequences_equal_as_many_requests_with_seeds_one_after_the_other(
    model_path: Path, expected_of_n: dict[str, list[list[list[int]]]], engine_args: dict[str, Any]
) -> None:
    names = [name for name in N_PARAMS for _ in N_PROMPTS]
    params = [sampling_params(**N_PARAMS[name], n=NUM_SEQS) for name in names]
    with open_llm(model_path, **engine_args) as llm:
        completions = complete(llm, N_PROMPTS * len(N_PARAMS), params)
        assert ("num_gpu_blocks_override" in engine_args) == (llm.llm_engine.scheduler.num_preemptions > 0)
    expected = [tokens for name in N_PARAMS for tokens in expected_of_n[name]]
    assert [tokens_of(completion) for completion in completions] == expected


def test_n_sequences_of_one_token(model_path: Path, expected_of_n: dict[str, list[list[list[int]]]]) -> None:
    params = [sampling_params(**fields, n=4, max_tokens=1) for fields in N_PARAMS.values()]
    with open_llm(model_path) as llm:
        completions = complete(llm, [N_PROMPTS[1]] * len(params), params)
    for name, completion in zip(N_PARAMS, completions, strict=True):
        assert tokens_of(completion) == [tokens[:1] for tokens in expected_of_n[name][1][:4]]
        assert [sequence.finish_reason for sequence in completion.sequences] == ["length"] * 4


@pytest.mark.parametrize("kind", [{"n": NUM_SEQS, "temperature": 1.0, "seed": 0}, {"beam_width": NUM_SEQS}], ids=str)
def test_sequences_of_a_request_share_the_blocks_of_its_prompt(model_path: Path, kind: dict[str, Any]) -> None:
    # The cache is off: blocks are shared by forking alone.
    with EngineDriver(model_path, block_size=16, enable_prefix_caching=False) as driver:
        driver.add(engine_request(random_prompt(167), request_id="a", max_tokens=20, ignore_eos=True, **kind))
        most = 0
        while driver.engine.has_unfinished_requests():
            driver.round()
            driver.engine.scheduler.check_invariants()
            most = max(most, driver.engine.scheduler.num_used_blocks)
        driver.drain()
        # 10 full blocks of the prompt; a copy of the eleventh, and the one behind it, for each.
        assert 10 + NUM_SEQS <= most <= 10 + 2 * NUM_SEQS
        driver.check_nothing_is_left()


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """With a tokenizer, of single bytes."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_CACHE_DIR", str(folder / "cache"))
        llm = open_llm(write_tiny_gguf(folder / "tiny.gguf"))
    with llm:
        yield llm


def test_stop_string_ends_the_one_sequence_in_which_it_is(text_llm: LLM) -> None:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 30, "logit_bias": {token: 4.0 for token in range(68, 90)}}
    (free,) = text_llm.complete("Hello", SamplingParams(**params, n=6), use_tqdm=False)
    stop = free.sequences[2].text[4:6]
    (stopped,) = text_llm.complete("Hello", SamplingParams(**params, n=6, stop=[stop]), use_tqdm=False)
    for whole, sequence in zip(free.sequences, stopped.sequences, strict=True):
        assert sequence.text == whole.text.partition(stop)[0]
        assert sequence.stop_reason == (stop if stop in whole.text else whole.stop_reason)
    assert len({sequence.finish_reason for sequence in stopped.sequences}) == 2
    scheduler = text_llm.llm_engine.scheduler
    assert scheduler.num_free_blocks == scheduler.num_blocks
