"""A module that was trained on what a model wrote proposes what the model goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.errors import InvalidRequestError, UnsupportedModelError
from deepinfer_backend.mtp_training.training import train_mtp
from tests.support.models import make_random_model
from tests.support.mtp_modules import forget_context
from tests.support.tiny_text_model import make_tiny_text_model


@pytest.mark.usefixtures("every_draft_is_verified")
def test_drafts_of_a_trained_module_are_right_as_often_as_it_was_told(tmp_path: Path) -> None:
    model = forget_context(make_tiny_text_model(tmp_path))
    sharpen(model)
    acceptance = train_mtp(
        tmp_path / "module", model=str(model), minutes=0.5, draft_vocab_size=256, seed=0, report=print
    )
    config = {"method": "mtp", "model": str(tmp_path / "module"), "num_speculative_tokens": 2}
    with LLM(str(model), speculative_config=config) as llm:
        llm.complete(
            ["What is chess?", "Tell me of bees.", "Why do rivers bend?"] * 8,
            [SamplingParams(max_tokens=300, ignore_eos=True, seed=seed) for seed in range(24)],
            use_tqdm=False,
        )
        scheduler = llm.llm_engine.scheduler
        num_drafts, (first, second) = scheduler.num_drafts, scheduler.num_accepted_by_position
    assert acceptance.by_position[0] > 0.5
    assert first / num_drafts > 0.5 * acceptance.by_position[0]
    assert second / first > 0.5 * acceptance.by_position[1]


def sharpen(model: Path) -> None:
    """Makes few tokens likely after each."""
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= 3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = make_random_model("qwen3", tmp_path)
    with pytest.raises(UnsupportedModelError, match="model_type is qwen3: a module is made for llama alone"):
        train_mtp(tmp_path, model=str(path), minutes=1, draft_vocab_size=8, seed=0, report=print)


def test_a_model_that_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    path = make_random_model("llama", tmp_path)
    with pytest.raises(InvalidRequestError, match="this model has no tokenizer"):
        train_mtp(tmp_path, model=str(path), minutes=1, draft_vocab_size=8, seed=0, report=print)
