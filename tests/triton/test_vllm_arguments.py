"""A model's files from Triton's vLLM backend become our engine arguments, or are refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError
from deepinfer_backend.triton.vllm_arguments import ACCEPTED_VALUES, WITHOUT_EFFECT, load_engine_arguments, translate


def load(folder: Path, arguments: dict[str, Any], adapters: Any = None) -> dict[str, Any]:
    (folder / "model.json").write_text(json.dumps(arguments), encoding="utf-8")
    if adapters is not None:
        (folder / "multi_lora.json").write_text(json.dumps(adapters), encoding="utf-8")
    return load_engine_arguments(folder)


# As in the samples and tests of Triton's vLLM backend, by their keys.
@pytest.mark.parametrize(
    "arguments",
    [
        {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.5, "enforce_eager": True},
        {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.3, "disable_log_stats": "true"},
        {"model": "org/name", "tensor_parallel_size": 1, "pipeline_parallel_size": "1", "block_size": 16},
        {"model": "org/name", "disable_log_requests": "true", "distributed_executor_backend": "ray"},
        {"model": "org/name", "enable_lora": "true", "max_lora_rank": 32, "quantization": None},
    ],
)
def test_a_file_of_the_vllm_backend_loads_as_it_is(tmp_path: Path, arguments: dict[str, Any]) -> None:
    config = EngineConfig(**load(tmp_path, arguments))
    assert config.model == arguments["model"]
    assert config.gpu_memory_utilization == arguments.get("gpu_memory_utilization", 0.9)


def test_numbers_and_truth_values_may_come_as_text() -> None:
    text = {
        "gpu_memory_utilization": "0.5",
        "max_num_seqs": "7",
        "enable_prefix_caching": "False",
        "trust_remote_code": "false",
        "tensor_parallel_size": "1",
        "cpu_offload_gb": "0.0",
        "quantization": "None",
        "dtype": "half",
    }
    config = EngineConfig(**translate(text, {}))
    assert (config.gpu_memory_utilization, config.max_num_seqs, config.enable_prefix_caching) == (0.5, 7, False)
    assert config.dtype == "float16"


def test_null_is_the_default() -> None:
    every_name = dict.fromkeys([*EngineConfig.model_fields, *ACCEPTED_VALUES, *WITHOUT_EFFECT])
    assert translate(every_name, {}) == {}


def test_no_name_has_two_meanings() -> None:
    assert not ACCEPTED_VALUES.keys() & WITHOUT_EFFECT
    assert not EngineConfig.model_fields.keys() & (ACCEPTED_VALUES.keys() | WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pipeline_parallel_size", 2, "pipeline_parallel_size is 2: must be 1 (one engine uses one device)"),
        ("pipeline_parallel_size", "4", "pipeline_parallel_size is '4': must be 1"),
        ("quantization", "fp8", "quantization is 'fp8': must be"),
        ("trust_remote_code", True, "trust_remote_code is True: must be false (a model's own code is never run)"),
        ("trust_remote_code", "true", "trust_remote_code is 'true': must be false"),
        ("speculative_model", "[ngram]", "must be left out (speculative_config says what proposes tokens)"),
        ("enable_chunked_prefill", False, "enable_chunked_prefill is False: must be true"),
        ("scheduling_policy", "lifo", 'scheduling_policy is \'lifo\': must be "fcfs" or "priority"'),
        ("enable_lora", "maybe", "enable_lora is 'maybe': must be true or false"),
        ("tensor_parallel_sise", 1, "unknown field 'tensor_parallel_sise' (did you mean 'tensor_parallel_size'?)"),
        ("max_num_seq", 1, "unknown field 'max_num_seq' (did you mean 'max_num_seqs'?)"),
    ],
)
def test_what_we_cannot_do_is_refused_by_name(tmp_path: Path, name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, {name: value})
    assert message in str(error.value)


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="hf_token is set: must be false") as error:
        translate({"hf_token": "hf_abcdef"}, {})
    assert "abcdef" not in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "expected"),
    [
        ("bfloat16", "bfloat16", "auto"),
        ("half", "float16", "auto"),
        ("auto", "auto", "auto"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "int8_per_token_head", "int8"),
    ],
)
def test_the_type_of_the_kv_cache_is_ours(dtype: str, kv_cache_dtype: str, expected: str) -> None:
    config = EngineConfig(**translate({"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}, {}))
    assert config.kv_cache_dtype == expected


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "float16"])
def test_a_kv_cache_of_another_type_is_refused_by_name(kv_cache_dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype is '{kv_cache_dtype}': must be 'auto', 'float32'"):
        EngineConfig(**translate({"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}, {}))


@pytest.mark.parametrize("value", [-1, "-1", "auto"])
def test_the_longest_length_that_fits_is_our_default(value: Any) -> None:
    assert translate({"max_model_len": value}, {}) == {}


def test_disable_log_stats_turns_the_lines_of_statistics_off() -> None:
    assert translate({"disable_log_stats": True}, {}) == {"stats_interval_s": 0.0}
    assert translate({"disable_log_stats": False}, {}) == {}
    assert translate({"disable_log_stats": True, "stats_interval_s": 5}, {}) == {"stats_interval_s": 5}


def test_what_has_no_effect_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    translate({"model": "org/name", "swap_space": 4, "enforce_eager": True, "pipeline_parallel_size": 1}, {})
    (record,) = caplog.records
    assert record.getMessage().endswith(": enforce_eager, pipeline_parallel_size, swap_space")


def test_adapters_are_read_when_lora_is_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    adapters = {"law": "adapters/law", "code": "/weights/code"}
    expected = {"law": str(tmp_path / "adapters" / "law"), "code": "/weights/code"}
    assert load(tmp_path, {"enable_lora": "true"}, adapters)["lora_modules"] == expected
    assert load(tmp_path, {"enable_lora": True}, adapters)["lora_modules"] == expected
    assert load(tmp_path, {"enable_lora": False}, adapters) == {}
    assert load(tmp_path, {}, adapters) == {}
    (tmp_path / "multi_lora.json").unlink()
    assert load(tmp_path, {"enable_lora": True}) == {}


@pytest.mark.parametrize(
    ("arguments", "max_loras"),
    [({}, 20), ({"max_loras": 1}, 20), ({"max_loras": 32}, 32), ({"max_loras": "4", "max_cpu_loras": "6"}, 6)],
)
def test_every_adapter_has_room_unless_the_file_limits_it(arguments: dict[str, Any], max_loras: int) -> None:
    """vLLM's max_loras makes requests wait; ours would refuse them."""
    adapters = {f"adapter-{index}": "/folder" for index in range(20)}
    assert translate(arguments, adapters)["max_loras"] == max_loras


@pytest.mark.parametrize("adapters", [["law"], {"law": 1}])
def test_a_multi_lora_json_that_names_no_folders_is_refused(tmp_path: Path, adapters: Any) -> None:
    with pytest.raises(ConfigError, match=r"multi_lora\.json"):
        load(tmp_path, {"enable_lora": True}, adapters)


def test_adapters_in_both_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_modules is set: must be left out"):
        load(tmp_path, {"enable_lora": True, "lora_modules": {"a": "/a"}}, {"b": "/b"})


def test_the_page_on_migrating_names_every_argument_that_may_be_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert [name for name in ACCEPTED_VALUES if f"`{name}`" not in page] == []
