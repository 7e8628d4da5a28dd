"""Progress of long work: a bar where a person watches, a line at begin and end in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

# Called with the share that is done, 0 to 1. It may go back; the bar then does too.
Advance = Callable[[float], None]


@contextmanager
def show_progress(what: str) -> Iterator[Advance]:
    """Shows `what` ("Converting x.gguf") while the block runs; nothing is shown of its end when it raises."""
    if not sys.stderr.isatty():
        logger.info("%s …", what)
        start = time.monotonic()
        yield lambda _: None
        logger.info("%s: done in %.1f s", what, time.monotonic() - start)
        return

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)  # moves to and fro until something is known
        yield lambda share: bar.update(task, total=1.0, completed=share)
        bar.update(task, total=1.0, completed=1.0)
