"""Adapters are in memory while requests use them; when others need their place, the least recently used one goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from deepinfer_backend.errors import ConfigError, EngineError, InvalidRequestError
from deepinfer_backend.models.adapter_cache import AdapterCache
from deepinfer_backend.models.loader import load_model
from deepinfer_backend.models.lora import LoraLayers, plan_lora
from deepinfer_backend.models.transformers_model import ATTENTION_NAME, TransformersModel
from deepinfer_backend.worker.device import CpuStream
from tests.support.lora import edit_config, make_random_adapter, merged_model
from tests.support.models import make_random_model
from tests.support.packed_attention import packed_logits

T = TypeVar("T")
CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def adapters(llama: Path, tmp_path: Path) -> dict[str, str]:
    return {
        name: str(make_random_adapter(llama, tmp_path / name, seed=seed, r=4, target_modules=["v_proj", "up_proj"]))
        for seed, name in enumerate(["fr", "de", "it"])
    }


class Engine:
    """A model with a cache of adapters, and the stream that they run on."""

    def __init__(self, path: Path, adapters: dict[str, str], max_loras: int, max_lora_rank: int) -> None:
        self._stream = CpuStream()
        module = load_model(path, torch.float32, CPU, ATTENTION_NAME)
        self._layers = LoraLayers(module, torch.device("cpu"))
        self._model = TransformersModel(module)
        self.cache = AdapterCache(
            self._layers,
            adapters,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            run_on_stream=self._run_on_stream,
        )

    def _run_on_stream(self, work: Callable[[], T]) -> T:
        return self._stream.submit(work).result()

    def acquire(self, name: str) -> int:
        lora_id = self.cache.acquire(name)
        assert lora_id is not None
        return lora_id

    def logits(self, lora_id: int) -> torch.Tensor:
        ids, starts = np.array([lora_id], dtype=np.int32), np.array([0, len(PROMPT)], dtype=np.int32)
        self._layers.set_step(plan_lora(ids, starts, CPU))
        return packed_logits(self._model, [PROMPT])[0]

    def use_once(self, *names: str) -> None:
        for name in names:
            self.cache.acquire(name)
            self.cache.release(name)

    def close(self) -> None:
        self._stream.close()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(llama: Path) -> Iterator[MakeEngine]:
    with ExitStack() as engines:

        def make(adapters: dict[str, str], *, path: Path = llama, max_loras: int = 2, max_lora_rank: int = 8) -> Engine:
            return engines.enter_context(closing(Engine(path, adapters, max_loras, max_lora_rank)))

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine, adapters: dict[str, str]) -> Engine:
    return make_engine(adapters)


def test_acquired_adapter_answers_as_its_merged_model_whatever_was_unloaded_before(
    llama: Path, adapters: dict[str, str], engine: Engine
) -> None:
    for name in ["fr", "de", "it", "fr"]:
        with torch.inference_mode():
            expected = merged_model(llama, Path(adapters[name]))(torch.tensor([PROMPT])).logits[0]
        lora_id = engine.acquire(name)
        torch.testing.assert_close(engine.logits(lora_id), expected, atol=1e-4, rtol=1e-4)
        engine.cache.release(name)


def test_adapter_is_loaded_once_for_all_its_requests_and_stays_until_its_place_is_needed(engine: Engine) -> None:
    lora_id = engine.acquire("fr")
    assert lora_id >= 1
    assert engine.acquire("fr") == lora_id
    engine.cache.release("fr")
    engine.cache.release("fr")
    assert engine.acquire("fr") == lora_id
    assert engine.cache.loaded_names == ["fr"]


@pytest.mark.parametrize(
    ("order", "left"),
    [(["fr", "de", "it"], ["de", "it"]), (["fr", "de", "fr", "it"], ["fr", "it"]), (["fr"] * 3, ["fr"])],
)
def test_least_recently_used_adapter_is_unloaded_first(order: list[str], left: list[str], engine: Engine) -> None:
    engine.use_once(*order)
    assert engine.cache.loaded_names == left


def test_end_of_a_request_is_a_use(engine: Engine) -> None:
    engine.cache.acquire("fr")
    engine.use_once("de")
    engine.cache.release("fr")
    engine.use_once("it")
    assert engine.cache.loaded_names == ["fr", "it"]


def test_unloaded_adapter_gives_its_memory_back(make_engine: MakeEngine, adapters: dict[str, str]) -> None:
    engine = make_engine(adapters, max_loras=1)
    base = engine.logits(0)
    lora_id = engine.acquire("fr")
    engine.cache.release("fr")
    assert not torch.equal(engine.logits(lora_id), base)
    engine.use_once("de")
    assert torch.equal(engine.logits(lora_id), base)


def test_adapter_in_use_is_never_unloaded_and_another_has_no_place_meanwhile(engine: Engine) -> None:
    used = engine.acquire("fr")
    engine.cache.acquire("de")
    assert engine.cache.acquire("it") is None
    assert engine.cache.loaded_names == ["fr", "de"]
    engine.cache.release("de")
    assert engine.cache.acquire("it") is not None
    assert engine.cache.loaded_names == ["fr", "it"]
    assert engine.acquire("fr") == used


def test_lora_id_is_never_given_to_another_load(engine: Engine) -> None:
    ids = []
    for name in ["fr", "de", "it", "fr", "de"]:
        ids.append(engine.cache.acquire(name))
        engine.cache.release(name)
    assert len(set(ids)) == len(ids)


def test_unknown_name_is_refused_with_the_known_ones(make_engine: MakeEngine, engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"lora_name is 'fra': must be one of 'fr', 'de', 'it' .*'fr'\?"):
        engine.cache.acquire("fra")
    with pytest.raises(InvalidRequestError, match=r"lora_name is 'fr': no adapters are configured"):
        make_engine({}).cache.acquire("fr")
    many = make_engine({f"name{number}": "nowhere" for number in range(100)})
    with pytest.raises(InvalidRequestError, match=r"'name9' or 90 others"):
        many.cache.acquire("fr")


def test_adapter_that_can_no_longer_be_loaded_fails_its_request_alone(
    adapters: dict[str, str], engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.cache.check_configured()
    engine.use_once("fr")
    used = engine.acquire("de")
    expected = engine.logits(used)
    weights = Path(adapters["it"]) / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match=r"lora_name 'it' cannot be loaded"):
        engine.cache.acquire("it")
    assert "LoRA adapter 'it'" in caplog.text
    assert "is damaged or incomplete" in caplog.text
    assert engine.cache.loaded_names == ["fr", "de"]
    assert torch.equal(engine.logits(used), expected)
    weights.write_bytes(content)
    engine.cache.acquire("it")
    assert engine.cache.loaded_names == ["de", "it"]


def test_configured_adapters_are_checked_before_any_request_comes(
    make_engine: MakeEngine, adapters: dict[str, str]
) -> None:
    make_engine(adapters).cache.check_configured()
    with pytest.raises(ConfigError, match=r"LoRA adapter 'fr': .*is 4: must be at most max_lora_rank, 3"):
        make_engine(adapters, max_lora_rank=3).cache.check_configured()
    with pytest.raises(ConfigError, match=r"LoRA adapter 'gone': .*there is no such folder"):
        make_engine({**adapters, "gone": "/nowhere"}).cache.check_configured()
    edit_config(Path(adapters["it"]), use_dora=True)
    with pytest.raises(ConfigError, match=r"LoRA adapter 'it': .*use_dora is True: is not supported"):
        make_engine(adapters).cache.check_configured()


def test_adapter_for_another_model_is_found_before_any_request_comes(
    make_engine: MakeEngine, adapters: dict[str, str], tmp_path: Path
) -> None:
    other = make_random_model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=r"LoRA adapter 'fr': module .* has 64 inputs and 64 outputs"):
        make_engine(adapters, path=other).cache.check_configured()
