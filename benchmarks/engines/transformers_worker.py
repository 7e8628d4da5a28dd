"""transformers' `generate`: batches of as many prompts as there are streams, one batch after the other."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria

from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, TokenClock, Work


class TransformersRunner:
    version = transformers.__version__

    def __init__(self, num_threads: int, model: str, dtype: str) -> None:
        torch.set_num_threads(num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()

    def close(self) -> None:
        pass

    def run(self, work: Work) -> Figures:
        clock, started = TokenClock(), time.perf_counter()
        for begin in range(0, len(work.prompts), work.concurrency):
            self._generate(work.prompts[begin : begin + work.concurrency], begin, work.max_tokens, clock)
        return clock.figures(time.perf_counter() - started)

    def _generate(self, prompts: list[list[int]], first_index: int, max_tokens: int, clock: TokenClock) -> None:
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        input_ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        requests = range(first_index, first_index + len(prompts))
        for request in requests:
            clock.add_sent(request, time.perf_counter())
        with torch.inference_mode():
            self._model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                stopping_criteria=[_EveryStep(requests, clock)],
            )


class _EveryStep(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing: `generate` asks it after each token of the batch."""

    def __init__(self, requests: range, clock: TokenClock) -> None:
        self._requests = requests
        self._clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        now = time.perf_counter()
        for request in self._requests:
            self._clock.add_tokens(request, 1, now)
        return torch.zeros(len(input_ids), dtype=torch.bool)


if __name__ == "__main__":
    serve(TransformersRunner)
