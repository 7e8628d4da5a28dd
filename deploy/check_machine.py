"""Names what this machine lacks for `make serve`, with the command that installs it. Uses only the standard library."""

import ctypes
import importlib.util
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def missing_parts() -> list[tuple[str, str]]:
    """(what is missing, the Debian package that has it)."""
    missing = []
    # venv alone is not enough: Debian takes ensurepip out of it.
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        missing.append(("the Python module venv", f"python{VERSION}-venv"))
    if shutil.which("c++") is None and shutil.which("g++") is None:
        missing.append(("a C++ compiler", "g++"))
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append(("Python's headers (Python.h)", f"python{VERSION}-dev"))
    if not has_libpython():
        missing.append((f"libpython{VERSION}.so.1.0, which Triton's Python backend embeds", f"libpython{VERSION}"))
    return missing


def has_libpython() -> bool:
    name = f"libpython{VERSION}.so.1.0"
    if (Path(str(sysconfig.get_config_var("LIBDIR"))) / name).is_file():
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 — whoever runs this chose the interpreter by hand
        print(f"error: Python 3.11 or newer is needed, this is {platform.python_version()}:", file=sys.stderr)
        print("    apt-get install python3.11, then make PYTHON=python3.11 …", file=sys.stderr)
        return 1
    missing = missing_parts()
    for what, _ in missing:
        print(f"error: {what} is missing", file=sys.stderr)
    if missing:
        print(f"    apt-get install {' '.join(package for _, package in missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
