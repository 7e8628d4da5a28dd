"""Which frontends of a server run, or why not: how the launcher learns that one has died, which Triton tells nobody.

With Triton 2.51 a stub that dies takes its clients with it: their streams hang, the model stays "ready", and nothing
is started again. So each frontend holds a file locked for as long as its process lives, and removes it when it ends
as it should. A file that nobody holds belongs to one that has crashed; no id of a process can be mistaken for another.
One that cannot start says why in a file of all: in Triton's log it stands far above the last line.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

FRONTENDS_FOLDER_VARIABLE = "DEEPINFER_FRONTENDS_FOLDER"


_FAILED_STARTS = "failed_starts"


class FrontendEntry:
    """The entry of this process in the launcher's folder, from construction to `remove`."""

    def __init__(self, folder: Path, model_name: str) -> None:
        self._path = folder / str(os.getpid())
        unlocked = folder / f".{os.getpid()}"  # seen by nobody until it is locked
        self._file = unlocked.open("w", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(model_name)
        self._file.flush()
        unlocked.rename(self._path)

    def remove(self) -> None:
        # In this order there is no moment at which the entry looks like a dead one's.
        self._path.unlink(missing_ok=True)
        self._file.close()


class DeadFrontend(NamedTuple):
    """One that ended without removing its entry."""

    model_name: str
    pid: int


def register_frontend(model_name: str) -> FrontendEntry | None:
    """To be called once by a model's process, when it serves; None for a server that is not our launcher's."""
    folder = os.environ.get(FRONTENDS_FOLDER_VARIABLE)
    return FrontendEntry(Path(folder), model_name) if folder else None


def report_failed_start(model_name: str, error: Exception) -> None:
    """To be called by a model's process that cannot serve."""
    if folder := os.environ.get(FRONTENDS_FOLDER_VARIABLE):
        with Path(folder, _FAILED_STARTS).open("a", encoding="utf-8") as file:
            file.write(f"model {model_name}: {error}".replace("\n", " ") + "\n")


def read_failed_starts(folder: Path) -> list[str]:
    """Which models could not start, each with the reason."""
    try:
        return (folder / _FAILED_STARTS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def find_dead_frontends(folder: Path) -> list[DeadFrontend]:
    dead = []
    for path in folder.glob("[0-9]*"):
        try:
            with path.open(encoding="utf-8") as entry:
                fcntl.flock(entry, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if path.exists():  # else it was removed meanwhile
                    dead.append(DeadFrontend(entry.read(), int(path.name)))
        except (FileNotFoundError, BlockingIOError):
            continue
    return dead
