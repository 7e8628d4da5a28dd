"""EngineConfig refuses what no engine can be, and every field says what it means."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "int8"}, "dtype is 'int8': must be 'auto', 'float32', 'bfloat16' or 'float16'"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8': must be 'auto', 'float32', 'bfloat16' or 'int8'"),
    ({"device": "tpu"}, "device is 'tpu': must be 'auto', 'cpu' or 'cuda'"),
    ({"max_model_len": 0}, "max_model_len is 0: must be at least 1"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0: must be at least 1"),
    ({"max_num_seqs": 4097}, "max_num_seqs is 4097: must be at most 4096"),
    ({"max_num_seqs": "some"}, "max_num_seqs is 'some': must be an integer"),
    ({"max_num_seqs": None}, "max_num_seqs is None: must be an integer"),
    ({"max_num_batched_tokens": 2**21}, "max_num_batched_tokens is 2097152: must be at most 1048576"),
    ({"block_size": 2000}, "block_size is 2000: must be at most 1024"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0: must be greater than 0"),
    ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization is 1.1: must be at most 1"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan: must be a finite number"),
    ({"enable_prefix_caching": "perhaps"}, "enable_prefix_caching is 'perhaps': must be true or false"),
    ({"seed": -1}, "seed is -1: must be at least 0"),
    ({"stats_interval_s": -0.5}, "stats_interval_s is -0.5: must be at least 0"),
    ({"model": 7}, "model is 7: must be a string"),
    ({"max_num_sequences": 4}, "unknown field 'max_num_sequences' (did you mean 'max_num_seqs'?)"),
    ({"zzz": 4}, "unknown field 'zzz'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=[f"{fields}"[:40] for fields, _ in BAD_FIELDS])
def test_a_bad_value_is_refused_with_field_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(**fields)
    assert message in refusal.value.message


@pytest.mark.parametrize("name", EngineConfig.model_fields)
def test_every_field_says_what_it_means(name: str) -> None:
    description = EngineConfig.model_fields[name].description
    assert description is not None
    assert description.endswith(".")


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_the_environment_turns_zero_overhead_scheduling_off(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", value)
    assert EngineConfig().zero_overhead_scheduling is expected
    assert EngineConfig(zero_overhead_scheduling=not expected).zero_overhead_scheduling is not expected


def test_limits_of_media_that_are_left_out_keep_their_defaults() -> None:
    assert EngineConfig(limit_mm_per_prompt={"image": 3}).limit_mm_per_prompt == {"image": 3, "video": 2}
    assert EngineConfig(limit_mm_per_prompt='{"video": 0}').limit_mm_per_prompt == {"image": 16, "video": 0}
