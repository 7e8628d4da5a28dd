"""Requests in the middle of their output, as the sampler sees them, and what transformers makes of their logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.worker.logit_edits import LogitEdits
from deepinfer_backend.worker.random_draw import SamplingRows
from deepinfer_backend.worker.sampler import SamplingBatch
from deepinfer_backend.worker.sequence_state import SequenceState, needs_state
from deepinfer_backend.worker.sequence_states import SequenceStates

VOCAB_SIZE = 3_000
"""More than two prefixes of the truncation, and no multiple of any block size."""
EOS_TOKEN_ID = 2
_FIRST_TOKEN = VOCAB_SIZE - 1
"""Stands before the output for transformers, which matches no bad word against the whole of its input."""


@dataclass(frozen=True)
class Case:
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: list[int] = field(default_factory=lambda: [1])
    output: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)

    @property
    def holds_back_end(self) -> bool:
        return len(self.output) < self.params.min_tokens

    def state(self) -> SequenceState:
        state = SequenceState(
            self.params, np.array(self.prompt, dtype=np.int32), VOCAB_SIZE, bad_words_token_ids=self.bad_words
        )
        for token_id in self.output:
            state.append(token_id)
        return state

    def processed_by_transformers(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits [vocab_size] → the same, through transformers' processors in our order."""
        params = self.params
        prompt_and_output = torch.tensor([self.prompt + self.output])
        output = torch.tensor([[_FIRST_TOKEN, *self.output]])
        scores = logits[None].clone()
        if params.allowed_token_ids is not None:
            others = sorted(set(range(VOCAB_SIZE)) - set(params.allowed_token_ids))
            scores = SuppressTokensLogitsProcessor(others)(output, scores)
        if self.bad_words:
            scores = NoBadWordsLogitsProcessor(self.bad_words)(output, scores)
        if params.min_tokens:
            min_new_tokens = MinNewTokensLengthLogitsProcessor(len(self.prompt), params.min_tokens, [EOS_TOKEN_ID])
            scores = min_new_tokens(prompt_and_output, scores)
        if params.logit_bias:
            scores = SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()})(
                output, scores
            )
        if params.repetition_penalty != 1.0:
            scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(prompt_and_output, scores)
        for token_id, count in Counter(self.output).items():
            scores[0, token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if params.temperature > 0:
            warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
            if params.min_p:
                warpers.append(MinPLogitsWarper(params.min_p))
            if params.top_k > 0:
                warpers.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1.0:
                warpers.append(TopPLogitsWarper(params.top_p))
            scores = warpers(output, scores)
        return scores[0]


def batch_of(
    cases: Sequence[Case], uniforms: NDArray[np.float64] | Sequence[float] | None = None, **options: Any
) -> SamplingBatch:
    """One row a case, as the engine would ask for them."""
    params = [case.params for case in cases]
    top_k = [max(each.top_k, 0) for each in params]
    banned = [row for row, case in enumerate(cases) if case.holds_back_end]
    return SamplingBatch(
        rows=SamplingRows(
            temperature=torch.tensor([each.temperature for each in params]),
            top_k=torch.tensor(top_k, dtype=torch.int32),
            top_p=torch.tensor([each.top_p for each in params]),
            min_p=torch.tensor([each.min_p for each in params]),
            uniforms=torch.as_tensor(np.full(len(cases), 0.5) if uniforms is None else uniforms, dtype=torch.float64),
            all_greedy=not any(each.temperature for each in params),
            any_top_p=any(each.top_p < 1.0 for each in params),
            any_min_p=any(each.min_p > 0.0 for each in params),
            max_top_k=max(top_k),
        ),
        token_ids=torch.empty(len(cases), dtype=torch.int64),
        banned_rows=torch.tensor(banned, dtype=torch.int64),
        banned_token_ids=torch.full((len(banned),), EOS_TOKEN_ID),
        banned_until=torch.ones(len(banned), dtype=torch.int64),
        row_output_indices=torch.zeros(len(cases), dtype=torch.int64),
        edits=edits_of(cases),
        **options,
    )


def edits_of(cases: Sequence[Case]) -> LogitEdits | None:
    states = SequenceStates(VOCAB_SIZE)
    for seq_id, case in enumerate(cases):
        if needs_state(case.params, case.bad_words):
            states.add(seq_id, case.state())
    return states.edits(np.arange(len(cases), dtype=np.int32), np.arange(len(cases), dtype=np.int32))


def random_case(rng: np.random.Generator) -> Case:
    """Any features together, on tokens of which many meet in several of them."""

    def tokens(most: int) -> list[int]:
        few = rng.integers(0, 40, rng.integers(1, most + 1))
        return [int(token) for token in np.where(rng.random(len(few)) < 0.8, few, rng.integers(0, VOCAB_SIZE - 1))]

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.4 else off

    output = maybe(tokens(30), [])
    bad_words = [tokens(1), tokens(3)]
    if output:
        # Words that the output is about to complete, and one that it isn't.
        ends = [output[-length:] for length in (1, 2, 3, len(output))]
        bad_words += [[*end, *tokens(1)] for end in ends] + [[*output[-3:-1], *tokens(2)]]
    return Case(
        params=SamplingParams(
            temperature=maybe(0.0, float(rng.uniform(0.2, 2.0))),
            top_k=maybe(int(rng.choice([1, 5, 50, 64, 65, 700, 2_000])), 0),
            top_p=maybe(float(rng.choice([0.05, 0.5, 0.9, 0.97, 0.999])), 1.0),
            min_p=maybe(float(rng.choice([0.001, 0.05, 0.3])), 0.0),
            repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
            presence_penalty=maybe(float(rng.uniform(-2.0, 2.0)), 0.0),
            frequency_penalty=maybe(float(rng.uniform(-2.0, 2.0)), 0.0),
            logit_bias=maybe({token: float(rng.uniform(-5.0, 5.0)) for token in tokens(20)}, {}),
            allowed_token_ids=maybe(tokens(60) + [int(token) for token in rng.integers(0, VOCAB_SIZE, 50)], None),
            min_tokens=maybe(10, 0),
        ),
        prompt=tokens(50),
        output=output,
        bad_words=maybe(bad_words, []),
    )


def random_logits(rng: np.random.Generator, num_rows: int) -> torch.Tensor:
    """[num_rows, VOCAB_SIZE]; from rows that are nearly flat to ones with a few likely tokens."""
    spread = rng.uniform(0.3, 5.0, (num_rows, 1))
    return torch.from_numpy((rng.standard_normal((num_rows, VOCAB_SIZE)) * spread).astype(np.float32))
