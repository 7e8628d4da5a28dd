"""The texts that a module learns from: a model's answers, written by our own engine."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.chat import Chat
from deepinfer_backend.engine.engine_client import InprocEngineClient
from deepinfer_backend.engine.input_processor import max_prompt_chars
from deepinfer_backend.engine.messages import EngineRequest
from deepinfer_backend.models.loader import load_tokenizer
from deepinfer_backend.mtp_training.questions import questions
from deepinfer_backend.mtp_training.recorder import HiddenStateRecorder, WrittenText
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.speculative_config import SpeculativeConfig

_NUM_STREAMS = 48
_MAX_TOKENS = 384


def write_texts(path: Path, deadline_s: float, rng: random.Random) -> list[WrittenText]:
    """What the model in that folder answers until then, in any order: half of it greedy, half sampled.

    Raises:
        InvalidRequestError: it has no tokenizer or no chat template.
    """
    config = EngineConfig(
        model=str(path),
        enable_prefix_caching=False,
        max_num_seqs=_NUM_STREAMS,
        max_num_batched_tokens=4096,
        # An engine that speculates tells its drafter of slots and hidden states; this one's is then replaced.
        speculative_config=SpeculativeConfig.model_validate({"method": "ngram", "num_speculative_tokens": 1}),
    )
    with closing(InprocEngineClient(config)) as client:
        tokenizer, max_chars = load_tokenizer(path), max_prompt_chars(client.info)
        prompts = [
            Chat.from_objects([{"role": "user", "content": question}]).tokenize(tokenizer, max_chars)
            for question in questions()
        ]
        rng.shuffle(prompts)
        recorder = HiddenStateRecorder()
        client.engine.worker.drafter = recorder
        num_running = 0
        for index, prompt in enumerate(itertools.cycle(prompts)):
            while num_running == _NUM_STREAMS:
                num_running -= _num_ended(client)
            if time.monotonic() > deadline_s:
                break
            # The second time a question comes, its greedy answer is known.
            temperature = 0.0 if index % 2 == 0 and index < len(prompts) else 0.8
            sampling = SamplingParams(temperature=temperature, max_tokens=_MAX_TOKENS, seed=index)
            client.add_request(EngineRequest(str(index), np.array(prompt, dtype=np.int32), sampling))
            num_running += 1
        while num_running:
            num_running -= _num_ended(client)
        client.get_outputs(timeout_s=0.0)
    texts = recorder.take()
    rng.shuffle(texts)
    return texts


def _num_ended(client: InprocEngineClient) -> int:
    """Sequences that end in the next step."""
    round_outputs = client.get_outputs(timeout_s=0.0)
    assert round_outputs is not None
    return sum(output.finished for output in round_outputs.outputs)
