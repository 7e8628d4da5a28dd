"""llama.cpp's own llama-batched-bench: prefill of all streams, then decode of all streams; no server around it.

It takes lengths instead of prompts, and one context for all it does: so each run is a process of its own. The time in
which that loads the model does not count.
"""

from __future__ import annotations

import json
import subprocess

from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, Work

_BLOCK = 256  # llama.cpp rounds each sequence's share of the context up to this


class LlamaCppBenchRunner:
    def __init__(self, num_threads: int, tool: str, model: str, version: str) -> None:
        self.version = version
        self._command = [tool, "-m", model, "-t", str(num_threads), "-tb", str(num_threads)]
        self._command += ["-b", "4096", "-ub", "512", "--output-format", "jsonl"]

    def close(self) -> None:
        pass

    def run(self, work: Work) -> Figures:
        """Batches of `concurrency` prompts of one length; the first batch stands for all."""
        streams = work.concurrency
        prompt_len = len(work.prompts[0])
        context = streams * -(-(prompt_len + work.max_tokens) // _BLOCK) * _BLOCK
        sizes = ["-c", str(context), "-npp", str(prompt_len), "-ntg", str(work.max_tokens), "-npl", str(streams)]
        done = subprocess.run([*self._command, *sizes], capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-500:]}")
        times = json.loads(lines[0])
        return Figures(
            num_output_tokens=streams * work.max_tokens,
            elapsed_s=times["t_pp"] + times["t_tg"],
            first_token_s=[times["t_pp"]] * streams,
            step_s=times["t_tg"] / work.max_tokens,
        )


if __name__ == "__main__":
    serve(LlamaCppBenchRunner)
