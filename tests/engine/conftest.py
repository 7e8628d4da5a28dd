"""Random models with transformers' own answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.engine.test_same_tokens import ModelAndCases, random_cases
from tests.support.models import make_random_model
from tests.support.oracle import TransformersOracle


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelAndCases]:
    """family → (folder, cases, transformers' answers), made once each."""

    @cache
    def make(family: str) -> ModelAndCases:
        path = make_random_model(family, tmp_path_factory.mktemp("models"))
        cases, oracle = random_cases(24, 400, 48, seed=3), TransformersOracle(path)
        return path, cases, [oracle.greedy(prompt, limit) for prompt, limit in cases]

    return make
