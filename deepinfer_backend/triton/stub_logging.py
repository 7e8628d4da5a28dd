"""Where the log of a model's process goes: the stub's standard error, which is the server's log."""

from __future__ import annotations

import io
import logging
import os
import sys


def set_up_logging(model_name: str) -> None:
    """The stub's own streams are ASCII."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{model_name}] %(name)s: %(message)s"))
    package_logger = logging.getLogger("deepinfer_backend")
    package_logger.handlers = [handler]
    package_logger.setLevel(os.environ.get("DEEPINFER_LOG_LEVEL", "INFO").upper())
    package_logger.propagate = False
