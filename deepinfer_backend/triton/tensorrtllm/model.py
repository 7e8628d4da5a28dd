"""The two models of a TensorRT-LLM backend's repository that have an engine behind them, as Triton loads them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from deepinfer_backend.triton.model import TritonPythonModel
from deepinfer_backend.triton.model_config import add_missing_tensors
from deepinfer_backend.triton.tensorrtllm.tensors import TENSORRT_LLM, TENSORRT_LLM_BLS, ModelTensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepinfer_backend.triton.generate_request import WireInterface
    from deepinfer_backend.triton.tensorrtllm.request import ModelOptions

MAX_BATCH_SIZE = 1
"""Where config.pbtxt has none: a request has a batch dimension, and one prompt in it."""


class TensorrtLlmModel(TritonPythonModel):
    """`tensorrt_llm`: token ids in, token ids and text out."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        return complete_batched_config(config, TENSORRT_LLM)

    def wire_interface(self, model_config: Mapping[str, Any]) -> WireInterface:
        from deepinfer_backend.triton.tensorrtllm.request import tensorrt_llm_interface

        return partial(tensorrt_llm_interface, options=_options(model_config))


class TensorrtLlmBlsModel(TritonPythonModel):
    """`tensorrt_llm_bls`: text in, text out."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        return complete_batched_config(config, TENSORRT_LLM_BLS)

    def wire_interface(self, model_config: Mapping[str, Any]) -> WireInterface:
        from deepinfer_backend.triton.tensorrtllm.request import tensorrt_llm_bls_interface

        return partial(tensorrt_llm_bls_interface, options=_options(model_config))


def complete_batched_config(config: Any, tensors: ModelTensors) -> Any:
    """Fills what the config.pbtxt of a model with a batch dimension leaves out; `config` is Triton's ModelConfig.

    A model that is not `decoupled` answers each request with one response, so that clients need no stream.

    Raises:
        ValueError: the file declares a tensor that this model does not have, or with another type.
    """
    given = config.as_dict()
    if given["max_batch_size"] == 0:
        config.set_max_batch_size(MAX_BATCH_SIZE)
    if "model_transaction_policy" not in given:
        config.set_model_transaction_policy({"decoupled": True})
    return add_missing_tensors(config, tensors.inputs, tensors.outputs)


def _options(model_config: Mapping[str, Any]) -> ModelOptions:
    from deepinfer_backend.triton.tensorrtllm.request import ModelOptions

    excluded = model_config.get("parameters", {}).get("exclude_input_in_output", {}).get("string_value", "")
    return ModelOptions(
        is_decoupled=bool(model_config.get("model_transaction_policy", {}).get("decoupled")),
        excludes_input=excluded.strip().lower() in ("1", "true"),
    )
