"""Beam search finds what transformers' own finds, sequence by sequence and score by score."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_backend.engine.beam_search import BeamHypothesis, BeamSearch
from deepinfer_backend.sampling_params import SamplingParams
from tests.support.models import VOCAB_SIZE, make_random_model
from tests.support.oracle import TransformersOracle

EARLY_STOPPING: list[Any] = [False, True, "never"]
LENGTH_PENALTIES = [0.0, 0.7, 1.0, 2.0, -1.0]
MAX_TOKENS = 10
BANNED = -torch.inf


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> TransformersOracle:
    # In double precision the logits are the same float32 numbers with a cache and without: near ties cannot flip.
    return TransformersOracle(make_random_model("llama", tmp_path_factory.mktemp("beams")), dtype=torch.float64)


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]


@cache
def beams_of(oracle: TransformersOracle, seed: int) -> list[list[int]]:
    return oracle.beam_search(
        prompt_of(seed), num_beams=8, num_return_sequences=8, max_new_tokens=MAX_TOKENS, eos_token_id=None
    )


def likely_ends(oracle: TransformersOracle, seed: int, num_ends: int) -> list[int]:
    """Tokens that beams from this prompt come by, here at the third place and there at the seventh."""
    counts = Counter(token for beam in beams_of(oracle, seed) for token in beam[2:8])
    return [token for token, _ in counts.most_common(num_ends)]


def beam_params(beam_width: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"beam_width": beam_width, "max_tokens": MAX_TOKENS, **fields})


class NaiveEngine:
    """Does what a BeamSearch says with plain lists of tokens."""

    def __init__(
        self, oracle: TransformersOracle, prompt: list[int], params: SamplingParams, eos: Sequence[int]
    ) -> None:
        self.oracle = oracle
        self.params = params
        self.num_prompt_tokens = len(prompt)
        self.eos = eos
        self.allowed: list[int] | None = None
        self.num_rounds = 0
        self.sequences = {0: list(prompt)}
        self.search = BeamSearch(params, 0, max_tokens=params.max_tokens, eos_token_ids=eos)

    def offer(self) -> None:
        logprobs = self.oracle.next_token_logprobs(list(self.sequences.values()))
        num_tokens = len(next(iter(self.sequences.values()))) - self.num_prompt_tokens
        if num_tokens < self.params.min_tokens:
            logprobs[:, self.eos] = BANNED
        if self.allowed is not None:
            banned = [token for token in range(VOCAB_SIZE) if token not in self.allowed]
            logprobs[:, banned] = BANNED
        values, token_ids = logprobs.topk(self.search.num_candidates)
        for row, seq_id in enumerate(self.sequences):
            self.search.offer(seq_id, token_ids[row].numpy().astype(np.int32), values[row].numpy())

    def advance(self) -> bool:
        step = self.search.advance()
        self.num_rounds += 1
        for seq_id in step.ended_seq_ids:
            del self.sequences[seq_id]
        for branch in step.branches:
            seq_ids = [branch.seq_id]
            for _ in branch.token_ids[1:]:
                seq_ids.append(max(self.sequences) + 1)
                self.sequences[seq_ids[-1]] = list(self.sequences[branch.seq_id])
            for seq_id, token_id in zip(seq_ids, branch.token_ids, strict=True):
                self.sequences[seq_id].append(token_id)
            self.search.adopt(branch.seq_id, seq_ids[1:])
        assert len(self.sequences) <= self.params.beam_width
        return step.is_over

    def run(self) -> list[BeamHypothesis]:
        is_over = False
        while not is_over:
            assert not self.search.is_complete
            self.offer()
            assert self.search.is_complete
            is_over = self.advance()
        assert not self.sequences
        return self.search.hypotheses


def check_equal(
    oracle: TransformersOracle,
    prompt: list[int],
    params: SamplingParams,
    eos: Sequence[int],
    **generation_arguments: Any,
) -> list[BeamHypothesis]:
    expected = oracle.beam_search_answer(
        prompt,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        eos_token_id=list(eos) or None,
        **generation_arguments,
    )
    engine = NaiveEngine(oracle, prompt, params, eos)
    found = engine.run()
    assert [hypothesis.token_ids for hypothesis in found] == expected.sequences
    assert [hypothesis.score for hypothesis in found] == pytest.approx(expected.scores, rel=1e-6)
    assert engine.num_rounds == expected.num_steps
    for hypothesis in found:
        last = hypothesis.token_ids[-1]
        ended = ("stop", last) if last in eos else ("length", None)
        assert (hypothesis.finish_reason, hypothesis.stop_token_id) == ended
        length_factor = len(hypothesis.token_ids) ** params.length_penalty
        assert hypothesis.cumulative_logprob == pytest.approx(hypothesis.score * length_factor, rel=1e-5)
    return found


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("beam_width", [2, 3, 4, 8])
def test_equals_transformers_for_every_penalty_and_way_to_stop(
    oracle: TransformersOracle, beam_width: int, early_stopping: Any
) -> None:
    num_cases_of_many_lengths = 0
    for seed, length_penalty in enumerate(LENGTH_PENALTIES):
        params = beam_params(beam_width, n=beam_width, length_penalty=length_penalty, early_stopping=early_stopping)
        found = check_equal(oracle, prompt_of(seed), params, likely_ends(oracle, seed, num_ends=1 + seed % 3))
        stopped = [len(hypothesis.token_ids) for hypothesis in found if hypothesis.finish_reason == "stop"]
        num_cases_of_many_lengths += len(set(stopped)) > 1
    assert num_cases_of_many_lengths >= 1


@pytest.mark.parametrize("seed", range(4))
def test_equals_transformers_in_random_combinations(oracle: TransformersOracle, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        beam_width = rng.choice([2, 3, 4, 5])
        max_tokens = rng.randint(1, MAX_TOKENS)
        params = SamplingParams(
            beam_width=beam_width,
            n=rng.randint(1, beam_width),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randrange(max_tokens)]),
            length_penalty=rng.choice([*LENGTH_PENALTIES, rng.uniform(-2.0, 3.0)]),
            early_stopping=rng.choice(EARLY_STOPPING),
        )
        prompt = rng.randrange(8)
        check_equal(oracle, prompt_of(prompt), params, likely_ends(oracle, prompt, num_ends=rng.randrange(6)))


@pytest.mark.parametrize("seed", [0, 4])
def test_a_penalty_on_length_does_not_end_the_search_early(oracle: TransformersOracle, seed: int) -> None:
    params = beam_params(3, n=3, length_penalty=-0.4, early_stopping="never")
    check_equal(oracle, prompt_of(seed), params, likely_ends(oracle, seed, num_ends=4))


@pytest.mark.parametrize("beam_width", [2, 4])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_equals_transformers_when_the_first_tokens_are_the_last(
    oracle: TransformersOracle, beam_width: int, max_tokens: int
) -> None:
    prompt = prompt_of(1)
    best = oracle.beam_search(prompt, num_beams=2, num_return_sequences=2, max_new_tokens=max_tokens, eos_token_id=None)
    params = beam_params(beam_width, n=beam_width, max_tokens=max_tokens)
    found = check_equal(oracle, prompt, params, best[1][-1:])
    assert {hypothesis.finish_reason for hypothesis in found} == {"stop", "length"}


@pytest.mark.parametrize("min_tokens", [3, MAX_TOKENS])
def test_equals_transformers_when_end_tokens_are_banned_at_first(oracle: TransformersOracle, min_tokens: int) -> None:
    for seed in range(3):
        prompt = prompt_of(seed)
        found = check_equal(oracle, prompt, beam_params(4, n=2, min_tokens=min_tokens), likely_ends(oracle, seed, 3))
        assert all(len(hypothesis.token_ids) > min_tokens for hypothesis in found if hypothesis.finish_reason == "stop")


def test_stop_token_ids_end_beams_as_eos_does_and_eos_can_be_ignored(oracle: TransformersOracle) -> None:
    prompt = prompt_of(3)
    ends = likely_ends(oracle, 3, 3)
    as_eos = NaiveEngine(oracle, prompt, beam_params(4, n=4), ends).run()
    eos = [end for end in ends if end == as_eos[0].stop_token_id]
    others = [end for end in ends if end not in eos]
    as_both = NaiveEngine(oracle, prompt, beam_params(4, n=4, stop_token_ids=ends), eos).run()
    ignored = NaiveEngine(oracle, prompt, beam_params(4, n=4, stop_token_ids=others, ignore_eos=True), eos).run()
    assert eos
    assert as_both == as_eos
    assert ignored == check_equal(oracle, prompt, beam_params(4, n=4), others)
    assert ignored != as_eos


def test_the_last_offer_of_a_recomputed_beam_counts(oracle: TransformersOracle) -> None:
    prompt = prompt_of(0)
    params = beam_params(3, n=3)
    engine = NaiveEngine(oracle, prompt, params, likely_ends(oracle, 0, 1))
    is_over = False
    while not is_over:
        for seq_id in list(engine.sequences)[:2]:
            engine.search.offer(seq_id, np.array([7], np.int32), np.array([0.0], np.float32))
        engine.offer()
        is_over = engine.advance()
    assert engine.search.hypotheses == NaiveEngine(oracle, prompt, params, engine.eos).run()


def test_what_is_offered_may_be_overwritten_afterwards() -> None:
    search = BeamSearch(beam_params(2), 0, max_tokens=1, eos_token_ids=[])
    token_ids, logprobs = np.array([7, 8], np.int32), np.array([-1.0, -2.0], np.float32)
    search.offer(0, token_ids, logprobs)
    token_ids[:], logprobs[:] = 9, -3.0
    search.advance()
    assert [hypothesis.token_ids for hypothesis in search.hypotheses] == [[7]]
    assert search.hypotheses[0].score == -1.0


def test_equals_transformers_when_only_one_text_is_possible(oracle: TransformersOracle) -> None:
    prompt = prompt_of(2)
    expected = oracle.beam_search(
        prompt,
        num_beams=4,
        num_return_sequences=3,
        max_new_tokens=5,
        eos_token_id=None,
        prefix_allowed_tokens_fn=lambda _row, _tokens: [9],
    )
    engine = NaiveEngine(oracle, prompt, beam_params(4, n=3, max_tokens=5), [])
    engine.allowed = [9]
    assert [hypothesis.token_ids for hypothesis in engine.run()] == expected == [[9] * 5] * 3


def test_no_token_allowed_ends_the_search_without_a_text(oracle: TransformersOracle) -> None:
    engine = NaiveEngine(oracle, prompt_of(2), beam_params(2), [])
    engine.allowed = []
    assert engine.run() == []


@pytest.mark.parametrize("length_penalty", [-100.0, -4.0, 100.0])
def test_extreme_penalties_still_give_n_texts(oracle: TransformersOracle, length_penalty: float) -> None:
    prompt = prompt_of(4)
    params = beam_params(3, n=3, length_penalty=length_penalty)
    found = NaiveEngine(oracle, prompt, params, likely_ends(oracle, 4, 3)).run()
    assert len({tuple(hypothesis.token_ids) for hypothesis in found}) == 3


def test_misuse_is_refused() -> None:
    search = BeamSearch(beam_params(2), 5, max_tokens=4, eos_token_ids=[])
    token_ids, logprobs = np.array([7, 8], np.int32), np.array([-1.0, -2.0], np.float32)
    with pytest.raises(RuntimeError, match="0 offers for 1 live beams"):
        search.advance()
    with pytest.raises(LookupError, match="sequence 6"):
        search.offer(6, token_ids, logprobs)
    with pytest.raises(ValueError, match="must be as many"):
        search.offer(5, token_ids, logprobs[:1])
    search.offer(5, token_ids, logprobs)
    search.advance()
    with pytest.raises(ValueError, match="sequence 5 has 0 forks: must be 1"):
        search.adopt(5, [])
