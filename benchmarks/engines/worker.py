"""What stands in each engine's process: one model, loaded once; then one run for each line of standard input.

A line in is a Work as JSON, a line out its Figures, or {"error": …}; the first line out is {"version": …}, when the
model is loaded. What libraries print goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.workload import Figures, Work


class Runner(Protocol):
    version: str

    def run(self, work: Work) -> Figures: ...

    def close(self) -> None: ...


def serve(load: Callable[..., Runner]) -> None:
    """Until standard input ends; load's keyword arguments come as JSON in the first argument of the command line."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(fields: dict[str, Any]) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        runner = load(**json.loads(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()
        answer({"error": _described(error)})
        return
    try:
        answer({"version": runner.version})
        for line in sys.stdin:
            try:
                answer(dataclasses.asdict(runner.run(Work(**json.loads(line)))))
            except Exception as error:
                traceback.print_exc()
                answer({"error": _described(error)})
    finally:
        runner.close()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
