"""The same tritonserver with Triton's vLLM backend in it, which runs in vLLM's own environment.

Its model is a model.py for Triton's Python backend, and is given to that as it stands. It takes no token ids: a prompt
becomes a text of as many tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.engines.grpc_streams import run_streams
from benchmarks.engines.vllm_settings import vllm_environment
from benchmarks.engines.worker import serve
from benchmarks.workload import Figures, Work
from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_client import Response
from tests.support.triton_server import free_ports

_MODEL = "vllm"
_CONFIG = 'backend: "python"\ninstance_group [{ count: 1, kind: KIND_MODEL }]\n'
_START_TIMEOUT_S = 1500.0  # vLLM compiles when it starts for the first time
_WORD = re.compile(r"Ġ[a-z]{3,}")  # as the tokenizer spells a word with the space before it


class TritonVllmRunner:
    """Owns the server, which is stopped between runs: vLLM looks for work all the time."""

    def __init__(self, num_threads: int, version: str, python: str, backend: str, **engine_args: Any) -> None:
        """python: of the environment that has vLLM; backend: the folder of the vLLM backend's model.py."""
        self.version = version
        # Triton's Python backend takes the first Python in PATH.
        search_path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
        self._words = Words(engine_args["model"])
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _write_model(folder / "models" / _MODEL, Path(backend), engine_args)
            http_port, grpc_port, metrics_port = free_ports(3)
            self._server = stack.enter_context(
                TritonServer(
                    folder / "models",
                    http_port=http_port,
                    grpc_port=grpc_port,
                    metrics_port=metrics_port,
                    environment={**vllm_environment(Path(python), num_threads), "PATH": search_path},
                )
            )
            self._server.wait_ready(_START_TIMEOUT_S)
            self._stack = stack.pop_all()
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._stack.close()

    def run(self, work: Work) -> Figures:
        asked = {"exclude_input_in_output": True, "return_num_output_tokens": True}
        prompts = [{"text_input": self._words.text_of(prompt), **asked} for prompt in work.prompts]
        with self._awake():
            return run_streams(f"localhost:{self._server.grpc_port}", _MODEL, work, prompts, _num_tokens)

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._server.process_ids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Words:
    """Words that are one token each, alone and behind one another."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        vocabulary = self._tokenizer.get_vocab()
        self._words = [f" {token[1:]}" for token in sorted(vocabulary, key=vocabulary.get) if _WORD.fullmatch(token)]

    def text_of(self, prompt: list[int]) -> str:
        """As many tokens as the prompt has, and another text for another prompt."""
        text = "".join(self._words[token_id % len(self._words)] for token_id in prompt)
        num_tokens = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if num_tokens != len(prompt):
            raise RuntimeError(f"a text for {len(prompt)} tokens has {num_tokens}")
        return text


def _num_tokens(response: Response) -> int:
    return sum(response.outputs.get("num_output_tokens", []))


def _write_model(folder: Path, backend: Path, engine_args: dict[str, Any]) -> None:
    shutil.copytree(backend, folder / "1")
    (folder / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
    (folder / "1" / "model.json").write_text(json.dumps(engine_args), encoding="utf-8")


if __name__ == "__main__":
    serve(TritonVllmRunner)
