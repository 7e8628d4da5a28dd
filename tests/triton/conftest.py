"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_server import running_server

ENGINE_ARGUMENTS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 64, "max_model_len": 2048}
ADAPTER = "tuned"


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LoRA adapter of the bundled model, which the server knows as `ADAPTER`."""
    from deepinfer_backend.models.loader import resolve_model
    from tests.support.lora import make_random_adapter

    folder = tmp_path_factory.mktemp("adapters") / ADAPTER
    return make_random_adapter(resolve_model(None), folder, seed=1, r=8, target_modules=["q_proj", "down_proj"])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[TritonServer]:
    arguments = {**ENGINE_ARGUMENTS, "lora_modules": {ADAPTER: str(adapter)}}
    with running_server(tmp_path_factory.mktemp("server"), {"deepinfer": arguments}) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """transformers' own, for what a text must be."""
    from deepinfer_backend.models.loader import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model(None))
