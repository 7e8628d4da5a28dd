"""Writes the five models that a repository of Triton's TensorRT-LLM backend has, for one engine of ours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from deepinfer_backend.triton.engine_folder import ENGINE_OF
from deepinfer_backend.triton.model_config import TensorSpec
from deepinfer_backend.triton.tensorrtllm.tensors import (
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    TENSORRT_LLM_BLS,
    ModelTensors,
)

MODEL_NAMES = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")

# What a client's own ensemble of these models may have at most. A request to one that generates has one row.
_MAX_BATCH_SIZE = 256

_GENERATES = """\
model_transaction_policy { decoupled: true }
instance_group [ { kind: KIND_MODEL count: 1 } ]
"""
# In order: the pieces of a stream come back from a model as they went in.
_TOKENIZES = """\
dynamic_batching { preserve_ordering: true }
instance_group [ { kind: KIND_CPU count: 1 } ]
"""

# Input of `preprocessing` → input of `ensemble`.
_PREPROCESSING_INPUTS = {
    "QUERY": "text_input",
    "DECODER_QUERY": "decoder_text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
# Input of `tensorrt_llm` → output of `preprocessing`.
_BETWEEN = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
}
# Input of `tensorrt_llm` → input of `ensemble` under another name.
_RENAMED = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "streaming": "stream",
}


def write_tensorrtllm_models(folder: Path, engine_of: str) -> None:
    """Adds a folder for each to the model repository `folder`; `engine_of`: the model whose engine they use."""
    for name, config in _configs().items():
        version_folder = folder / name / "1"
        version_folder.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config, encoding="utf-8")
        if name in _CLASSES:
            (version_folder / "model.py").write_text(_model_py(*_CLASSES[name]), encoding="utf-8")
            (version_folder / "model.json").write_text(json.dumps({ENGINE_OF: engine_of}) + "\n", encoding="utf-8")
        else:
            # Triton wants a version's folder of an ensemble as well, and git does not keep an empty one.
            (version_folder / ".gitkeep").touch()


# Where the class is that Triton loads; the ensemble is Triton's own.
_CLASSES = {
    "preprocessing": ("preprocessing", "TritonPythonModel"),
    "tensorrt_llm": ("model", "TensorrtLlmModel"),
    "postprocessing": ("postprocessing", "TritonPythonModel"),
    "tensorrt_llm_bls": ("model", "TensorrtLlmBlsModel"),
}


def _model_py(module: str, class_name: str) -> str:
    name = class_name if class_name == "TritonPythonModel" else f"{class_name} as TritonPythonModel"
    return f'''\
"""What Triton loads; the code is in the package."""

from deepinfer_backend.triton.tensorrtllm.{module} import {name}

__all__ = ["TritonPythonModel"]
'''


def _configs() -> dict[str, str]:
    """config.pbtxt of each model, by its name."""
    return {
        "preprocessing": _config(
            "preprocessing", PREPROCESSING, _TOKENIZES + _parameters(tokenizer_dir="", add_special_tokens="true")
        ),
        "tensorrt_llm": _config("tensorrt_llm", TENSORRT_LLM, _GENERATES),
        "postprocessing": _config(
            "postprocessing", POSTPROCESSING, _TOKENIZES + _parameters(tokenizer_dir="", skip_special_tokens="true")
        ),
        "ensemble": _config("ensemble", ENSEMBLE, _ensemble_steps(), kind='platform: "ensemble"'),
        "tensorrt_llm_bls": _config("tensorrt_llm_bls", TENSORRT_LLM_BLS, _GENERATES),
    }


def _config(name: str, tensors: ModelTensors, rest: str, kind: str = 'backend: "python"') -> str:
    return f"""\
name: "{name}"
{kind}
max_batch_size: {_MAX_BATCH_SIZE}
input [
{_tensors(tensors.inputs)}
]
output [
{_tensors(tensors.outputs, are_inputs=False)}
]
{rest}"""


def _tensors(specs: Iterable[TensorSpec], *, are_inputs: bool = True) -> str:
    lines = []
    for spec in specs:
        optional = " optional: true" if are_inputs and spec.is_optional else ""
        dims = ", ".join(map(str, spec.dims))
        lines.append(f'  {{ name: "{spec.name}" data_type: {spec.data_type} dims: [ {dims} ]{optional} }}')
    return ",\n".join(lines)


def _parameters(**values: str) -> str:
    return "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n' for name, value in values.items()
    )


def _ensemble_steps() -> str:
    used = {*_PREPROCESSING_INPUTS.values(), *_RENAMED.values()}
    same_name = {spec.name: spec.name for spec in ENSEMBLE.inputs if spec.name not in used}
    between = {output: f"_{output}" for output in _BETWEEN.values()}
    generation_inputs = {name: between[output] for name, output in _BETWEEN.items()} | _RENAMED | same_name
    outputs = {spec.name: spec.name for spec in ENSEMBLE.outputs}
    steps = ",\n".join(
        [
            _step("preprocessing", _PREPROCESSING_INPUTS, between),
            _step("tensorrt_llm", generation_inputs, outputs),
        ]
    )
    return f"""\
ensemble_scheduling {{
  step [
{steps}
  ]
}}
"""


def _step(model_name: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    lines = [f'      model_name: "{model_name}"', "      model_version: -1"]
    for kind, tensors in (("input_map", inputs), ("output_map", outputs)):
        lines += [f'      {kind} {{ key: "{name}" value: "{tensor}" }}' for name, tensor in tensors.items()]
    return "\n".join(["    {", *lines, "    }"])
