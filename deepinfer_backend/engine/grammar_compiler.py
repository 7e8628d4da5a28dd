"""The process that compiles grammars, each in a fork of its own: one that takes too long or too much memory ends alone.

Run as `python -m deepinfer_backend.engine.grammar_compiler` by `GrammarQueue`. Frames as in `helper_process`, of
msgpack: first `Start`, answered by `Ready`; then a `GrammarSource` after another, each answered by `Compiled` or
`Refused`.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from deepinfer_backend.engine.grammar_spec import GrammarSource
from deepinfer_backend.helper_process import describe_exit, read_frame, take_over_output, write_frame

if TYPE_CHECKING:
    import xgrammar as xgr

MAX_COMPILED_BYTES = 128 * 2**20

_NICENESS = 10
_MAX_EXTRA_MEMORY_BYTES = 2 * 2**30

_LOCATION = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")


class Start(msgspec.Struct, frozen=True):
    """What all grammars are compiled for."""

    tokenizer_path: str
    vocab_size: int
    """Columns of the model's logits: may be more or fewer than the tokenizer has tokens."""
    end_token_ids: list[int]
    compile_timeout_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    tokenizer_info: str
    """xgrammar's serialized TokenizerInfo."""


class Compiled(msgspec.Struct, frozen=True, tag=True):
    grammar: str
    """xgrammar's serialized CompiledGrammar."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What is wrong with the grammar, as the rest of a sentence that begins with its name.

    Instead of `Ready`: what is wrong with the tokenizer.
    """

    reason: str


Answer = Ready | Compiled | Refused


def main() -> None:
    requests, answers = sys.stdin.buffer, take_over_output()
    start = msgspec.msgpack.decode(read_frame(requests), type=Start)
    try:
        info = load_tokenizer_info(Path(start.tokenizer_path), start.vocab_size, start.end_token_ids)
        write_frame(answers, msgspec.msgpack.encode(Ready(str(info.serialize_json()))))
    except Exception as error:
        refused = Refused(f"the tokenizer cannot be used for grammars: {one_line(error)}")
        write_frame(answers, msgspec.msgpack.encode(refused))
        return
    while frame := read_frame(requests):
        answer = _compile_in_fork(msgspec.msgpack.decode(frame, type=GrammarSource), info, start.compile_timeout_s)
        write_frame(answers, msgspec.msgpack.encode(answer))


def load_tokenizer_info(tokenizer_path: Path, vocab_size: int, end_token_ids: list[int]) -> xgr.TokenizerInfo:
    """The bytes of each token of a model, as xgrammar wants them.

    Special tokens have none: they leave no trace in the text, so no grammar can ask for them.
    """
    import xgrammar as xgr

    from deepinfer_backend.models.loader import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer is None:
        raise ValueError(f"{tokenizer_path} has none")
    detected = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=end_token_ids)
    vocabulary = list(detected.decoded_vocab)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token_id < vocab_size:
            vocabulary[token_id] = b"" if token.special else token.content.encode()
    for token_id in tokenizer.all_special_ids:
        if token_id < vocab_size:
            vocabulary[token_id] = b""
    return xgr.TokenizerInfo(
        vocabulary,
        xgr.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=end_token_ids,
        add_prefix_space=detected.add_prefix_space,
    )


def one_line(error: BaseException) -> str:
    """An xgrammar message without where in its source it comes from."""
    text = " ".join(_LOCATION.sub("", str(error)).split())
    return text or type(error).__name__


def _compile_in_fork(source: GrammarSource, info: xgr.TokenizerInfo, timeout_s: float) -> Compiled | Refused:
    """A fork needs no start, and takes back all that a compilation has allocated, locked or broken."""
    file = os.memfd_create("compiled-grammar")
    try:
        pid = os.fork()
        if pid == 0:
            _compile_and_exit(source, info, timeout_s, file)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            os.lseek(file, 0, os.SEEK_SET)
            with os.fdopen(os.dup(file), "rb") as reader:
                answer: Compiled | Refused = msgspec.msgpack.decode(reader.read(), type=Compiled | Refused)
                return answer
    finally:
        os.close(file)
    if code == -signal.SIGALRM:
        return Refused(f"takes longer than {timeout_s:g} s to compile (grammar_compile_timeout_s)")
    return Refused(f"cannot be compiled: the compiler ended with {describe_exit(code)}")


def _compile_and_exit(source: GrammarSource, info: xgr.TokenizerInfo, timeout_s: float, file: int) -> NoReturn:
    """The whole life of a fork: exit status 0 when there is an answer in `file`."""
    try:
        # Python does not handle it, so it ends the process wherever it is.
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        os.nice(_NICENESS)
        _limit_memory(_MAX_EXTRA_MEMORY_BYTES)
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(msgspec.msgpack.encode(_compile(source, info)))
        os._exit(0)
    finally:
        os._exit(1)


def _compile(source: GrammarSource, info: xgr.TokenizerInfo) -> Compiled | Refused:
    import numpy as np
    import xgrammar as xgr

    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compile_source: dict[str, Callable[[], Any]] = {
        # No whitespace but one space after a comma and a colon: a model cannot fill a text with it.
        "json": lambda: compiler.compile_json_schema(source.text, any_whitespace=False),
        "regex": lambda: compiler.compile_regex(source.text),
        "grammar": lambda: compiler.compile_grammar(source.text),
    }
    try:
        with _warnings() as warnings:
            compiled = compile_source[source.kind]()
        # xgrammar warns where it ignores something.
        if warnings:
            return Refused(f"cannot be used: {warnings[0]}")
        row = np.zeros((1, -(-info.vocab_size // 32)), np.int32)
        xgr.GrammarMatcher(compiled).fill_next_token_bitmask(row)
        if not row.any():
            return Refused("allows no text that the model's tokens can begin")
        serialized = str(compiled.serialize_json())
    except MemoryError:
        return Refused("needs too much memory to compile")
    except Exception as error:
        if "bad_alloc" in str(error):
            return Refused("needs too much memory to compile")
        return Refused(f"cannot be used: {one_line(error)}")
    if len(serialized) > MAX_COMPILED_BYTES:
        return Refused(f"has {len(serialized)} bytes when compiled: must be at most {MAX_COMPILED_BYTES}")
    return Compiled(serialized)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects the lines that native code writes to stderr with the word Warning in them."""
    lines: list[str] = []
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            printed = file.read().decode(errors="replace")
            lines += [line.split("Warning: ", 1)[1] for line in printed.splitlines() if "Warning: " in line]


def _limit_memory(extra_bytes: int) -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A crash is an answer here, not a finding.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
