"""All engines: what runs in each one's process, with which model and arguments, and what it lacks here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.engines.engine import DTYPES, Engine, Weights
from benchmarks.engines.vllm_settings import tcmalloc_missing, vllm_arguments, vllm_environment
from benchmarks.model_files import bundled_gguf, float_folder, gguf_file
from benchmarks.peers import (
    LLAMA_CPP_VERSION,
    VLLM_VERSION,
    llama_cpp_missing,
    llama_cpp_tool,
    triton_vllm_backend,
    triton_vllm_missing,
    triton_vllm_python,
    vllm_missing,
    vllm_python,
)
from benchmarks.step_cost import ModelShape, gguf_weight_bytes

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
        _triton_vllm(peer_float),
        *(_llama_cpp("llama.cpp", weights) for weights in (peer_float, "8-bit", "4-bit")),
        *(_llama_cpp("llama.cpp-server", weights) for weights in (peer_float, "4-bit")),
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
            "dtype": DTYPES.get(weights, "auto"),
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
        arguments=lambda: {"model": str(float_folder()), "dtype": DTYPES[weights]},
        missing=lambda: None,
        python=_own_python,
    )


def _vllm(weights: Weights) -> Engine:
    return Engine(
        "vllm",
        weights,
        "benchmarks.engines.vllm_worker",
        kv_bytes=4 if weights == "f32" else 2,
        arguments=lambda: vllm_arguments(weights),
        missing=lambda: tcmalloc_missing() or vllm_missing(),
        python=vllm_python,
        environment=lambda num_threads: vllm_environment(vllm_python(), num_threads),
    )


def _triton_vllm(weights: Weights) -> Engine:
    def arguments() -> Mapping[str, Any]:
        places = {"python": str(triton_vllm_python()), "backend": str(triton_vllm_backend())}
        return {**vllm_arguments(weights), **places, "version": VLLM_VERSION}

    return Engine(
        "triton-vllm",
        weights,
        "benchmarks.engines.triton_vllm_worker",
        kv_bytes=4 if weights == "f32" else 2,
        arguments=arguments,
        missing=lambda: tcmalloc_missing() or triton_vllm_missing(),
        python=_own_python,
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
