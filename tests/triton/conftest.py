"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_server import running_server

ENGINE_ARGUMENTS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 64, "max_model_len": 2048}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with running_server(tmp_path_factory.mktemp("server"), {"deepinfer": ENGINE_ARGUMENTS}) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """transformers' own, for what a text must be."""
    from deepinfer_backend.models.loader import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model(None))
