"""`make bench-features`: what each thing that a request can ask for costs, in milliseconds a step at 32 sequences.

Every feature is measured next to plain greedy decoding, in turn, and the median of the differences counts: so a slow
minute of the machine hits both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from deepinfer_backend import SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import InprocEngineClient
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.models.loader import load_tokenizer, resolve_model
from tests.support.lora import TARGET_MODULES, make_random_adapter

NUM_SEQS = 32
_NUM_STEPS = 12
_SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "minItems": 100, "items": {"type": "string", "minLength": 20}}},
    "required": ["items"],
}

FEATURES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "temperature, top_k 50": {"temperature": 1.0, "top_k": 50},
    "temperature, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature, min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "three penalties": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
    "logit_bias, 100 entries": {"logit_bias": {token_id: 1.0 for token_id in range(100, 200)}},
    "allowed_token_ids, 1,000": {"allowed_token_ids": list(range(100, 1100))},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "JSON schema": {"structured_outputs": {"json": _SCHEMA}, "ignore_eos": False},
    "beam_width 4 (8 requests)": {"beam_width": 4},
    "LoRA, rank 16, one adapter": {"lora_name": "first"},
    "LoRA, two adapters and base": {"lora_name": ["first", "second", None]},
}


def main(num_runs: Annotated[int, typer.Option(help="Runs of each kind; the median counts.")] = 5) -> None:
    table = Table(title=f"{NUM_SEQS} sequences after a line of English each; median of {num_runs}")
    for heading in ("feature", "ms a step", "more with it", "with ÷ without"):
        table.add_column(heading, justify="left" if heading == "feature" else "right")
    with tempfile.TemporaryDirectory() as folder:
        model = resolve_model(None)
        adapters = {
            name: str(
                make_random_adapter(model, Path(folder) / name, seed=seed, r=16, target_modules=TARGET_MODULES["llama"])
            )
            for seed, name in enumerate(("first", "second"))
        }
        client = InprocEngineClient(EngineConfig(model=str(model), enable_prefix_caching=False, lora_modules=adapters))
        tokenizer = load_tokenizer(model)
        assert tokenizer is not None
        work = [
            tokenizer(f"On day {day} of the voyage the captain wrote in her book:")["input_ids"]
            for day in range(NUM_SEQS)
        ]
        for name, fields in FEATURES.items():
            step_ms(client, work, fields)
            runs = [(step_ms(client, work, {}), step_ms(client, work, fields)) for _ in range(num_runs)]
            without = statistics.median(plain for plain, _ in runs)
            cost = statistics.median(with_feature - plain for plain, with_feature in runs)
            table.add_row(name, f"{without:.1f}", f"{cost:+.1f}", f"{1 + cost / without:.2f}")
        client.close()
    Console().print(table)


def step_ms(client: InprocEngineClient, work: list[list[int]], fields: dict[str, Any]) -> float:
    """Median milliseconds of a decode step of NUM_SEQS sequences that all ask for `fields`."""
    beam_width = fields.get("beam_width", 1)
    lora_names = fields.get("lora_name")
    for index, prompt in enumerate(work[: NUM_SEQS // beam_width]):
        params = {"temperature": 0.0, "max_tokens": 2 * _NUM_STEPS, "ignore_eos": True, **fields}
        if isinstance(lora_names, list):
            params["lora_name"] = lora_names[index % len(lora_names)]
        client.add_request(EngineRequest(str(index), np.array(prompt, dtype=np.int32), SamplingParams(**params)))
    engine = client.engine
    while engine.scheduler.num_running < NUM_SEQS:
        client.get_outputs(timeout_s=0.0)
    durations_ms = []
    for _ in range(_NUM_STEPS):
        started = time.perf_counter()
        client.get_outputs(timeout_s=0.0)
        durations_ms.append((time.perf_counter() - started) * 1e3)
    assert engine.scheduler.num_running == NUM_SEQS, "a sequence ended while it was measured"
    client.abort_requests([str(index) for index in range(NUM_SEQS)])
    client.get_outputs(timeout_s=0.0)
    # A beam computes in every other step: its next token is chosen between two.
    return statistics.median(durations_ms) if beam_width == 1 else statistics.fmean(durations_ms) * 2


if __name__ == "__main__":
    typer.run(main)
