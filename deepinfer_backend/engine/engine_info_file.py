"""What is known of a ready engine, as a file in its folder: for those who need its tokenizer, not its tokens."""

from __future__ import annotations

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
    """None while the engine there is not ready."""
    try:
        return msgspec.msgpack.decode((folder / _FILE_NAME).read_bytes(), type=EngineInfo)
    except FileNotFoundError:
        return None
