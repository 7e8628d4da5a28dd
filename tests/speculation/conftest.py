from __future__ import annotations

import pytest

from deepinfer_backend.engine.draft_policy import ALL_DRAFTS, DraftPolicy
from tests.engine.test_same_tokens import random_cases
from tests.speculation.greedy import GreedyCases
from tests.support.models import make_random_model
from tests.support.oracle import TransformersOracle


@pytest.fixture(scope="package")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> GreedyCases:
    path = make_random_model("llama", tmp_path_factory.mktemp("models"))
    cases = random_cases(64, 400, 160, seed=3)
    oracle = TransformersOracle(path)
    return GreedyCases(path, cases, [oracle.greedy(prompt, limit) for prompt, limit in cases])


@pytest.fixture
def every_draft_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays or not: models that are made for tests have steps of a millisecond, and few drafts are right."""
    monkeypatch.setattr(DraftPolicy, "threshold", lambda *_: ALL_DRAFTS)
