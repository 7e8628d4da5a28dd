"""vLLM for CPU, its engine in this process's hands as its offline class drives it. Runs in vLLM's own environment."""

from __future__ import annotations

import time
from typing import Any

import vllm

from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, TokenClock, Work


class VllmRunner:
    version = vllm.__version__

    def __init__(self, num_threads: int, **engine_args: Any) -> None:
        # num_threads: VLLM_CPU_OMP_THREADS_BIND has said it already.
        self._engine = vllm.LLM(**engine_args).llm_engine

    def close(self) -> None:
        pass

    def run(self, work: Work) -> Figures:
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=work.max_tokens, ignore_eos=True, detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )  # fmt: skip
        todo = list(enumerate(work.prompts))
        clock, num_running = TokenClock(), 0
        started = time.perf_counter()
        while todo or num_running:
            while todo and num_running < work.concurrency:
                index, prompt = todo.pop(0)
                clock.add_sent(index, time.perf_counter())
                self._engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
                num_running += 1
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                if num_tokens := sum(len(sequence.token_ids) for sequence in output.outputs):
                    clock.add_tokens(int(output.request_id), num_tokens, now)
                num_running -= output.finished
        return clock.figures(time.perf_counter() - started)


if __name__ == "__main__":
    serve(VllmRunner)
