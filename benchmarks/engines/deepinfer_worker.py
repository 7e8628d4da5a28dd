"""Our engine in its own process, without Triton: driven as `LLM` drives it."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import numpy as np
import torch

from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, TokenClock, Work
from deepinfer_backend import SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import InprocEngineClient
from deepinfer_backend.engine.messages import EngineRequest


class DeepInferRunner:
    """Owns one engine for all runs."""

    version = importlib.metadata.version("deepinfer-backend")

    def __init__(self, num_threads: int, **engine_args: Any) -> None:
        torch.set_num_threads(num_threads)
        self._client = InprocEngineClient(EngineConfig(**engine_args))

    def close(self) -> None:
        self._client.close()

    def run(self, work: Work) -> Figures:
        """Keeps `concurrency` requests going until all prompts are done."""
        sampling = SamplingParams(temperature=0, max_tokens=work.max_tokens, ignore_eos=True)
        stream = self._client.engine.stream
        todo = list(enumerate(work.prompts))
        clock, num_running = TokenClock(), 0
        busy_s, started = stream.busy_s, time.perf_counter()
        while todo or num_running:
            while todo and num_running < work.concurrency:
                index, prompt = todo.pop(0)
                clock.add_sent(index, time.perf_counter())
                self._client.add_request(EngineRequest(str(index), np.array(prompt, dtype=np.int32), sampling))
                num_running += 1
            round_outputs = self._client.get_outputs(timeout_s=0.0)
            assert round_outputs is not None
            now = time.perf_counter()
            for output in round_outputs.outputs:
                clock.add_tokens(int(output.request_id), 1, now)
                num_running -= output.finished
        self._client.get_outputs(timeout_s=0.0)
        elapsed_s = time.perf_counter() - started
        return clock.figures(elapsed_s, device_idle_share=1 - (stream.busy_s - busy_s) / elapsed_s)


if __name__ == "__main__":
    serve(DeepInferRunner)
