"""An engine for the benchmark's tests: it loads nothing, and its figures say what it was asked for."""

from __future__ import annotations

import os
import time

from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, Work


class FakePeer:
    def __init__(
        self, num_threads: int, step_s: float = 0.5, fault: str = "", enable_prefix_caching: bool = False
    ) -> None:
        if fault == "load":
            raise ValueError("no such model")
        self.version = f"1.0 on {num_threads}, process {os.getpid()}"
        self._step_s = step_s
        self._fault = fault

    def close(self) -> None:
        pass

    def run(self, work: Work) -> Figures:
        print("libraries print what they like", flush=True)
        match self._fault if len(work.prompts) > 1 else "":
            case "run":
                raise RuntimeError("too long")
            case "death":
                os._exit(3)
            case "silence":
                time.sleep(600)
        num_tokens = len(work.prompts) * work.max_tokens
        return Figures(
            num_output_tokens=num_tokens,
            elapsed_s=num_tokens * self._step_s / work.concurrency,
            first_token_s=[float(prompt[0]) for prompt in work.prompts],
            step_s=self._step_s,
        )


if __name__ == "__main__":
    serve(FakePeer)
