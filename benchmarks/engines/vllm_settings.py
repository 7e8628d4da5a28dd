"""How vLLM for CPU is started, by itself or in Triton: its arguments and its environment."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from benchmarks.engines.engine import DTYPES, Weights
from benchmarks.model_files import float_folder, int8_folder
from benchmarks.peers import vllm_compile_cache

_MAX_NUM_SEQS = 32
_TCMALLOC = "tcmalloc_minimal"
_START_TIMEOUT_S = 1500  # compiling takes minutes, once for each model and machine
_STOPPED_TIMEOUT_S = 24 * 3600  # it is stopped while others are measured, with its next step under way


def vllm_arguments(weights: Weights) -> Mapping[str, Any]:
    return {
        "model": str(int8_folder() if weights == "8-bit" else float_folder()),
        "dtype": DTYPES.get(weights, "bfloat16"),
        "max_model_len": 2048,
        "max_num_seqs": _MAX_NUM_SEQS,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
        # Its compiler does not know these kernels: eager is its best setting for them.
        "enforce_eager": weights == "8-bit",
    }


def vllm_environment(python: Path, num_threads: int) -> Mapping[str, str]:
    """python: of the environment that it is installed in."""
    return {
        "LD_PRELOAD": f"{find_library(_TCMALLOC)}:{python.parents[1] / 'lib' / 'libiomp5.so'}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # Its own choice leaves one core idle.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(vllm_compile_cache()),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(_START_TIMEOUT_S),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(_STOPPED_TIMEOUT_S),
    }


def tcmalloc_missing() -> str | None:
    return "apt-get install libtcmalloc-minimal4" if find_library(_TCMALLOC) is None else None
