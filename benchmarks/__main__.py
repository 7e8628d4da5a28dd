"""`make bench`: output tokens/s and time to first token, offline and through Triton, in one run.

Both run in turn, so that a slow minute of the machine hits both; of each, the median run counts.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import through_triton
from benchmarks.offline import OfflineEngine
from benchmarks.workload import MAX_TOKENS, NUM_PROMPTS, PROMPT_LEN, Figures, median_run, prompts
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.models.loader import resolve_model
from tests.support.triton_server import running_server

_PROMPTS_PER_STREAM = 2


def main(
    num_runs: Annotated[int, typer.Option(help="Runs of each kind; the median counts.")] = 3,
    concurrency: Annotated[list[int] | None, typer.Option(help="Concurrent requests; repeat for several.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of weights and KV cache.")] = "auto",
) -> None:
    engine_args = {"model": str(resolve_model(None)), "dtype": dtype, "enable_prefix_caching": False}
    table = Table(title=f"{PROMPT_LEN} tokens in, {MAX_TOKENS} out, greedy; median of {num_runs}; {_machine()}")
    for heading in (
        "concurrent\nrequests",
        "offline\ntokens/s",
        "Triton\ntokens/s",
        "Triton ÷\noffline",
        "first token\noffline, ms",
        "first token\nTriton, ms",
        "device idle\noffline",
    ):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), {"deepinfer": engine_args}) as server:
        url = f"localhost:{server.grpc_port}"
        offline = OfflineEngine(EngineConfig(**engine_args))
        for streams in concurrency or [1, 8, 32, 64]:
            work = prompts(offline.vocab_size, max(streams, min(NUM_PROMPTS, streams * _PROMPTS_PER_STREAM)))
            runs: tuple[list[Figures], list[Figures]] = ([], [])
            offline.run(work[:streams], streams)
            for _ in range(num_runs):
                runs[0].append(offline.run(work, streams))
                runs[1].append(through_triton.run(url, work, streams))
            ours, served = map(median_run, runs)
            table.add_row(
                str(streams),
                f"{ours.tokens_per_s:.0f}",
                f"{served.tokens_per_s:.0f}",
                f"{served.tokens_per_s / ours.tokens_per_s:.2f}",
                f"{ours.median_first_token_ms:.0f}",
                f"{served.median_first_token_ms:.0f}",
                f"{ours.device_idle_share:.1%}",
            )
        offline.close()
    Console().print(table)


def _machine() -> str:
    return f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    typer.run(main)
