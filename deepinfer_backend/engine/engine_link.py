"""Where an engine is found by others: a link at a path that they know, to the folder of the engine that is there."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def point_to(link: Path, folder: Path) -> None:
    """Makes `link` lead to `folder`, whatever engine it led to before: that may be draining while this one starts.

    Raises:
        OSError: somebody else's file is there.
    """
    new = link.with_name(f"{link.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    new.replace(link)


def remove_if_it_leads_to(link: Path, folder: Path) -> None:
    with suppress(OSError):
        if link.readlink() == folder:
            link.unlink()


def follow(link: Path) -> Path | None:
    """The folder of the engine that is there now; None if there is none.

    The link's path can be guessed, so somebody else may have made one: only a folder of ours, closed to others, counts.
    """
    try:
        folder = link.resolve(strict=True)
        status = folder.stat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return folder if is_private and status.st_uid == os.geteuid() else None
