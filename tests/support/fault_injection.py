"""Runs in a test server's processes, before the package: makes chosen functions fail when the test says so.

Python itself runs it in the engine, as `sitecustomize`; a model.py imports it in the frontend. Stands alone: it is
copied into a folder of its own, see `faults.Faults`. The environment names the functions and a folder; a file in the
folder of a function's name is one fault of it, and what the file says is how it fails.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

TARGETS_VARIABLE = "DEEPINFER_TEST_FAULT_TARGETS"
FOLDER_VARIABLE = "DEEPINFER_TEST_FAULT_FOLDER"
HANG = "hang"


def _take_fault(folder: Path) -> str | None:
    """How to fail now; whoever removes the file has taken the fault."""
    try:
        for name in sorted(os.listdir(folder)):
            action = (folder / name).read_text(encoding="ascii")
            (folder / name).unlink()
            return action
    except FileNotFoundError:
        pass
    return None


def _fail(action: str) -> None:
    while action == HANG:
        time.sleep(1)
    module, _, name = action.rpartition(".")
    raise getattr(importlib.import_module(module or "builtins"), name)("injected")


def _make_faulty(module: ModuleType, path: str, folder: Path) -> None:
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    function = getattr(owner, name)

    @functools.wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        action = _take_fault(folder)
        if action is not None:
            _fail(action)
        return function(*args, **kwargs)

    setattr(owner, name, faulty)


class _FaultyLoader(Loader):
    """Loads a module as its own loader would, then replaces its functions."""

    def __init__(self, loader: Loader, targets: list[str]) -> None:
        self._loader = loader
        self._targets = targets

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for target in self._targets:
            _make_faulty(module, target.partition(":")[2], Path(os.environ[FOLDER_VARIABLE], target))


class _FaultFinder(MetaPathFinder):
    def __init__(self, targets: list[str]) -> None:
        self._targets = targets

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        targets = [each for each in self._targets if each.partition(":")[0] == fullname]
        if not targets:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                assert spec.loader is not None
                spec.loader = _FaultyLoader(spec.loader, targets)
                return spec
        return None


if TARGETS_VARIABLE in os.environ:
    sys.meta_path.insert(0, _FaultFinder(os.environ[TARGETS_VARIABLE].split(",")))
