"""What `preprocessing` and `postprocessing` have in common: a tokenizer, and one response for each request."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from deepinfer_backend.errors import ConfigError, DeepInferError, EngineError, shown
from deepinfer_backend.triton.frontend_registry import FrontendEntry, register_frontend
from deepinfer_backend.triton.stub_exit import exit_quickly
from deepinfer_backend.triton.stub_logging import set_up_logging

if TYPE_CHECKING:
    from deepinfer_backend.triton.tensorrtllm.shared_tokenizer import TokenizerSource

logger = logging.getLogger(__name__)

_TRUE = ("true", "t", "1", "yes", "y")
_FALSE = ("false", "f", "0", "no", "n")


class TokenizerModel(ABC):
    """A model that Triton calls with a list of requests and that returns as many responses.

    It does not wait for the engine whose tokenizer it uses: Triton loads a few models at a time, and those that wait
    could keep that one from being loaded.
    """

    _tokenizer: TokenizerSource
    _entry: FrontendEntry | None

    def initialize(self, args: dict[str, str]) -> None:
        """Raises DeepInferError: a parameter of config.pbtxt or model.json is wrong."""
        set_up_logging(args["model_name"])
        # Triton imports this module in a second interpreter as well, to throw it away: what takes long comes here.
        from deepinfer_backend.triton.model_config import read_json_object
        from deepinfer_backend.triton.shutdown_signal import end_with_server
        from deepinfer_backend.triton.tensorrtllm.shared_tokenizer import find_tokenizer

        end_with_server()
        parameters = read_parameters(json.loads(args["model_config"]))
        self.configure(parameters)
        model_json = Path(args["model_repository"], args["model_version"], "model.json")
        arguments = read_json_object(model_json) if model_json.exists() else {}
        self._tokenizer = find_tokenizer(parameters.get("tokenizer_dir", ""), arguments)
        self._entry = register_frontend(args["model_name"])

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        self._tokenizer.close()
        if self._entry is not None:
            self._entry.remove()
        exit_quickly()

    @abstractmethod
    def configure(self, parameters: Mapping[str, str]) -> None:
        """Reads those of config.pbtxt that are not common to both models; raises ConfigError."""

    @abstractmethod
    def build_tensors(self, tensors: Mapping[str, Any]) -> list[Any]:
        """The response's tensors for a request's arrays, by name; raises InvalidRequestError."""

    def _answer(self, request: Any) -> Any:
        try:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            return pb_utils.InferenceResponse(self.build_tensors(tensors))
        except DeepInferError as error:
            return _failed(error)
        except Exception:
            logger.exception("a request failed")
            return _failed(EngineError("the request failed; the server's log says why"))


def read_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """Those of config.pbtxt that say something: a template's `${name}` that nobody filled in does not."""
    values = {name: str(each["string_value"]).strip() for name, each in model_config.get("parameters", {}).items()}
    return {name: value for name, value in values.items() if value and not value.startswith("${")}


def read_bool(parameters: Mapping[str, str], name: str, default: bool) -> bool:
    """Raises ConfigError: the parameter is there and is no truth value."""
    value = parameters.get(name)
    if value is None:
        return default
    if value.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"config.pbtxt: {name} is {shown(value)}: must be true or false")
    return value.lower() in _TRUE


def _failed(error: DeepInferError) -> Any:
    code = getattr(pb_utils.TritonError, error.word, pb_utils.TritonError.INTERNAL)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
