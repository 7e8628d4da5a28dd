"""The engine in this process: a closed loop of N requests, driven as `LLM` drives it."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.workload import MAX_TOKENS, Figures
from deepinfer_backend import SamplingParams
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.engine_client import InprocEngineClient
from deepinfer_backend.engine.messages import EngineRequest

_SAMPLING = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


class OfflineEngine:
    """Owns one engine for all runs."""

    def __init__(self, config: EngineConfig) -> None:
        self._client = InprocEngineClient(config)
        self.vocab_size = self._client.info.vocab_size

    def close(self) -> None:
        self._client.close()

    def run(self, prompts: list[list[int]], concurrency: int) -> Figures:
        """Keeps `concurrency` requests going until all prompts are done."""
        engine = self._client.engine
        todo = list(enumerate(prompts))
        sent_at: dict[str, float] = {}
        first_token_s: dict[str, float] = {}
        num_tokens, num_running = 0, 0
        busy_s, started = engine.stream.busy_s, time.perf_counter()
        while todo or num_running:
            while todo and num_running < concurrency:
                index, prompt = todo.pop(0)
                request_id = str(index)
                sent_at[request_id] = time.perf_counter()
                self._client.add_request(EngineRequest(request_id, np.array(prompt, dtype=np.int32), _SAMPLING))
                num_running += 1
            round_outputs = self._client.get_outputs(timeout_s=0.0)
            assert round_outputs is not None
            now = time.perf_counter()
            for output in round_outputs.outputs:
                first_token_s.setdefault(output.request_id, now - sent_at[output.request_id])
                num_tokens += 1
                num_running -= output.finished
        self._client.get_outputs(timeout_s=0.0)
        elapsed_s = time.perf_counter() - started
        return Figures(
            num_output_tokens=num_tokens,
            elapsed_s=elapsed_s,
            first_token_s=list(first_token_s.values()),
            device_idle_share=1 - (engine.stream.busy_s - busy_s) / elapsed_s,
        )
