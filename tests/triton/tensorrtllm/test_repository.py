"""The folder model_repository_tensorrtllm, and what writes it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from deepinfer_backend import cli
from deepinfer_backend.triton.tensorrtllm.repository import MODEL_NAMES, write_tensorrtllm_models
from tests.support.models import make_random_model

CHECKED_IN = Path(__file__).parents[3] / "model_repository_tensorrtllm"


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def read_config(folder: Path, name: str) -> model_config_pb2.ModelConfig:
    """As Triton reads it; raises for what is no config.pbtxt."""
    text = (folder / name / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_checked_in_folder_is_what_is_written(tmp_path: Path) -> None:
    write_tensorrtllm_models(tmp_path, "deepinfer")
    assert files_of(CHECKED_IN) == files_of(tmp_path)
    assert {path.name for path in CHECKED_IN.iterdir()} == set(MODEL_NAMES)


def test_another_text_model_changes_model_json_alone(tmp_path: Path) -> None:
    write_tensorrtllm_models(tmp_path, "other")
    here, there = files_of(tmp_path), files_of(CHECKED_IN)
    changed = {name for name in here if here[name] != there[name]}
    assert changed == {name for name in here if name.endswith("model.json")}
    assert {json.loads(here[name])["engine_of"] for name in changed} == {"other"}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_model_has_its_folders_name_and_a_batch_dimension(name: str) -> None:
    config = read_config(CHECKED_IN, name)
    assert config.name == name
    assert config.max_batch_size > 1
    model_py = CHECKED_IN / name / "1" / "model.py"
    assert model_py.exists() == (config.platform != "ensemble")


def test_the_ensemble_hands_on_all_that_it_takes_and_gives_all_that_its_last_step_does() -> None:
    ensemble = read_config(CHECKED_IN, "ensemble")
    known = set()
    for step in ensemble.ensemble_scheduling.step:
        model = read_config(CHECKED_IN, step.model_name)
        assert set(step.input_map) <= {tensor.name for tensor in model.input}
        assert set(step.output_map) <= {tensor.name for tensor in model.output}
        known |= {name for name in step.input_map.values() if not name.startswith("_")}
    assert known == {tensor.name for tensor in ensemble.input}
    last = ensemble.ensemble_scheduling.step[-1]
    assert set(last.output_map.values()) == {tensor.name for tensor in ensemble.output}


def test_pieces_of_a_stream_stay_in_order_in_models_of_others() -> None:
    """An ensemble passes a step's responses on in order only where the model promises it."""
    config = read_config(CHECKED_IN, "postprocessing")
    assert config.dynamic_batching.preserve_ordering
    assert [group.count for group in config.instance_group] == [1]
    assert not re.search("decoupled", str(config))


def run_serve(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["deepinfer", "serve", *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_serve_adds_them_to_the_first_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: dict[str, str] = {}

    def serve(folder: Path, *_: Any) -> None:
        served.update(files_of(folder))

    monkeypatch.setattr(cli, "_serve_repository", serve)
    monkeypatch.setattr(cli, "_check_ports", lambda ports: None)
    path = make_random_model("llama", tmp_path)
    models = [f"--model={name}={path}" for name in ("first", "second")]
    assert run_serve(monkeypatch, *models) == 0
    assert {name.partition("/")[0] for name in served} == {"first", "second"}
    served.clear()
    assert run_serve(monkeypatch, *models, "--tensorrtllm") == 0
    assert {name.partition("/")[0] for name in served} == {"first", "second", *MODEL_NAMES}
    assert json.loads(served["tensorrt_llm/1/model.json"]) == {"engine_of": "first"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensorrtllm", "--model", "ensemble=/x"], "model 'ensemble' cannot have this name beside --tensorrtllm"),
        (["--tensorrtllm", "--model-repository", "/x"], "--tensorrtllm cannot be used with --model-repository"),
    ],
)
def test_serve_refuses_what_does_not_go_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run_serve(monkeypatch, *options) == 2
    assert message in capsys.readouterr().err
