"""What is asked of the simulated engines: requests at random times, of random lengths, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.scaling.costs import Chunk, DeviceCosts

_VOCAB_SIZE = 128_256


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """num_outputs: 2 or more, so that there is something to decode. first_token_s: when its client had that one."""

    request_id: str
    arrival_s: float
    prompt: NDArray[np.int32]
    num_outputs: int
    first_token_s: float = math.nan


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal, in tokens, cut at the ends."""

    median: int
    sigma: float
    at_least: int
    at_most: int

    def draw(self, rng: np.random.Generator) -> int:
        return int(np.clip(rng.lognormal(math.log(self.median), self.sigma), self.at_least, self.at_most))

    def mean(self) -> float:
        """Of what is drawn, without the cuts."""
        return self.median * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class Workload:
    """requests_per_s: of each device, on average; the times between them are exponential (a Poisson process)."""

    name: str
    prompts: Lengths
    outputs: Lengths
    requests_per_s: float

    def arrivals(self, num_devices: int, end_s: float, seed: int = 0) -> Iterator[SimulatedRequest]:
        """Until end_s. No two prompts begin alike, so that a prefix cache helps nobody."""
        rng = np.random.default_rng(seed)
        index, now_s = 0, rng.exponential(1 / (num_devices * self.requests_per_s))
        while now_s < end_s:
            prompt = rng.integers(0, _VOCAB_SIZE, self.prompts.draw(rng), dtype=np.int32)
            yield SimulatedRequest(f"{index}", now_s, prompt, self.outputs.draw(rng))
            index += 1
            now_s += rng.exponential(1 / (num_devices * self.requests_per_s))

    def prefill_share(self, device: DeviceCosts) -> float:
        """Of a device's time, for what one device's requests bring of prompts, each computed alone."""
        prompt_len = round(self.prompts.mean())
        return self.requests_per_s * device.prefill_s([Chunk(prompt_len, prompt_len, samples=True)])


CHAT = Workload("chat", Lengths(500, 0.7, 16, 8192), Lengths(150, 0.5, 2, 1024), requests_per_s=25)
LONG = Workload("long prompts", Lengths(4000, 0.3, 16, 12_288), Lengths(200, 0.5, 2, 1024), requests_per_s=4)
WORKLOADS = (CHAT, LONG)
MAX_MODEL_LEN = 16_384
