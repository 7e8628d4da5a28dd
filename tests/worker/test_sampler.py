"""The sampler draws from exactly the distribution that the parameters describe, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from deepinfer_backend.ops.verify_drafts import NO_TOKEN
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.worker.sampler import SampledBatch, SamplingBatch, processed_logits, sample_batch
from tests.worker.sampling_cases import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    Case,
    batch_of,
    edits_of,
    random_case,
    random_logits,
)

NUM_DRAWS = 20_000
RESTRICTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.8},
    {"top_k": 1},
    {"top_k": 7},
    {"temperature": 0.9, "top_k": 90},
    {"temperature": 1.3, "top_p": 0.6},
    {"top_p": 0.999},
    {"temperature": 2.0, "top_p": 0.01},
    {"min_p": 0.05},
    {"temperature": 1.5, "min_p": 1.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 100, "top_p": 0.95, "min_p": 0.02},
]
OUTPUT = [7, 8, 9, 8, 7, 8]
ALONE = [
    Case(SamplingParams(temperature=0.3)),
    Case(SamplingParams(top_k=12)),
    Case(SamplingParams(top_k=2_999)),
    Case(SamplingParams(top_p=0.3)),
    Case(SamplingParams(top_p=0.99)),
    Case(SamplingParams(min_p=0.1)),
    Case(SamplingParams(temperature=0.0, repetition_penalty=1.7), prompt=[5, 6, 5, 7], output=OUTPUT),
    Case(SamplingParams(temperature=0.0, presence_penalty=1.5), output=OUTPUT),
    Case(SamplingParams(temperature=0.0, frequency_penalty=-0.5), output=OUTPUT),
    Case(SamplingParams(temperature=0.0, logit_bias={3: 4.0, 2_999: -100.0})),
    Case(SamplingParams(temperature=0.0, allowed_token_ids=[4, 900, 4])),
    Case(SamplingParams(temperature=0.0), output=OUTPUT, bad_words=[[3], [7, 8, 4], [7, 9, 4], [*OUTPUT, 11]]),
    Case(SamplingParams(temperature=0.0, min_tokens=7), output=OUTPUT),
    Case(SamplingParams(temperature=0.0, min_tokens=6), output=OUTPUT),
]


def assert_equals_transformers(cases: list[Case], logits: torch.Tensor) -> None:
    processed = processed_logits(logits.clone(), batch_of(cases))
    expected = torch.stack(
        [case.processed_by_transformers(row.float()) for case, row in zip(cases, logits, strict=True)]
    )
    torch.testing.assert_close(processed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: ",".join({*case.params.model_fields_set} or {"bad_words"}))
def test_each_feature_makes_of_logits_what_transformers_makes_of_them(case: Case) -> None:
    logits = random_logits(np.random.default_rng(1), 4)
    assert_equals_transformers([Case(), case, Case(SamplingParams(temperature=0.0)), case], logits)


def test_200_combinations_of_features_equal_transformers_in_mixed_batches() -> None:
    rng = np.random.default_rng(2)
    for _ in range(25):
        assert_equals_transformers([random_case(rng) for _ in range(8)], random_logits(rng, 8))


def test_bfloat16_logits_are_processed_in_float32() -> None:
    rng = np.random.default_rng(3)
    cases = [Case(SamplingParams(temperature=0.6, min_p=0.05, repetition_penalty=1.1)), random_case(rng)]
    assert_equals_transformers(cases, random_logits(rng, 2).bfloat16())


def small_logits() -> torch.Tensor:
    return torch.randn(200, generator=torch.Generator().manual_seed(1)) * 3


def restricted_batch(restriction: dict[str, Any], uniforms: np.ndarray[Any, np.dtype[np.float64]]) -> SamplingBatch:
    return batch_of([Case(SamplingParams(**restriction))] * len(uniforms), uniforms)


@pytest.mark.parametrize("restriction", RESTRICTIONS, ids=str)
def test_share_of_uniforms_that_give_a_token_is_its_probability_in_transformers(restriction: dict[str, Any]) -> None:
    logits = small_logits()
    expected = Case(SamplingParams(**restriction)).processed_by_transformers(logits).softmax(-1)
    uniforms = (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS
    drawn = sample_batch(logits.repeat(NUM_DRAWS, 1), restricted_batch(restriction, uniforms)).token_ids
    share = torch.bincount(drawn, minlength=200) / NUM_DRAWS
    torch.testing.assert_close(share, expected, atol=1.5 / NUM_DRAWS, rtol=0)


@pytest.mark.parametrize("restriction", RESTRICTIONS, ids=str)
def test_20_000_samples_are_distributed_as_transformers_says(restriction: dict[str, Any]) -> None:
    logits = small_logits()
    expected = Case(SamplingParams(**restriction)).processed_by_transformers(logits).double().softmax(-1).numpy()
    uniforms = np.random.default_rng(4).random(NUM_DRAWS)
    drawn = sample_batch(logits.repeat(NUM_DRAWS, 1), restricted_batch(restriction, uniforms)).token_ids
    observed = np.bincount(drawn.numpy(), minlength=200)
    assert not observed[expected == 0.0].any()
    # The test wants at least five expected in each cell: the rare tokens make one together.
    is_rare = expected * NUM_DRAWS < 5
    observed = np.append(observed[~is_rare], observed[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum()) * NUM_DRAWS
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert scipy.stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_token_and_logprobs_of_a_row_do_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(5)
    cases = [random_case(rng) for _ in range(40)]
    logits, uniforms = random_logits(rng, 40), rng.random(40)
    alone = [
        sample_batch(
            logits[row : row + 1].clone(),
            batch_of(
                [case], uniforms[row : row + 1], logprob_rows=torch.tensor([0]), num_top_logprobs=3,
                candidate_rows=torch.tensor([0]), num_candidates=4,
            ),
        )
        for row, case in enumerate(cases)
    ]  # fmt: skip
    for _ in range(5):
        rows = rng.permutation(40)[: rng.integers(2, 41)]
        asking = torch.from_numpy(np.flatnonzero(rng.random(len(rows)) < 0.5))
        together = sample_batch(
            logits[rows].clone(),
            batch_of(
                [cases[row] for row in rows], uniforms[rows], logprob_rows=asking, num_top_logprobs=7,
                candidate_rows=asking, num_candidates=4,
            ),
        )  # fmt: skip
        assert together.token_ids.tolist() == [int(alone[row].token_ids) for row in rows]
        assert together.logprobs is not None
        assert together.candidates is not None
        assert together.logprobs.rows.tolist() == together.candidates.rows.tolist() == asking.tolist()
        for index, row in enumerate(asking.tolist()):
            expected, candidates = alone[rows[row]].logprobs, alone[rows[row]].candidates
            assert expected is not None
            assert candidates is not None
            assert torch.equal(together.logprobs.logprobs[index], expected.logprobs[0])
            assert torch.equal(together.logprobs.ranks[index], expected.ranks[0])
            assert torch.equal(together.logprobs.top_token_ids[index, :3], expected.top_token_ids[0])
            assert torch.equal(together.logprobs.top_logprobs[index, :3], expected.top_logprobs[0])
            assert torch.equal(together.candidates.token_ids[index], candidates.token_ids[0])
            assert torch.equal(together.candidates.logprobs[index], candidates.logprobs[0])


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_several_threads_sum_a_row_alone_as_they_do_among_others() -> None:
    rng = np.random.default_rng(11)
    cases = [Case(SamplingParams(top_p=0.9, min_p=0.001)), Case(SamplingParams(top_k=2_000, top_p=0.99)), Case()]
    logits = torch.from_numpy(rng.standard_normal((30, 50_000)).astype(np.float32)) * 3
    uniforms = rng.random(30)

    def sampled(rows: torch.Tensor) -> SampledBatch:
        asking = torch.arange(len(rows))
        batch = batch_of(
            [cases[row % 3] for row in rows.tolist()],
            uniforms[rows.numpy()],
            logprob_rows=asking,
            candidate_rows=asking,
            num_candidates=4,
        )
        return sample_batch(logits[rows], batch)

    together = sampled(torch.arange(30))
    assert together.logprobs is not None
    assert together.candidates is not None
    for row in torch.arange(30):
        alone = sampled(row[None])
        assert alone.logprobs is not None
        assert alone.candidates is not None
        assert torch.equal(alone.token_ids[0], together.token_ids[row])
        assert torch.equal(alone.logprobs.logprobs[0], together.logprobs.logprobs[row])
        assert torch.equal(alone.candidates.logprobs[0], together.candidates.logprobs[row])


def test_logprobs_are_the_models_own_whatever_the_request_changes() -> None:
    rng = np.random.default_rng(6)
    cases = [random_case(rng) for _ in range(20)]
    logits = random_logits(rng, 20)
    rows = torch.tensor([3, 4, 11, 19])
    sampled = sample_batch(logits.clone(), batch_of(cases, rng.random(20), logprob_rows=rows, num_top_logprobs=5))
    assert sampled.logprobs is not None
    chosen = sampled.token_ids[rows].long()[:, None]
    torch.testing.assert_close(sampled.logprobs.logprobs, logits[rows].log_softmax(-1).gather(1, chosen).squeeze(1))


def test_beam_candidates_are_the_best_of_the_edited_logits_over_the_models_own_sum() -> None:
    rng = np.random.default_rng(7)
    greedy = {"temperature": 0.0}
    cases = [
        Case(SamplingParams(**greedy, repetition_penalty=1.5), prompt=list(range(1_000))),
        Case(SamplingParams(temperature=0.5)),
        Case(SamplingParams(**greedy, logit_bias={17: 20.0}), bad_words=[[12]]),
    ]
    logits = random_logits(rng, 3)
    sampled = sample_batch(logits.clone(), batch_of(cases, candidate_rows=torch.tensor([0, 2]), num_candidates=8))
    assert sampled.candidates is not None
    edited = torch.stack([cases[row].processed_by_transformers(logits[row]) for row in (0, 2)])
    expected = (edited - logits[[0, 2]].logsumexp(-1, keepdim=True)).topk(8)
    assert sampled.candidates.token_ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(sampled.candidates.logprobs, expected.values)


@pytest.mark.parametrize(("uniform", "which"), [(0.0, 0), (float(np.nextafter(1.0, 0.0)), 1)])
@pytest.mark.parametrize("likely", [(50, 60), (0, 1), (VOCAB_SIZE - 2, VOCAB_SIZE - 1), (127, 128)])
def test_ends_of_the_unit_interval_give_tokens_with_a_probability(
    uniform: float, which: int, likely: tuple[int, int]
) -> None:
    logits = torch.full((1, VOCAB_SIZE), -1e4)
    logits[0, list(likely)] = 1.0
    assert int(sample_batch(logits, batch_of([Case()], [uniform])).token_ids) == likely[which]


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, :80] = 1.0
    for params in (SamplingParams(top_k=5), SamplingParams(top_p=0.001), SamplingParams(min_p=1.0)):
        kept = processed_logits(logits.clone(), batch_of([Case(params)])) > -torch.inf
        assert kept.nonzero()[:, 1].tolist() == list(range(80))


def test_row_in_which_nothing_is_allowed_has_no_token_and_leaves_the_others_alone() -> None:
    nothing = Case(SamplingParams(allowed_token_ids=[5]), bad_words=[[5]])
    greedy = Case(SamplingParams(temperature=0.0, allowed_token_ids=[5]), bad_words=[[5]])
    rng = np.random.default_rng(8)
    cases = [nothing, Case(SamplingParams(top_p=0.9, top_k=3, min_p=0.1)), greedy, Case()]
    logits, uniforms = random_logits(rng, 4), rng.random(4)
    tokens = sample_batch(logits.clone(), batch_of(cases, uniforms)).token_ids
    assert (tokens[[0, 2]] == NO_TOKEN).all()
    assert all(0 <= token_id < VOCAB_SIZE for token_id in tokens[[1, 3]].tolist())
    for row in (1, 3):
        alone = sample_batch(logits[row : row + 1].clone(), batch_of([cases[row]], uniforms[row : row + 1]))
        assert int(alone.token_ids) == int(tokens[row])


def test_the_smallest_temperature_is_greedy() -> None:
    logits = random_logits(np.random.default_rng(9), 1)
    sampled = sample_batch(logits.clone(), batch_of([Case(SamplingParams(temperature=1e-40))], [0.999]))
    assert int(sampled.token_ids) == int(logits.argmax())


def test_end_tokens_are_not_sampled_before_min_tokens() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, EOS_TOKEN_ID] = 50.0
    cases = [Case(SamplingParams(temperature=temperature, min_tokens=1)) for temperature in (0.0, 1.0)]
    assert EOS_TOKEN_ID not in sample_batch(logits, batch_of(cases)).token_ids.tolist()


def operations(cases: list[Case], **options: Any) -> set[str]:
    """The names of the torch operations of a step."""
    batch, logits = batch_of(cases, **options), random_logits(np.random.default_rng(10), len(cases))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running:
        sample_batch(logits, batch)
    return {event.key.removeprefix("aten::") for event in running.key_averages()}


def test_features_that_nobody_uses_cost_nothing() -> None:
    greedy, plain = Case(SamplingParams(temperature=0.0)), Case()
    assert edits_of([greedy, plain]) is None
    # The kernel passes over what a row does not use.
    assert operations([greedy, plain]) == {"to", "deepinfer::sample_tokens"}
    # Where they are used, they are found under these names.
    used = operations([plain, Case(SamplingParams(top_p=0.9, logit_bias={1: 1.0}))], logprob_rows=torch.tensor([0]))
    assert used >= {"deepinfer::sample_tokens", "topk", "scatter_", "_log_softmax"}
