"""A GGUF file is converted once, wholly, and into the same model."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepinfer_backend.errors import ConfigError, DeepInferError, UnsupportedModelError
from deepinfer_backend.models.loader import load_generation_config, load_model, load_tokenizer, resolve_model
from deepinfer_backend.models.model_files import referenced_gguf
from tests.support.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

TIMEOUT_S = 120.0
# Converts its argument, telling on stderr when it begins; prints the folder.
CONVERT = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from deepinfer_backend.models.loader import resolve_model
print(resolve_model(sys.argv[1]))
"""
BEGIN = "Converting tiny.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def start_conversion(gguf: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(gguf)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def visible_folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))


def partial_folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir() and path.name.startswith(".")]


def greedy_tokens(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens: list[int] = model.generate(  # type: ignore[operator]
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=20,
    )[0].tolist()
    return tokens


def test_the_converted_folder_holds_the_same_model_and_tokenizer(cache: Path, gguf: Path) -> None:
    folder = resolve_model(str(gguf))
    converted = load_model(folder, torch.float32, torch.device("cpu"), "sdpa")
    direct = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer, direct_tokenizer = (
        load_tokenizer(folder),
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name),
    )
    assert tokenizer is not None
    for prompt in ("Hello", "  two spaces", "naïve 你好 😀", "</s>"):
        token_ids = tokenizer(prompt)["input_ids"]
        assert token_ids == direct_tokenizer(prompt)["input_ids"]
        assert greedy_tokens(converted, token_ids) == greedy_tokens(direct, token_ids)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert load_generation_config(folder).eos_token_ids == [2]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_a_file_is_known_by_its_content(cache: Path, gguf: Path, tmp_path: Path) -> None:
    first = resolve_model(str(gguf))
    written = (first / "tokenizer.json").stat().st_mtime_ns
    assert resolve_model(str(gguf)) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == written
    write_tiny_gguf(gguf, seed=1)
    assert resolve_model(str(gguf)) != first


def test_weights_that_can_run_as_they_are_stored_are_dequantized_only_when_needed(cache: Path, gguf: Path) -> None:
    folder = resolve_model(str(gguf))
    assert not list(folder.glob("*.safetensors"))
    assert referenced_gguf(folder) == gguf
    assert resolve_model(str(folder)) == folder
    load_model(folder, torch.float32, torch.device("cpu"), "sdpa")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    load_model(folder, torch.float32, torch.device("cpu"), "sdpa")
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert not partial_folders(folder)
    assert not partial_folders(cache)


def test_weights_that_cannot_are_dequantized_at_once_and_the_log_says_why(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = resolve_model(str(write_tiny_gguf(tmp_path / "tiny.gguf", quantization="TQ2_0")))
    assert "tiny.gguf is dequantized to float32: the type TQ2_0 of its tensor" in caplog.text
    assert (folder / "model.safetensors").is_file()


def test_a_file_may_move_but_not_be_replaced(cache: Path, gguf: Path, tmp_path: Path) -> None:
    folder = resolve_model(str(gguf))
    moved = gguf.rename(tmp_path / "moved.gguf")
    for action in (
        lambda: resolve_model(str(folder)),
        lambda: load_model(folder, torch.float32, torch.device("cpu"), "sdpa"),
    ):
        with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf, which is no longer there or has changed"):
            action()
    moved.rename(gguf)
    assert resolve_model(str(folder)) == folder
    write_tiny_gguf(gguf, seed=1)
    with pytest.raises(UnsupportedModelError, match="has changed: name that file as the model"):
        resolve_model(str(folder))


def test_a_copy_of_a_file_takes_its_folder_over(cache: Path, gguf: Path, tmp_path: Path) -> None:
    folder = resolve_model(str(gguf))
    (tmp_path / "other").mkdir()
    copy = gguf.rename(tmp_path / "other" / gguf.name)
    assert resolve_model(str(copy)) == folder
    assert referenced_gguf(folder) == copy


def test_two_processes_at_once_convert_once(cache: Path, gguf: Path) -> None:
    processes = [start_conversion(gguf) for _ in range(2)]
    answers = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    assert sum(f"{BEGIN} (once) …" in log for _, log in answers) == 1
    assert not partial_folders(cache)


def test_a_killed_conversion_leaves_nothing_half_made(cache: Path, gguf: Path) -> None:
    process = start_conversion(gguf)
    assert process.stderr is not None
    for line in process.stderr:
        if BEGIN in line:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGKILL
    assert visible_folders(cache) == []
    assert len(partial_folders(cache)) == 1

    folder = resolve_model(str(gguf))
    load_model(folder, torch.float32, torch.device("cpu"), "sdpa")
    assert visible_folders(cache) == [folder.name]
    assert not partial_folders(cache)


@pytest.mark.parametrize("num_bytes", [4, 100, 5_000, 100_000, -1])
def test_a_truncated_file_is_named_in_one_line_and_leaves_nothing(cache: Path, gguf: Path, num_bytes: int) -> None:
    gguf.write_bytes(gguf.read_bytes()[:num_bytes])
    with pytest.raises(UnsupportedModelError) as refusal:
        resolve_model(str(gguf))
    assert str(gguf) in refusal.value.message
    assert "\n" not in refusal.value.message
    assert visible_folders(cache) == []
    assert not partial_folders(cache)


@pytest.mark.parametrize("content", [b"", b"GGU", b"<html>not found</html>"])
def test_what_is_not_gguf_is_refused_before_any_work(cache: Path, gguf: Path, content: bytes) -> None:
    gguf.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match="is not a GGUF file"):
        resolve_model(str(gguf))
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="DEEPINFER_CACHE_DIR") as refusal:
        resolve_model(str(gguf))
    assert isinstance(refusal.value, DeepInferError)
    assert str(tmp_path / "file") in refusal.value.message


def test_the_cache_lies_where_the_environment_says(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_model(str(gguf)).is_relative_to(tmp_path / "xdg" / "deepinfer")
