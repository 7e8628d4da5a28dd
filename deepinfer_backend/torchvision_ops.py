"""Makes torchvision importable beside a torch without CUDA: transformers imports it wherever it is installed.

The wheel on PyPI has its operators for CUDA's torch alone, and torchvision's import fails where it describes two that
are not there. Nothing here calls them; the transforms, which are called, need no operator.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_WHERE_THEY_ARE_DESCRIBED = "torchvision._meta_registrations"
_DESCRIBED = [f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")]
_declared: list[object] = []  # as long as the process


class _DeclaresMissingOperators(MetaPathFinder):
    """Finds nothing, but is asked just before torchvision describes its operators."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _WHERE_THEY_ARE_DESCRIBED:
            sys.meta_path.remove(self)
            _declare_missing_operators()
        return None


def _declare_missing_operators() -> None:
    from torch.library import Library
    from torchvision.extension import _has_ops

    if not _has_ops():
        library = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for operator in _DESCRIBED:
            library.define(operator)  # type: ignore[no-untyped-call]
        _declared.append(library)


def make_torchvision_importable() -> None:
    """To be called before anything imports torchvision; imports nothing itself."""
    sys.meta_path.insert(0, _DeclaresMissingOperators())
