"""A draft model changes how fast tokens come, and none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.errors import ConfigError
from tests.engine.test_same_tokens import Case
from tests.speculation.greedy import WAYS, GreedyCases
from tests.support.models import make_random_model, make_similar_model


def draft_model(path: Path, num_speculative_tokens: int) -> dict[str, Any]:
    config = {"method": "draft_model", "model": str(path), "num_speculative_tokens": num_speculative_tokens}
    return {"speculative_config": config}


@pytest.fixture(scope="module")
def similar_model(random_model: GreedyCases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_similar_model(random_model.path, tmp_path_factory.mktemp("similar"))


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize(("batching", "num_speculative_tokens", "num_seqs"), WAYS)
def test_greedy_tokens_equal_transformers(
    random_model: GreedyCases,
    similar_model: Path,
    batching: str,
    num_speculative_tokens: int,
    num_seqs: int,
    zero_overhead_scheduling: bool,
) -> None:
    drafter = draft_model(similar_model, num_speculative_tokens)
    random_model.check(batching, num_seqs, zero_overhead_scheduling=zero_overhead_scheduling, **drafter)


def accepted_shares(model: Path, draft: Path, cases: list[Case], **params: Any) -> list[float]:
    """Of each case's drafts."""
    with LLM(str(model), decode_sequence=False, dtype="float32", **draft_model(draft, 4)) as llm:
        completions = llm.complete(
            prompt_token_ids=[prompt for prompt, _ in cases],
            sampling_params=[
                SamplingParams(max_tokens=100, ignore_eos=True, seed=seed, **params) for seed in range(len(cases))
            ],
            use_tqdm=False,
        )
    sequences = [completion.sequences[0] for completion in completions]
    return [each.num_accepted_draft_tokens / each.num_draft_tokens for each in sequences]


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 5}], ids=str)
def test_the_model_itself_is_always_right(random_model: GreedyCases, params: dict[str, Any]) -> None:
    """Whatever is drawn: with the same random numbers. Only drafts beyond the last token are cut off."""
    path, cases = random_model.path, random_model.cases[:24]
    assert min(accepted_shares(path, path, cases, **params)) > 0.95


@pytest.mark.usefixtures("every_draft_is_verified")
def test_a_similar_model_is_right_more_often_than_another(
    random_model: GreedyCases, similar_model: Path, tmp_path: Path
) -> None:
    path, cases = random_model.path, random_model.cases[:24]
    similar = accepted_shares(path, similar_model, cases, temperature=0.0)
    other = accepted_shares(path, make_random_model("qwen3", tmp_path), cases, temperature=0.0)
    assert sum(similar) > 5 * sum(other)


def test_another_vocabulary_is_refused(
    random_model: GreedyCases,
) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config.model is .*, of 512 tokens: must have the vocabulary"):
        LLM(**draft_model(random_model.path, 2))
