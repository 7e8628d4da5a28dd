"""`make bench-ranks`: what it costs a decode step that several processes make it together, and a hand-over.

A random Llama of the bundled model's size whose heads two ranks can share. All layouts take turns at the same greedy
requests, and medians count.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from deepinfer_backend import SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.engine.parallel_engines import ParallelEngineClient

_VOCAB_SIZE = 49_152
_PROMPT_LEN, _MAX_TOKENS = 32, 96
_HANDED_OVER_LEN = 2_000


@dataclass(frozen=True, slots=True)
class Layout:
    """threads: of each process; baseline: the layout without what is to be measured."""

    name: str
    threads: int
    engine_args: dict[str, Any]
    baseline: str | None = None

    @property
    def num_engines(self) -> int:
        return int(self.engine_args.get("data_parallel_size", 1))


LAYOUTS = (
    Layout("two engines", 1, {"data_parallel_size": 2}),
    Layout("two in lockstep", 1, {"data_parallel_size": 2, "data_parallel_lockstep": True}, "two engines"),
    Layout("one engine", 2, {}),
    Layout("two ranks of one", 1, {"tensor_parallel_size": 2}, "one engine"),
)


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    path = folder / "llama"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def open_client(layout: Layout, model: Path) -> ParallelEngineClient:
    os.environ["OMP_NUM_THREADS"] = str(layout.threads)
    return ParallelEngineClient(
        EngineConfig(
            model=str(model),
            dtype="float32",
            device="cpu",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**28,
            max_model_len=_HANDED_OVER_LEN + 48,
            stats_interval_s=0,
            **layout.engine_args,
        )
    )


def step_ms(client: ParallelEngineClient, num_streams: int) -> float:
    """Of a decode step, from when all streams have their first token until the first has its last."""
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, ignore_eos=True)
    waiting, unfinished = set[str](), set[str]()
    for index in range(num_streams):
        prompt = np.random.default_rng(index).integers(3, _VOCAB_SIZE, _PROMPT_LEN, dtype=np.int32)
        client.add_request(EngineRequest(f"{index}", prompt, params))
        waiting.add(f"{index}")
    unfinished |= waiting
    began_s = ended_s = 0.0
    most_before = 0
    num_tokens = dict.fromkeys(unfinished, 0)
    while unfinished:
        round_ = client.get_outputs(1.0)
        for output in round_.outputs if round_ is not None else []:
            num_tokens[output.request_id] += 1
            waiting.discard(output.request_id)
            if output.finished:
                unfinished.discard(output.request_id)
                client.forget_request(output.request_id)
                ended_s = ended_s or time.perf_counter()
        if not waiting and not began_s:
            began_s, most_before = time.perf_counter(), max(num_tokens.values())
    return (ended_s - began_s) / (_MAX_TOKENS - most_before) * 1e3


def hand_over_seconds(client: ParallelEngineClient) -> float:
    """Between a long prompt's first token, which one engine sends, and its second, which the other sends."""
    prompt = np.random.default_rng().integers(3, _VOCAB_SIZE, _HANDED_OVER_LEN, dtype=np.int32)
    client.add_request(EngineRequest("handed", prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
    times_s: list[float] = []
    while len(times_s) < 2:
        round_ = client.get_outputs(1.0)
        times_s += [time.perf_counter() for _ in round_.outputs] if round_ is not None else []
    client.forget_request("handed")
    return times_s[1] - times_s[0]


def measure_hand_over(model: Path, num_runs: int) -> Table:
    """How long the decode step takes that gives the second token is what an engine that does both shows."""
    seconds: list[float] = []
    for engine_args in ({}, {"data_parallel_size": 2, "num_prompt_engines": 1}):
        client = open_client(Layout("", 1, engine_args), model)
        hand_over_seconds(client)
        seconds.append(statistics.median(hand_over_seconds(client) for _ in range(num_runs)))
        client.close()
    config = LlamaConfig.from_pretrained(model)
    num_bytes = _HANDED_OVER_LEN * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    took_s = seconds[1] - seconds[0]
    table = Table(title=f"hand-over of a prompt of {_HANDED_OVER_LEN} tokens; median of {num_runs}")
    for column in ("MB", "ms", "GB/s", "÷ memcpy"):
        table.add_column(column, justify="right")
    rate = num_bytes / took_s
    table.add_row(
        f"{num_bytes / 1e6:.0f}", f"{took_s * 1e3:.0f}", f"{rate / 1e9:.2f}", f"{rate / copy_rate(num_bytes):.2f}"
    )
    return table


def copy_rate(num_bytes: int) -> float:
    """Bytes/s of one core that copies so many, from memory that is not in its caches."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        np.copyto(target, source)
        times_s.append(time.perf_counter() - began_s)
    return num_bytes / statistics.median(times_s)


def main(num_runs: Annotated[int, typer.Option(min=1, help="Runs of each; medians count.")] = 5) -> None:
    stream_counts = (1, 8)
    times: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for _ in range(num_runs):
            for layout in LAYOUTS:
                client = open_client(layout, model)
                for num_streams in stream_counts:
                    step_ms(client, num_streams * layout.num_engines)
                    ms = step_ms(client, num_streams * layout.num_engines)
                    times.setdefault((layout.name, num_streams), []).append(ms)
                client.close()
        hand_over = measure_hand_over(model, num_runs)
    table = Table(title=f"ms a decode step, by streams of each engine; median of {num_runs}")
    table.add_column("layout")
    for num_streams in stream_counts:
        table.add_column(f"{num_streams}", justify="right")
        table.add_column("÷ without", justify="right")
    for layout in LAYOUTS:
        cells = []
        for num_streams in stream_counts:
            ms = statistics.median(times[layout.name, num_streams])
            baseline = layout.baseline and statistics.median(times[layout.baseline, num_streams])
            cells += [f"{ms:.1f}", f"{ms / baseline:.2f}" if baseline else ""]
        table.add_row(layout.name, *cells)
    Console().print(table)
    Console().print(hand_over)


if __name__ == "__main__":
    typer.run(main)
