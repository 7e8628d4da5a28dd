"""`make bench-speculation`: decode tokens/s with speculation ÷ without, for texts that repeat themselves and others.

Two engines, one of which speculates, take turns at the same greedy requests, and the median of the ratios counts. Where
llama.cpp is installed (`make peers PEERS=llama.cpp`) two of its servers, one with its own n-grams, take part with the
same weights in the requests that come alone.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engines.llama_cpp_server_worker import LlamaCppServerRunner
from benchmarks.model_files import bundled_gguf, gguf_file
from benchmarks.peers import LLAMA_CPP_VERSION, llama_cpp_missing, llama_cpp_tool
from benchmarks.workload import Work, median_ratio
from deepinfer_backend import SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import InprocEngineClient
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.models.loader import load_tokenizer, resolve_model
from deepinfer_backend.speculative_config import SpeculativeConfig

_NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 8}'
_LLAMA_CPP_NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")
_MAX_TOKENS = 256
_REPORT = """The harbour of Lindesund was closed for eleven days in March after the ferry Hanna struck the northern
breakwater. No passenger was hurt, but four lorries slid against the bow door and the door could not be opened. The
port authority let divers look at the hull on the second day. They found a crack of two metres below the water line, and
the authority decided that the ferry must not move before it was welded. The welders came from Trondheim on the fifth
day and needed three more. In the meantime the islanders were supplied by two fishing boats, which the municipality
hired for nine thousand kroner a day. The ferry company says that the captain followed the pilot's orders. The pilots'
association says that the radar beacon on the breakwater had not worked since January, and that the port authority was
told so in writing. The port authority has not answered yet. A board of inquiry will hear all three in June."""
_CODE = """def ferry_delays(departures, arrivals, scheduled_minutes):
    delays = []
    for departure, arrival in zip(departures, arrivals):
        minutes = (arrival - departure).total_seconds() / 60
        delay = minutes - scheduled_minutes
        if delay > 0:
            delays.append(delay)
    if not delays:
        return 0.0, 0.0
    average = sum(delays) / len(delays)
    longest = max(delays)
    return average, longest


def print_delays(name, departures, arrivals, scheduled_minutes):
    average, longest = ferry_delays(departures, arrivals, scheduled_minutes)
    print(f"{name}: {average:.1f} minutes late on average, {longest:.1f} at most")"""


@dataclass(frozen=True, slots=True)
class Run:
    """Decoding alone: from when every request has its first token."""

    tokens_per_s: float
    tokens_a_step: float


def workloads() -> dict[str, list[str]]:
    """What users write, by kind; each list is sent at once."""
    edits = [
        f"Repeat this Python code, but rename `{name}` to `{name}_value`:\n\n```python\n{_CODE}\n```"
        for name in ("average", "longest", "delays", "minutes", "departures", "arrivals", "name", "scheduled_minutes")
    ]
    topics = ("volcanoes", "sourdough bread", "the moons of Jupiter", "chess openings", "a bicycle's gears")
    questions = [
        f"{how} {topic}?"
        for topic in topics
        for how in ("What should a child know about", "How would you explain", "What is surprising about", "Why study")
    ]
    summaries = [
        f"Summarize this report for {reader}, sentence by sentence:\n\n{_REPORT}"
        for reader in ("the islanders", "the mayor", "a sailor", "the ferry company")
    ]
    return {
        "a summary": summaries[:1],
        "an edit of code": edits[:1],
        "free chat": questions[:1],
        "20 streams, free chat": questions,
        "32 streams, all of these": [*summaries, *edits, *questions],
    }


def decode(client: InprocEngineClient, prompts: list[list[int]]) -> Run:
    sampling = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    for index, prompt in enumerate(prompts):
        client.add_request(EngineRequest(str(index), np.array(prompt, dtype=np.int32), sampling))
    waiting, num_running, num_tokens, num_steps = set(range(len(prompts))), len(prompts), 0, 0
    began_s = time.perf_counter()
    while num_running:
        round_outputs = client.get_outputs(timeout_s=0.0)
        assert round_outputs is not None
        was_decoding = not waiting
        for output in round_outputs.outputs:
            waiting.discard(int(output.request_id))
            num_running -= output.finished
        if was_decoding:
            num_tokens += len(round_outputs.outputs)
            num_steps += len({output.request_id for output in round_outputs.outputs})
        elif not waiting:
            began_s = time.perf_counter()
    elapsed_s = time.perf_counter() - began_s
    client.get_outputs(timeout_s=0.0)
    return Run(num_tokens / elapsed_s, num_tokens / num_steps)


class LlamaCpp:
    """Its server, one request at a time."""

    def __init__(self, model: Path, *options: str) -> None:
        self._runner = LlamaCppServerRunner(
            torch.get_num_threads(),
            tool=str(llama_cpp_tool("llama-server")),
            model=str(model),
            version=LLAMA_CPP_VERSION,
            options=options,
        )

    def decode(self, prompt: list[int]) -> float:
        """Tokens/s from the first token on."""
        figures = self._runner.run(Work([prompt], concurrency=1, max_tokens=_MAX_TOKENS, ignore_eos=False))
        return (figures.num_output_tokens - 1) / (figures.elapsed_s - figures.median_first_token_s)

    def close(self) -> None:
        self._runner.close()


def main(
    num_runs: Annotated[int, typer.Option(min=1, help="Runs of each; medians count.")] = 5,
    speculative_config: Annotated[str, typer.Option(help="As in model.json.")] = _NGRAM,
    in_float32: Annotated[bool, typer.Option("--float32", help="The bundled model's weights as float32.")] = False,
) -> None:
    path = resolve_model(None)
    tokenizer: Any = load_tokenizer(path)
    speculation = SpeculativeConfig.model_validate_json(speculative_config)
    plain, speculating = (
        InprocEngineClient(
            EngineConfig(
                model=str(path),
                dtype="float32" if in_float32 else "auto",
                enable_prefix_caching=False,
                speculative_config=config,
            )
        )
        for config in (None, speculation)
    )
    peers = []
    if llama_cpp_missing() is None:
        gguf = gguf_file("F32") if in_float32 else bundled_gguf()
        peers = [LlamaCpp(gguf), LlamaCpp(gguf, *_LLAMA_CPP_NGRAM)]
    num_drafts = speculation.num_speculative_tokens
    table = Table(title=f"{speculation.method}, at most {num_drafts} drafts; median of {num_runs}")
    table.add_column("tokens/s")
    for heading in ("without", "with drafts", "with ÷ without", "tokens a step", "llama.cpp", "with its n-grams"):
        table.add_column(heading, justify="right")
    for name, texts in workloads().items():
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]
        decode(speculating, prompts)
        asked_peers = peers if len(prompts) == 1 else []
        runs, peer_runs = [], []
        for _ in range(num_runs):
            runs.append((decode(plain, prompts), decode(speculating, prompts)))
            peer_runs.append([peer.decode(prompts[0]) for peer in asked_peers])
        without, with_drafts = ([run.tokens_per_s for run in column] for column in zip(*runs, strict=True))
        table.add_row(
            name,
            f"{statistics.median(without):.0f}",
            f"{statistics.median(with_drafts):.0f}",
            f"{median_ratio(with_drafts, without):.2f}",
            f"{statistics.median(run.tokens_a_step for _, run in runs):.2f}",
            *(f"{statistics.median(column):.0f}" for column in zip(*peer_runs, strict=True)),
        )
    for client in (plain, speculating):
        client.close()
    for peer in peers:
        peer.close()
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
