"""Faults in the processes of a running server, at the moment that a test chooses."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.support import fault_injection
from tests.support.fault_injection import FOLDER_VARIABLE, TARGETS_VARIABLE


class Faults:
    """Makes functions of the package fail in the engines of a server that starts with `environment`.

    And in the frontends of models with `model_py`.
    """

    def __init__(self, folder: Path, targets: Sequence[str]) -> None:
        """`targets`: "module:function" or "module:Class.function", each."""
        self._targets = tuple(targets)
        self._folder = folder / "faults"
        for target in targets:
            (self._folder / target).mkdir(parents=True)
        code = folder / "sitecustomize"
        code.mkdir()
        shutil.copy(fault_injection.__file__, code / "sitecustomize.py")
        self.model_py = (
            f"import sys\nsys.path.insert(0, {str(code)!r})\nimport sitecustomize\n"
            "from deepinfer_backend.triton.model import TritonPythonModel\n"
        )
        self.environment = {
            "PYTHONPATH": str(code),
            TARGETS_VARIABLE: ",".join(targets),
            FOLDER_VARIABLE: str(self._folder),
        }

    def arm(self, target: str, action: str, count: int = 1) -> None:
        """The next `count` calls fail: `action` is an exception's name ("torch.OutOfMemoryError") or HANG."""
        assert target in self._targets
        for number in range(count):
            # Written elsewhere first: whoever sees it may take it.
            new = self._folder / "new"
            new.write_text(action, encoding="ascii")
            new.rename(self._folder / target / str(number))

    def num_armed(self, target: str) -> int:
        """How many have not happened yet."""
        return len(list((self._folder / target).iterdir()))

    def disarm(self) -> None:
        for target in self._targets:
            for fault in (self._folder / target).iterdir():
                fault.unlink(missing_ok=True)
