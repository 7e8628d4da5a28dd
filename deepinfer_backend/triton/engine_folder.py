"""Where the engine of a model is found by the other models of the same server."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

ENGINE_OF = "engine_of"
"""The one key of a model.json whose model shares the engine of another one, which it names."""


def engine_folder(model_name: str, rank: int) -> Path:
    """Leads to the folder of a rank of a model's engines that is ready, and of what is known of it: see `engine_link`.

    To be asked in a process that Triton started.
    """
    digest = hashlib.sha256(model_name.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"deepinfer-engine-{os.getppid()}-{digest}-{rank}"
