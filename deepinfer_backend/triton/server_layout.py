"""Where tritonserver and its Python backend are: in NVIDIA's wheel, or installed on the machine (its container).

Everything that depends on the wheel's layout is here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_backend.errors import ConfigError
from deepinfer_backend.triton.model_config import MODEL_PY

WHEEL_PACKAGE = "pytriton"
WHEEL_LIBRARIES = "nvidia_pytriton.libs"  # beside WHEEL_PACKAGE
WHEEL_INSTALL = "pip install nvidia-pytriton==0.7.0 setuptools"
BACKEND_NAME = "deepinfer"
CONTAINER_SERVER = Path("/opt/tritonserver/bin/tritonserver")

_PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """How to start one tritonserver: the program, options that its place needs, variables of its environment."""

    executable: Path
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def find_server(work_folder: Path) -> ServerLayout:
    """The wheel's server where the wheel is installed, else the machine's own.

    `work_folder` gets the backends that the wheel's server loads and must outlive the server.

    Raises:
        ConfigError: names what is missing, and the command that installs it.
    """
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        wheel_folder = Path(spec.submodule_search_locations[0]) / "tritonserver"
        if wheel_folder.is_dir():
            return _wheel_layout(wheel_folder, work_folder)
    found = shutil.which("tritonserver")
    executable = Path(found) if found else CONTAINER_SERVER
    if not executable.is_file():
        raise ConfigError(f"there is no tritonserver here: {WHEEL_INSTALL}")
    return ServerLayout(executable)


def _wheel_layout(wheel_folder: Path, work_folder: Path) -> ServerLayout:
    executable = wheel_folder / "bin" / "tritonserver"
    stub = wheel_folder / "python_backend_stubs" / _PYTHON_VERSION / "triton_python_backend_stub"
    if not stub.is_file():
        raise ConfigError(f"the nvidia-pytriton wheel has no stub for Python {_PYTHON_VERSION}: use Python 3.11")
    backends = _write_backends(wheel_folder, stub, work_folder)
    return ServerLayout(
        executable,
        options=[f"--backend-directory={backends}"],
        environment={
            "LD_LIBRARY_PATH": _search_path(_libpython_folder(), "LD_LIBRARY_PATH"),
            # The stub takes the first python3 in PATH as its own.
            "PATH": _search_path(Path(sys.prefix) / "bin", "PATH"),
        },
    )


def _write_backends(wheel_folder: Path, stub: Path, work_folder: Path) -> Path:
    """The folder of the backends `python` and `deepinfer`, of which the second is a model.py for the first to run.

    Triton refuses to run it by a library that is a link out of this folder, so that one is a copy, at its depth in the
    wheel: libraries find each other relative to their place. The stub has to stay at its own, and is linked.
    """
    backends = work_folder / wheel_folder.parent.name / wheel_folder.name / "backends"
    python, deepinfer = backends / "python", backends / BACKEND_NAME
    for folder in (python, deepinfer):
        folder.mkdir(parents=True)
    (work_folder / WHEEL_LIBRARIES).symlink_to(wheel_folder.parents[1] / WHEEL_LIBRARIES)
    for path in (wheel_folder / "backends" / "python").iterdir():
        if path.is_file():
            shutil.copyfile(path, python / path.name)
    (python / stub.name).symlink_to(stub)
    (deepinfer / "model.py").write_text(MODEL_PY, encoding="utf-8")
    return backends


def _libpython_folder() -> Path:
    """The folder of the shared library of the running interpreter's version, which the stub embeds."""
    name = f"libpython{_PYTHON_VERSION}.so.1.0"
    candidates = [
        Path(str(sysconfig.get_config_var("LIBDIR"))),
        Path(sys.base_prefix) / "lib",
        Path("/usr/lib") / str(sysconfig.get_config_var("MULTIARCH")),
    ]
    for folder in candidates:
        if (folder / name).is_file():
            return folder
    raise ConfigError(
        f"{name} is missing, which Triton's Python backend needs: apt-get install libpython{_PYTHON_VERSION}"
    )


def _search_path(first: Path, variable: str) -> str:
    return os.pathsep.join(filter(None, [str(first), os.environ.get(variable)]))
