"""torchvision can be imported, and so transformers' models, whichever torch it was built for."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["torchvision.transforms.v2", "transformers.models.llama.modeling_llama"])
def test_what_imports_torchvision_can_be_imported_after_the_package(module: str) -> None:
    program = f"import deepinfer_backend, {module}, torchvision; print(torchvision.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_alone_imports_neither() -> None:
    program = "import deepinfer_backend, sys; print({'torch', 'torchvision'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
