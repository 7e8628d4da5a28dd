"""What is known of a ready engine, as a file in its folder: for those who need its tokenizer, not its tokens."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from deepinfer_backend.engine.messages import EngineInfo

_FILE_NAME = "info"


def write_engine_info(folder: Path, info: EngineInfo) -> None:
    """All at once: nobody reads half of it. It goes when its folder does."""
    unfinished = folder / f".{_FILE_NAME}"
    unfinished.write_bytes(msgspec.msgpack.encode(info))
    unfinished.rename(folder / _FILE_NAME)


def read_engine_info(folder: Path) -> EngineInfo | None:
    """None while no engine there is ready. Its place can be guessed: what another user put there is not read."""
    try:
        with (folder / _FILE_NAME).open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            return msgspec.msgpack.decode(file.read(), type=EngineInfo)
    except FileNotFoundError:
        return None
