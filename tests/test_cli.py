"""The command line: clear one-line errors, the right exit status, and a server that starts and stops cleanly."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deepinfer_backend import cli
from deepinfer_backend.cli import parse_models
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError
from deepinfer_backend.sampling_params import SamplingParams
from tests.support.models import make_random_model
from tests.support.tiny_gguf import write_tiny_gguf

COMMAND = [sys.executable, "-c", "from deepinfer_backend.cli import main; main()"]
START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 15.0
SHIPPED_MODEL = Path(__file__).parents[1] / "model_repository" / "deepinfer"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line; returns exit status, stdout, stderr."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["deepinfer", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, captured.out, captured.err

    return run_command


@contextmanager
def http_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers each POST so; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("localhost", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"localhost:{server.server_port}"
        server.shutdown()
        thread.join()


def answer_json(status: int, content: object) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        body = json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


BAD_COMMANDS = [
    (["serve", "--bogus"], "No such option: --bogus"),
    (["bogus"], "No such command 'bogus'"),
    (["serve", "--http-port", "x"], "Invalid value for '--http-port'"),
    (["serve", "--http-port", "70000"], "Invalid value for '--http-port'"),
    (["serve", "--http-port", "8001"], "the ports must differ"),
    (["serve", "--max-num-seqs", "0"], "max_num_seqs is '0': must be at least 1"),
    (["serve", "--dtype", "int8"], "dtype is 'int8': must be"),
    (["serve", "--model", "a=x", "--model", "a=y"], "model 'a' is given twice"),
    (["serve", "--model", "/x", "--model", "/y"], "model 'deepinfer' is given twice: name each"),
    (["serve", "--model", "a="], "there must be a path or hub id"),
    (["serve", "--model", "/no/such/model"], "model is '/no/such/model': there is no such file or folder"),
    (
        ["serve", "--model-repository", "/no/such/folder"],
        "model_repository is '/no/such/folder': there is no such folder",
    ),
    (["serve", "--model-repository", str(SHIPPED_MODEL)], "must be a folder that has a folder for each model"),
    (
        ["serve", "--model-repository", "/x", "--model", "/y", "--max-num-seqs", "4"],
        "--model, --max-num-seqs cannot be used with --model-repository",
    ),
    (["generate", "hi", "--temperature", "hot"], "temperature is 'hot': must be a number"),
    (["generate", "hi", "--max-tokens", "0"], "max_tokens is '0': must be at least 1"),
    (["generate", ""], "the prompt is empty"),
    (["check", "--url", "ftp://x"], "url is 'ftp://x': must be"),
    (["check", "--url", "localhost:port"], "url is 'localhost:port': must be"),
    (["check", "--timeout", "0"], "Invalid value for '--timeout'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_COMMANDS, ids=[" ".join(line) for line, _ in BAD_COMMANDS])
def test_a_bad_command_line_is_one_clear_line_and_status_2(
    run: Callable[..., tuple[int, str, str]], arguments: list[str], message: str
) -> None:
    if arguments[0] == "serve" and "--http-port" not in arguments:
        http_port, grpc_port, metrics_port = map(str, free_ports(3))
        arguments = [*arguments, "--http-port", http_port, "--grpc-port", grpc_port, "--metrics-port", metrics_port]
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_port_in_use_is_named_before_anything_starts(run: Callable[..., tuple[int, str, str]]) -> None:
    with closing(socket.create_server(("", 0))) as taken:
        port = str(taken.getsockname()[1])
        status, _, err = run("serve", "--grpc-port", port)
    assert status == 2
    assert f"grpc_port {port} cannot be used" in err
    assert "--grpc-port" in err


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], {"deepinfer": None}),
        (["/models/x"], {"deepinfer": "/models/x"}),
        (["small=/models/x", "org/large"], {"small": "/models/x", "deepinfer": "org/large"}),
        (["/models/a=b"], {"deepinfer": "/models/a=b"}),
        (["x=a=b"], {"x": "a=b"}),
    ],
)
def test_models_are_named_before_the_equals_sign(values: list[str], expected: dict[str, str | None]) -> None:
    assert parse_models(values) == expected


def test_a_name_without_model_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_models(["name="])


def test_every_sampling_field_is_an_option(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("generate", "--help")
    assert status == 0
    for name in SamplingParams.model_fields:
        assert "--" + name.replace("_", "-") in out


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_engine_argument_is_an_option(run: Callable[..., tuple[int, str, str]], command: str) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    for name in EngineConfig.model_fields:
        assert "--" + name.replace("_", "-") in out
    assert "--no-enable-prefix-caching" in out


def test_config_prints_every_engine_argument_with_its_default(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("config")
    assert status == 0
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert set(EngineConfig.model_fields) <= set(rows)
    assert "1 to 4096" in rows["max_num_seqs"]
    assert "64" in rows["max_num_seqs"]


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from deepinfer_backend import cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_check_succeeds_when_a_token_comes(run: Callable[..., tuple[int, str, str]]) -> None:
    with http_server(answer_json(200, {"text_output": "x"})) as url:
        assert run("check", "--url", url) == (0, f"deepinfer at {url} generates\n", "")


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, {"error": "UNAVAILABLE: starting"}, "answered 400: 'UNAVAILABLE: starting'"),
        (404, {"error": "unknown model"}, "answered 404: 'unknown model'"),
        (200, {"error": "failed"}, "without text_output: 'failed'"),
        (200, [1, 2], "without text_output"),
    ],
)
def test_check_fails_with_the_servers_own_words(
    run: Callable[..., tuple[int, str, str]], status: int, content: object, message: str
) -> None:
    with http_server(answer_json(status, content)) as url:
        exit_status, out, err = run("check", "--url", url)
    assert (exit_status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_check_keeps_its_deadline_against_a_server_that_drips(run: Callable[..., tuple[int, str, str]]) -> None:
    leave = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not leave.wait(0.05):
            handler.wfile.write(b" ")

    with http_server(drip) as url:
        status, _, err = run("check", "--url", url, "--timeout", "0.3")
        leave.set()
    assert status == 1
    assert "did not answer within 0.3 s" in err


def test_check_fails_when_nobody_listens(run: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = run("check", "--url", f"localhost:{free_ports(1)[0]}")
    assert status == 1
    assert "cannot be reached" in err


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def test_generate_writes_the_models_text(environment: Path) -> None:
    arguments = ["generate", "Hello", "--model", str(environment), "--dtype", "float32", "--temperature", "0"]
    arguments += ["--max-tokens", "5", "--ignore-eos", "--kv-cache-memory-bytes", "10000000"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert done.stdout.strip()


def test_generate_writes_several_texts_under_their_numbers(environment: Path) -> None:
    arguments = ["generate", "Hello", "--model", str(environment), "--dtype", "float32", "--seed", "1", "--n", "2"]
    arguments += ["--max-tokens", "5", "--ignore-eos", "--kv-cache-memory-bytes", "10000000"]
    arguments += ["--allowed-token-ids", "70", "--allowed-token-ids", "71", "--logit-bias", '{"70": -100}']
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    letter = done.stdout[4]
    assert done.stdout == f"[0] {letter * 5}\n[1] {letter * 5}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_serves_until_a_signal_and_leaves_nothing(environment: Path, tmp_path: Path, number: int) -> None:
    http_port, grpc_port, metrics_port = free_ports(3)
    arguments = ["--model", f"tiny={environment}", "--dtype", "float32", "--kv-cache-memory-bytes", "10000000"]
    arguments += ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)]
    log = (tmp_path / "log").open("w+", encoding="utf-8")
    with (
        log,
        subprocess.Popen([*COMMAND, "serve", *arguments], stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            alarm = threading.Timer(START_TIMEOUT_S, server.kill)
            alarm.start()
            output = ""
            for line in server.stdout:
                output += line
                if "Ctrl-C" in line:
                    break
            alarm.cancel()
            assert f"http://localhost:{http_port}" in output, (tmp_path / "log").read_text(encoding="utf-8")
            assert f"curl -s localhost:{http_port}/v2/models/tiny/generate" in output

            check = [*COMMAND, "check", "--url", f"localhost:{http_port}", "--model", "tiny"]
            assert subprocess.run(check, timeout=60, check=False).returncode == 0
            with urllib.request.urlopen(f"http://localhost:{metrics_port}/metrics", timeout=5) as metrics:
                assert metrics.status == 200

            server.send_signal(number)
            assert server.wait(EXIT_TIMEOUT_S) == 0
        finally:
            server.kill()


def test_train_mtp_refuses_what_is_no_llama(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path = make_random_model("qwen3", tmp_path)
    status, _, error = run("train-mtp", str(tmp_path / "module"), "--model", str(path))
    assert status == 2 and "error: model_type is qwen3" in error
    assert not (tmp_path / "module").exists()
