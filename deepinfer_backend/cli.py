"""The command `deepinfer`: serve, generate, config, check, train-mtp.

Expected errors are one line on stderr; the exit status is 2 for wrong arguments, 1 for everything else.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from deepinfer_backend.cli_options import field_options
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import (
    ConfigError,
    DeepInferError,
    InvalidRequestError,
    UnsupportedModelError,
    shown,
)
from deepinfer_backend.sampling_params import SamplingParams
from deepinfer_backend.triton.model_config import DEFAULT_MODEL_NAME, write_model_repository
from deepinfer_backend.triton.tensorrtllm.repository import MODEL_NAMES as TENSORRTLLM_MODEL_NAMES
from deepinfer_backend.triton.tensorrtllm.repository import write_tensorrtllm_models

# A name that Triton can have in an address and as a folder.
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
# Loading the largest models takes most of it.
_READY_TIMEOUT_S = 3600.0
_BAD_ARGUMENTS, _FAILED, _INTERRUPTED = 2, 1, 130

_ENGINE_PANEL = "Engine arguments"
_SAMPLING_PANEL = "Sampling parameters"

app = typer.Typer(
    name="deepinfer",
    help="Serves language models through Triton Inference Server.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names off
)

Port = Annotated[int, typer.Option(min=1, max=65535)]


class _Ports(NamedTuple):
    http_port: int
    grpc_port: int
    metrics_port: int


def main() -> None:
    """The console script."""
    sys.exit(_run(sys.argv[1:]))


@app.command()
@field_options(EngineConfig, "engine_args", _ENGINE_PANEL, leave_out=("model",))
def serve(
    engine_args: dict[str, Any],
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]MODEL",
            help="A folder in Hugging Face format, a hub id or a .gguf file; NAME is its name in Triton. May be "
            "given several times. (default: the bundled model, named deepinfer)",
        ),
    ] = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Serve this model repository as it stands, instead of --model and the engine arguments, which are "
            "in its own files.",
        ),
    ] = None,
    tensorrtllm: Annotated[
        bool,
        typer.Option(
            "--tensorrtllm",
            help="Also serve the five models of Triton's TensorRT-LLM backend (ensemble, tensorrt_llm_bls and others) "
            "with the engine of the first model.",
        ),
    ] = False,
    http_port: Port = 8000,
    grpc_port: Port = 8001,
    metrics_port: Port = 8002,
) -> None:
    """Starts Triton with one or several models and stays until SIGTERM or Ctrl-C.

    When Triton or a model's process dies, it is started again: --max-engine-restarts times in ten minutes.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ports = _Ports(http_port, grpc_port, metrics_port)
    if model_repository is not None:
        given = [*(["model"] if model else []), *(["tensorrtllm"] if tensorrtllm else []), *engine_args]
        model_repository = _check_model_repository(model_repository.expanduser().absolute(), given)
        _check_ports(ports)
        with _ended_by_signals():
            greeting = f"{model_repository} ready:\n{_addresses(ports)}"
            _serve_repository(model_repository, ports, EngineConfig().max_engine_restarts, greeting)
        return
    models = parse_models(model or [])
    taken = sorted(models.keys() & set(TENSORRTLLM_MODEL_NAMES)) if tensorrtllm else []
    if taken:
        raise ConfigError(f"model {taken[0]!r} cannot have this name beside --tensorrtllm, which has one of its own")
    # All checks and all long work come before the server, where a terminal shows their errors and their progress.
    configs = {name: EngineConfig(model=path, **engine_args) for name, path in models.items()}
    _check_ports(ports)

    from deepinfer_backend.models.loader import resolve_model

    folders = {name: resolve_model(config.model) for name, config in configs.items()}
    arguments = {
        name: {**config.model_dump(mode="json", exclude_unset=True), "model": str(folders[name])}
        for name, config in configs.items()
    }
    max_restarts = next(iter(configs.values())).max_engine_restarts
    greeting = f"{', '.join(models)} ready:\n{_addresses(ports)}\n{_example(next(iter(models)), http_port)}"
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="deepinfer-models-") as folder:
        write_model_repository(Path(folder), arguments)
        if tensorrtllm:
            write_tensorrtllm_models(Path(folder), engine_of=next(iter(models)))
        _serve_repository(Path(folder), ports, max_restarts, greeting)


@app.command()
@field_options(SamplingParams, "sampling", _SAMPLING_PANEL)
@field_options(EngineConfig, "engine_args", _ENGINE_PANEL, leave_out=("model", "seed"))
def generate(
    engine_args: dict[str, Any],
    sampling: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, standard input is read.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A folder in Hugging Face format, a hub id or a .gguf file. (default: bundled)"),
    ] = None,
) -> None:
    """Writes what the model makes of PROMPT to standard output; needs no server.

    One text is written as it comes; several (n over 1) and the result of a beam search when all are done, each under
    its number.
    """
    params = SamplingParams(**sampling)
    EngineConfig(model=model, **engine_args)
    if prompt is None:
        prompt = sys.stdin.read()
    if not prompt:
        raise InvalidRequestError("the prompt is empty")

    from deepinfer_backend.llm import LLM

    with LLM(model, **engine_args) as llm:
        if params.n > 1 or params.beam_width > 1:
            (completion,) = llm.complete(prompt, params, use_tqdm=False)
            sys.stdout.writelines(f"[{each.index}] {each.text}\n" for each in completion.sequences)
        else:
            for text in llm.generate_stream(prompt, params):
                sys.stdout.write(text)
                sys.stdout.flush()
            sys.stdout.write("\n")
    sys.stdout.flush()


@app.command()
def config() -> None:
    """Prints the engine arguments: name, type, limits, default, meaning."""
    from rich.console import Console
    from rich.table import Table

    from deepinfer_backend.field_facts import describe_fields

    table = Table(header_style="bold")
    for heading in ("name", "type", "limits", "default"):
        table.add_column(heading, overflow="fold")
    table.add_column("meaning", ratio=1, overflow="fold")
    for field in describe_fields(EngineConfig):
        table.add_row(field.name, field.type_name, field.limits, field.default, field.description)
    # A pipe has no width; wrapped names could not be searched for.
    Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False).print(table)


@app.command()
def check(
    url: Annotated[str, typer.Option(help="The server's HTTP address.")] = "localhost:8000",
    model: Annotated[str, typer.Option(help="The model's name in Triton.")] = DEFAULT_MODEL_NAME,
    timeout: Annotated[float, typer.Option(min=0.001, max=3600.0, help="Seconds to wait, all in all.")] = 5.0,
) -> None:
    """Generates one token from a running server; the exit status is that of a health probe."""
    from deepinfer_backend.probe import generate_one_token

    generate_one_token(url, model, timeout)
    typer.echo(f"{model} at {url} generates")


@app.command()
def train_mtp(
    folder: Annotated[Path, typer.Argument(help="Where the module goes.")],
    model: Annotated[
        str | None,
        typer.Option(help="A Llama: a folder in Hugging Face format, a hub id or a .gguf file. (default: bundled)"),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=10_000, help="How long it takes, all in all.")] = 40.0,
    draft_vocab_size: Annotated[
        int, typer.Option(min=1, help="Only so many tokens are ever proposed: those that the model writes most.")
    ] = 8192,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
) -> None:
    """Makes a multi-token-prediction module for a model that has none.

    The model answers questions, and the module learns from these texts to say what comes next. Speculative decoding
    uses it with --speculative-config '{"method": "mtp", "model": "FOLDER", "num_speculative_tokens": 2}'.
    """
    from deepinfer_backend.mtp_training.training import train_mtp as train

    acceptance = train(
        folder, model=model, minutes=minutes, draft_vocab_size=draft_vocab_size, seed=seed, report=typer.echo
    )
    typer.echo(f"{folder}: of the drafts in texts that were held out, right are {acceptance}")


def parse_models(values: list[str]) -> dict[str, str | None]:
    """`--model` values → model name in Triton → path, hub id, or None for the bundled model.

    Raises:
        ConfigError: two have the same name, or one is empty.
    """
    models: dict[str, str | None] = {}
    for value in values:
        name, equals, path = value.partition("=")
        # A path may contain "=" itself; what stands before it is a name only if Triton could use it as one.
        if not equals or not _MODEL_NAME.fullmatch(name) or Path(value).expanduser().exists():
            name, path = DEFAULT_MODEL_NAME, value
        if not path:
            raise ConfigError(f"model is {shown(value)}: there must be a path or hub id")
        if name in models:
            raise ConfigError(f"model {name!r} is given twice: name each with --model NAME=MODEL")
        models[name] = path
    return models or {DEFAULT_MODEL_NAME: None}


def _check_model_repository(folder: Path, given: list[str]) -> Path:
    """`given`: the options that say what a repository's own files say.

    Raises:
        ConfigError: an option was given, or `folder` is not a model repository.
    """
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(
            f"{options} cannot be used with --model-repository: a model's arguments are in its model.json"
        )
    if not folder.is_dir():
        raise ConfigError(f"model_repository is {shown(str(folder))}: there is no such folder")
    if (folder / "config.pbtxt").exists() or not any(each.is_dir() for each in folder.iterdir()):
        raise ConfigError(
            f"model_repository is {shown(str(folder))}: must be a folder that has a folder for each model"
        )
    return folder


def _serve_repository(folder: Path, ports: _Ports, max_restarts: int, greeting: str) -> NoReturn:
    """Until a signal; raises EngineError when the server cannot start or has died too often."""
    from deepinfer_backend.triton.server import TritonServer
    from deepinfer_backend.triton.server_supervisor import ServerSupervisor
    from deepinfer_backend.triton.tracing import find_traces_endpoint

    with TritonServer(folder, **ports._asdict(), otlp_traces_endpoint=find_traces_endpoint(folder)) as server:
        server.wait_ready(_READY_TIMEOUT_S)
        print(f"\n{greeting}\nCtrl-C ends it.\n", flush=True)
        ServerSupervisor(server, max_restarts=max_restarts, ready_timeout_s=_READY_TIMEOUT_S).run()


def _check_ports(ports: _Ports) -> None:
    """Triton would say so too, far down in its log."""
    named = ports._asdict()
    if len(set(ports)) != len(ports):
        raise ConfigError(f"the ports must differ: {', '.join(f'{name} {port}' for name, port in named.items())}")
    for name, port in named.items():
        with socket.socket() as probe:
            # As the server will do: else a connection of a server that has just ended counts as "in use".
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{name} {port} cannot be used: {error.strerror} ({option} takes another)") from error


class _Stopped(BaseException):
    """SIGTERM or SIGINT came."""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The block ends with the first SIGTERM or SIGINT; later ones do not disturb its cleaning up."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def end(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise _Stopped

    previous = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except _Stopped:
        pass
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _addresses(ports: _Ports) -> str:
    return f"""\
  HTTP     http://localhost:{ports.http_port}
  gRPC     localhost:{ports.grpc_port}
  metrics  http://localhost:{ports.metrics_port}/metrics"""


def _example(model: str, http_port: int) -> str:
    body = '{"text_input": "The capital of France is", "max_tokens": 16, "temperature": 0}'
    return f"Try:\n  curl -s localhost:{http_port}/v2/models/{model}/generate -d '{body}'"


def _run(arguments: list[str]) -> int:
    """Runs the command line `arguments`; returns the exit status."""
    try:
        status = app(arguments or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        return _fail(error.format_message(), _BAD_ARGUMENTS)
    except (ConfigError, InvalidRequestError, UnsupportedModelError) as error:
        return _fail(error.message, _BAD_ARGUMENTS)
    except DeepInferError as error:
        return _fail(error.message, _FAILED)
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter must not try to write the rest on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status
