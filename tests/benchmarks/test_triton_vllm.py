"""The engine that runs Triton's vLLM backend, with a stand-in for that: what it is given, and what is made of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import benchmarks.peers
from benchmarks.engines.triton_vllm_worker import TritonVllmRunner, Words
from benchmarks.model_files import bundled_gguf
from benchmarks.workload import Work
from deepinfer_backend.models.loader import resolve_model

# The interface of the vLLM backend: https://github.com/triton-inference-server/vllm_backend, README.md and docs/
STAND_IN = """
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name, kind in (("text_input", "STRING"), ("stream", "BOOL"), ("sampling_parameters", "STRING"),
                           ("exclude_input_in_output", "BOOL"), ("return_num_output_tokens", "BOOL")):
            config.add_input({"name": name, "data_type": f"TYPE_{kind}", "dims": [1]})
        config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "num_output_tokens", "data_type": "TYPE_UINT32", "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        with open(os.path.join(pb_utils.get_model_dir(), "model.json")) as file:
            self.max_num_seqs = json.load(file)["max_num_seqs"]

    def execute(self, requests):
        for request in requests:
            assert pb_utils.get_input_tensor_by_name(request, "stream").as_numpy()[0]
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            sampling = json.loads(pb_utils.get_input_tensor_by_name(request, "sampling_parameters").as_numpy()[0])
            assert len(text.split()) == 5 and self.max_num_seqs == 3, text
            sender = request.get_response_sender()
            for _ in range(sampling["max_tokens"]):
                sender.send(pb_utils.InferenceResponse([
                    pb_utils.Tensor("text_output", np.array(["a"], dtype=object)),
                    pb_utils.Tensor("num_output_tokens", np.array([1], dtype=np.uint32)),
                ]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PROMPTS = [[30_000, 21, 7_000, 48_000, 500], [31_000, 22, 7_001, 48_001, 501]]


@pytest.fixture(scope="module")
def model() -> str:
    return str(resolve_model(str(bundled_gguf())))


def test_streams_of_the_vllm_backend_are_counted(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.engines.triton_vllm_worker.vllm_environment", lambda python, num_threads: {})
    (tmp_path / "model.py").write_text(STAND_IN, encoding="utf-8")
    runner = TritonVllmRunner(2, "0.0", sys.executable, str(tmp_path), model=model, max_num_seqs=3)
    try:
        for _ in range(2):
            figures = runner.run(Work(PROMPTS, concurrency=1, max_tokens=4))
            assert figures.num_output_tokens == 8
            assert len(figures.first_token_s) == 2
    finally:
        runner.close()


def test_a_prompts_text_has_as_many_tokens(model: str) -> None:
    from transformers import AutoTokenizer

    words, tokenizer = Words(model), AutoTokenizer.from_pretrained(model)
    texts = [words.text_of(prompt) for prompt in PROMPTS]
    assert texts[0] != texts[1]
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [5, 5]


def test_the_backend_is_adapted_to_this_vllm(tmp_path: Path) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "model.py").write_text("import asyncio\nimport gc\n", encoding="utf-8")
    (tmp_path / "utils" / "request.py").write_text("from vllm.inputs.data import TokensPrompt\n", encoding="utf-8")
    logger = "from vllm.v1.metrics.loggers import StatLoggerBase, build_1_2_5_buckets\n"
    (tmp_path / "utils" / "metrics.py").write_text(logger, encoding="utf-8")
    benchmarks.peers.adapt_triton_vllm_backend(tmp_path)
    assert 'setlocale(locale.LC_ALL, "C.UTF-8")' in (tmp_path / "model.py").read_text()
    assert (tmp_path / "utils" / "request.py").read_text() == "from vllm.inputs import TokensPrompt\n"
    assert (
        "from vllm.v1.metrics.buckets import build_1_2_5_buckets\n" in (tmp_path / "utils" / "metrics.py").read_text()
    )
