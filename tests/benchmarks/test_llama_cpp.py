"""What llama.cpp's programs print becomes figures; the programs are played by short scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.engines.llama_cpp_bench_worker import LlamaCppBenchRunner
from benchmarks.engines.llama_cpp_server_worker import LlamaCppServerRunner
from benchmarks.workload import Work

BATCHED_BENCH = """
import json, sys
option = lambda name: int(sys.argv[sys.argv.index(name) + 1])
assert option("-c") >= option("-npl") * (option("-npp") + option("-ntg")) and option("-t") == option("-tb") == 2
print("loading")
print(json.dumps({"t_pp": option("-npp") * 0.01, "t_tg": option("-ntg") * 0.1}))
"""
SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["ignore_eos"] and not request["cache_prompt"] and request["temperature"] == 0
        self.send_response(200); self.end_headers()
        for _ in range(request["n_predict"] - 1):  # the last is half a character
            self.wfile.write(b"data: " + json.dumps({"tokens": [5], "stop": False}).encode() + b"\\n\\n")
        last = {"tokens": [], "stop": True, "tokens_predicted": request["n_predict"]}
        self.wfile.write(b"data: " + json.dumps(last).encode() + b"\\n\\n")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def tool(folder: Path, script: str) -> dict[str, str]:
    file = folder / "tool"
    file.write_text(f"#!{sys.executable}\n{script}")
    file.chmod(0o755)
    return {"tool": str(file), "model": "model.gguf", "version": "1"}


def test_batched_bench_counts_prefill_and_decode(tmp_path: Path) -> None:
    runner = LlamaCppBenchRunner(num_threads=2, **tool(tmp_path, BATCHED_BENCH))
    figures = runner.run(Work([[1] * 100] * 6, concurrency=3, max_tokens=20))
    assert (figures.num_output_tokens, figures.first_token_s) == (60, [1.0] * 3)
    assert (figures.elapsed_s, figures.step_s) == pytest.approx((3.0, 0.1))


def test_batched_bench_that_fails_says_why(tmp_path: Path) -> None:
    runner = LlamaCppBenchRunner(num_threads=2, **tool(tmp_path, "raise SystemExit('no such model')"))
    with pytest.raises(RuntimeError, match="no such model"):
        runner.run(Work([[1]], concurrency=1, max_tokens=2))


def test_server_streams_every_prompt(tmp_path: Path) -> None:
    runner = LlamaCppServerRunner(num_threads=2, **tool(tmp_path, SERVER))
    try:
        for concurrency in (1, 2):
            figures = runner.run(Work([[1, 2], [3, 4], [5, 6]], concurrency, max_tokens=4))
            assert figures.num_output_tokens == 12
            assert len(figures.first_token_s) == 3
    finally:
        runner.close()
