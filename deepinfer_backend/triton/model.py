"""TritonPythonModel: what Triton's Python backend calls."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_backend.triton.frontend_registry import FrontendEntry, register_frontend, report_failed_start
from deepinfer_backend.triton.model_config import check_instances, complete_config, place_instance
from deepinfer_backend.triton.stub_exit import exit_quickly
from deepinfer_backend.triton.stub_logging import set_up_logging

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepinfer_backend.triton.frontend import Frontend
    from deepinfer_backend.triton.generate_request import WireInterface

logger = logging.getLogger(__name__)


class TritonPythonModel:
    """One loaded model. Triton calls every method from the stub's main thread, `is_model_ready` perhaps from another.

    The imports are inside: Triton calls `auto_complete_config` in an interpreter of its own that it throws away.
    """

    _frontend: Frontend
    _entry: FrontendEntry | None

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        return complete_config(config)

    def wire_interface(self, model_config: Mapping[str, Any]) -> WireInterface:
        """What this model's clients speak; `model_config`: the config.pbtxt as Triton read it."""
        from deepinfer_backend.triton.request import native_interface

        return native_interface

    def initialize(self, args: dict[str, str]) -> None:
        """Blocks until the engine is ready; raises with the engine's own message if it cannot start."""
        set_up_logging(args["model_name"])
        try:
            self._frontend = self._start(args)
        except Exception as error:
            report_failed_start(args["model_name"], error)
            raise
        self._entry = register_frontend(args["model_name"])

    def _start(self, args: Mapping[str, str]) -> Frontend:
        from deepinfer_backend.triton.start import start_frontend
        from deepinfer_backend.triton.vllm_arguments import load_engine_arguments

        model_config = json.loads(args["model_config"])
        check_instances(model_config)
        arguments = load_engine_arguments(Path(args["model_repository"], args["model_version"]))
        kind, device_id = place_instance(model_config, args["model_instance_kind"], args["model_instance_device_id"])
        return start_frontend(
            arguments,
            model_name=args["model_name"],
            model_version=args["model_version"],
            instance_kind=kind,
            device_id=device_id,
            interface=self.wire_interface(model_config),
        )

    def execute(self, requests: list[Any]) -> None:
        self._frontend.accept(requests)

    def is_model_ready(self) -> bool:
        """Asked by newer Tritons for the model's readiness; 2.51 does not."""
        return self._frontend.is_available()

    def finalize(self) -> None:
        try:
            self._frontend.close()
        finally:
            if self._entry is not None:
                self._entry.remove()
        logger.info("closed")
        exit_quickly()
