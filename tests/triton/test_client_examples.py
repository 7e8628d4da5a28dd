"""The client examples run as they stand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_backend.triton.server import TritonServer

EXAMPLES = Path(__file__).parents[2] / "client_examples"
MAX_LINES = 60


def run(*command: str) -> str:
    """Its standard output; fails if it fails, or does not end."""
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, *arguments: str) -> str:
    return run(sys.executable, str(EXAMPLES / name), *arguments)


def grpc_url(server: TritonServer) -> str:
    return f"localhost:{server.grpc_port}"


def test_grpc_stream(server: TritonServer) -> None:
    printed = example("grpc_stream.py", "Once upon a time", "--url", grpc_url(server), "--max-tokens", "8")
    assert printed.startswith("Once upon a time") and printed.endswith("[length]\n")
    assert len(printed) > len("Once upon a time[length]\n") + 8


def test_grpc_asyncio_many(server: TritonServer) -> None:
    printed = example("grpc_asyncio_many.py", "--url", grpc_url(server), "--streams", "16", "--max-tokens", "4")
    assert "16 streams, " in printed


def test_http_generate(server: TritonServer) -> None:
    printed = example("http_generate.py", "--url", f"http://localhost:{server.http_port}", "--max-tokens", "12")
    at_once, _, streamed = printed.removeprefix("generate: ").partition("\ngenerate_stream: ")
    assert at_once.strip() and at_once.strip() == streamed.strip()


def test_http_chat(server: TritonServer) -> None:
    printed = example("http_chat.py", "--url", f"http://localhost:{server.http_port}")
    text, _, ending = printed.partition(" [")
    assert json.loads(text).keys() == {"answer", "is_certain"}
    assert ending.startswith("stop, ")


def test_curl(server: TritonServer) -> None:
    printed = run("sh", str(EXAMPLES / "curl.sh"), f"http://localhost:{server.http_port}")
    first, *events = [line for line in printed.splitlines() if line]
    text = json.loads(first)["text_output"]
    assert text.startswith("The capital of Italy is")
    assert text.endswith("".join(json.loads(event.removeprefix("data: "))["text_output"] for event in events))


def test_cancel(server: TritonServer) -> None:
    printed = example("cancel.py", "--url", grpc_url(server), "--cancel-after", "3")
    assert printed.endswith("[cancelled after 3 responses]\n")


def test_offline_llm() -> None:
    assert example("offline_llm.py", "--max-tokens", "4").count("→") == 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_LINES
