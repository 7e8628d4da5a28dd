"""The launcher and the model repository, as far as no running model is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_backend.errors import ConfigError, EngineError
from deepinfer_backend.triton import server_layout
from deepinfer_backend.triton.model_config import (
    check_instances,
    complete_config,
    place_instance,
    read_engine_arguments,
    write_model_repository,
)
from tests.support.triton_server import running_server

SHIPPED = Path(__file__).parents[2] / "model_repository"


def test_the_shipped_repository_is_what_the_launcher_writes(tmp_path: Path) -> None:
    write_model_repository(tmp_path, {"deepinfer": {}})
    for name in ("config.pbtxt", "1/model.py", "1/model.json"):
        written, shipped = (folder / "deepinfer" / name for folder in (tmp_path, SHIPPED))
        assert written.read_text(encoding="utf-8") == shipped.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", 'a"b'])
def test_a_model_name_that_triton_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="model name is"):
        write_model_repository(tmp_path, {name: {}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_model_json_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"model\.json"):
        read_engine_arguments(tmp_path)


def test_without_a_model_json_all_arguments_have_their_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_engine_arguments(tmp_path) == {}
    assert "model.json is missing" in caplog.text


def test_more_than_one_instance_is_refused() -> None:
    check_instances({"instance_group": [{"count": 1}]})
    with pytest.raises(ConfigError, match="count is 2: must be 1"):
        check_instances({"instance_group": [{"count": 2}]})


@pytest.mark.parametrize(
    ("kind", "parameters", "expected"),
    [
        ("MODEL", {"GPU_DEVICE_IDS": {"string_value": " 3 "}}, ("GPU", "3")),
        ("MODEL", {"REPORT_CUSTOM_METRICS": {"string_value": "true"}}, ("MODEL", "0")),
        ("GPU", {"GPU_DEVICE_IDS": {"string_value": "3"}}, ("GPU", "0")),
        ("CPU", {}, ("CPU", "0")),
    ],
)
def test_the_vllm_backends_parameter_names_the_gpu(
    kind: str, parameters: dict[str, object], expected: tuple[str, str]
) -> None:
    assert place_instance({"parameters": parameters}, kind, "0") == expected


@pytest.mark.parametrize("ids", ["0,1", "-1", "a"])
def test_more_than_one_gpu_is_refused(ids: str) -> None:
    with pytest.raises(ConfigError, match=r"GPU_DEVICE_IDS is .*: must be the number of one GPU"):
        place_instance({"parameters": {"GPU_DEVICE_IDS": {"string_value": ids}}}, "MODEL", "0")


class _Config:
    """Triton's ModelConfig, as far as a refusal needs it."""

    def __init__(self, **fields: object) -> None:
        self._fields = {"max_batch_size": 0, "input": [], "output": [], **fields}

    def as_dict(self) -> dict[str, object]:
        return self._fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_size": 8}, "max_batch_size is 8: must be 0"),
        ({"model_transaction_policy": {"decoupled": False}}, "decoupled is false: must be true"),
        (
            {"input": [{"name": "text_input", "data_type": "TYPE_INT8"}]},
            "input text_input is TYPE_INT8: must be TYPE_S",
        ),
        ({"output": [{"name": "text_out", "data_type": "TYPE_STRING"}]}, "unknown output 'text_out' .*'text_output'"),
    ],
)
def test_a_config_that_this_model_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete_config(_Config(**fields))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seq": 4}, "did you mean 'max_num_seqs'?"),
        ({"model": "/nowhere/at-all"}, "/nowhere/at-all"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError) as error, running_server(tmp_path, {"deepinfer": arguments}):
        pass
    assert (
        "; model deepinfer: " in str(error.value) and message in str(error.value).rpartition("; model deepinfer: ")[2]
    )
    assert "+---" not in str(error.value), "what went well is no help"


def test_a_missing_wheel_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_layout, "WHEEL_PACKAGE", "no_such_wheel")
    monkeypatch.setattr(server_layout, "CONTAINER_SERVER", tmp_path / "nothing")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install nvidia-pytriton==0\.7\.0"):
        server_layout.find_server(tmp_path)


def test_a_missing_libpython_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_layout, "_PYTHON_VERSION", "3.12")  # the wheel has its stub, this machine no library
    with pytest.raises(ConfigError, match=r"libpython3\.12\.so\.1\.0 is missing.*apt-get install libpython3\.12"):
        server_layout.find_server(tmp_path)


def test_a_server_of_the_machine_needs_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in NVIDIA's container."""
    monkeypatch.setattr(server_layout, "WHEEL_PACKAGE", "no_such_wheel")
    program = tmp_path / "tritonserver"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    layout = server_layout.find_server(tmp_path / "work")
    assert (layout.executable, layout.options) == (program, [])
