"""All engines: what runs in each one's process, with which model and arguments, and what it lacks here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.engines.engine import Engine, Weights
from benchmarks.model_files import bundled_gguf, float_folder, gguf_file, int8_folder
from benchmarks.peers import LLAMA_CPP_VERSION, llama_cpp_missing, llama_cpp_tool, vllm_missing, vllm_python
from benchmarks.step_cost import ModelShape, gguf_weight_bytes

_DTYPES: dict[Weights, str] = {"f32": "float32", "bf16": "bfloat16"}
_GGUF_KINDS: dict[Weights, Literal["F32", "BF16", "Q8_0"]] = {"f32": "F32", "bf16": "BF16", "8-bit": "Q8_0"}
_DEEPINFER_WORKERS = {
    "deepinfer": "benchmarks.engines.deepinfer_worker",
    "deepinfer-triton": "benchmarks.engines.triton_worker",
}
_LLAMA_CPP_TOOLS = {
    "llama.cpp": ("llama-batched-bench", "benchmarks.engines.llama_cpp_bench_worker"),
    "llama.cpp-server": ("llama-server", "benchmarks.engines.llama_cpp_server_worker"),
}
_MAX_NUM_SEQS = 256
_VLLM_MAX_NUM_SEQS = 32
_TCMALLOC = "tcmalloc_minimal"


def machine_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def all_engines() -> list[Engine]:
    """Ours with every kind of weights; peers with float32 only where the machine has no bfloat16 to be fast with."""
    peer_float: Weights = "bf16" if machine_has_bfloat16() else "f32"
    return [
        *(_deepinfer("deepinfer", weights) for weights in ("f32", "bf16", "8-bit", "4-bit")),
        _deepinfer("deepinfer-triton", peer_float),
        _transformers(peer_float),
        _vllm(peer_float),
        _vllm("8-bit"),
        *(_llama_cpp("llama.cpp", weights) for weights in (peer_float, "8-bit", "4-bit")),
        *(_llama_cpp("llama.cpp-server", weights) for weights in (peer_float, "8-bit", "4-bit")),
    ]


def weight_bytes(engine: Engine, shape: ModelShape) -> float:
    """What a decode step of this engine reads of weights; its model files must be there."""
    if engine.weights == "4-bit":
        return gguf_weight_bytes(bundled_gguf())
    if engine.weights == "8-bit":
        if engine.family == "vllm":
            return shape.layer_weights + 2 * shape.output_weights
        return gguf_weight_bytes(gguf_file("Q8_0"))
    return shape.weight_bytes(4 if engine.weights == "f32" else 2)


def with_prefix_cache(engine: Engine) -> Engine:
    """The same engine of ours as one more, which reuses the blocks of prompts that begin alike."""
    return dataclasses.replace(
        engine,
        family=f"{engine.family}-prefix-cache",
        arguments=lambda: {**engine.arguments(), "enable_prefix_caching": True},
    )


def _deepinfer(family: str, weights: Weights) -> Engine:
    def arguments() -> Mapping[str, Any]:
        return {
            "model": str(_model_of(weights) if weights in ("8-bit", "4-bit") else float_folder()),
            "dtype": _DTYPES.get(weights, "auto"),
            # Said, so that what a step reads is known; peers keep 16 bits too.
            "kv_cache_dtype": "float32" if weights == "f32" else "bfloat16",
            "max_num_seqs": _MAX_NUM_SEQS,
            "enable_prefix_caching": False,
        }

    return Engine(
        family,
        weights,
        _DEEPINFER_WORKERS[family],
        kv_bytes=4 if weights == "f32" else 2,
        arguments=arguments,
        missing=lambda: None,
        python=_own_python,
    )


def _transformers(weights: Weights) -> Engine:
    return Engine(
        "transformers",
        weights,
        "benchmarks.engines.transformers_worker",
        kv_bytes=4 if weights == "f32" else 2,
        arguments=lambda: {"model": str(float_folder()), "dtype": _DTYPES[weights]},
        missing=lambda: None,
        python=_own_python,
    )


def _vllm(weights: Weights) -> Engine:
    def arguments() -> Mapping[str, Any]:
        return {
            "model": str(int8_folder() if weights == "8-bit" else float_folder()),
            "dtype": _DTYPES.get(weights, "bfloat16"),
            "max_model_len": 2048,
            "max_num_seqs": _VLLM_MAX_NUM_SEQS,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": False,
            # Its compiler does not know these kernels: eager is its best setting for them.
            "enforce_eager": weights == "8-bit",
        }

    def missing() -> str | None:
        if find_library(_TCMALLOC) is None:
            return "apt-get install libtcmalloc-minimal4"
        return vllm_missing()

    def environment(num_threads: int) -> Mapping[str, str]:
        return {
            "LD_PRELOAD": f"{find_library(_TCMALLOC)}:{vllm_python().parents[1] / 'lib' / 'libiomp5.so'}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # Its own choice leaves one core idle.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
        }

    return Engine(
        "vllm",
        weights,
        "benchmarks.engines.vllm_worker",
        kv_bytes=4 if weights == "f32" else 2,
        arguments=arguments,
        missing=missing,
        python=vllm_python,
        environment=environment,
    )


def _llama_cpp(family: str, weights: Weights) -> Engine:
    tool, worker = _LLAMA_CPP_TOOLS[family]

    def arguments() -> Mapping[str, Any]:
        return {"tool": str(llama_cpp_tool(tool)), "model": str(_model_of(weights)), "version": LLAMA_CPP_VERSION}

    return Engine(
        family,
        weights,
        worker,
        kv_bytes=2,
        arguments=arguments,
        missing=llama_cpp_missing,
        python=_own_python,
    )


def _model_of(weights: Weights) -> Path:
    return bundled_gguf() if weights == "4-bit" else gguf_file(_GGUF_KINDS[weights])


def _own_python() -> Path:
    return Path(sys.executable)
