"""Processes as Linux knows them."""

from __future__ import annotations

from pathlib import Path


def children_of(process_id: int) -> list[int]:
    """Those that are still there."""
    tasks = Path(f"/proc/{process_id}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def command_line(process_id: int) -> bytes:
    """Its arguments, with a zero byte after each; nothing if it has ended."""
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""
