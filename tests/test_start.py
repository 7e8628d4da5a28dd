"""What the start of a natively run model leaves unimported: it would take longer than the rest of the start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepinfer_backend.models.loader import resolve_model

SCRIPT = """
import sys
from deepinfer_backend import LLM, SamplingParams
with LLM(num_gpu_blocks_override=8, skip_tokenizer_init={skip_tokenizer_init}) as llm:
    llm.complete(prompt_token_ids=[[1, 2]], sampling_params=SamplingParams(max_tokens=1, detokenize=False))
print(*(name for name in {names} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("skip_tokenizer_init", "names"),
    [
        (True, ["transformers", "xgrammar"]),  # what an engine process does
        (False, ["transformers.activations", "torch.distributed.tensor", "sympy", "xgrammar"]),
    ],
)
def test_a_warm_start_does_not_import(skip_tokenizer_init: bool, names: list[str]) -> None:
    resolve_model(None)  # the one conversion
    script = SCRIPT.format(skip_tokenizer_init=skip_tokenizer_init, names=names)
    for _ in range(2):  # the first start keeps what it read
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
