"""The process that compiles grammars: one that takes too long or too much memory is ended with it, and nothing else.

Run as `python -m deepinfer_backend.engine.grammar_compiler` by `GrammarQueue`. Frames on stdin and stdout are a
length (4 bytes, little endian) and as many bytes of msgpack: first `Start`, answered by `Ready`; then a
`GrammarSource` after another, each answered by `Compiled` or `Refused`. It ends when its stdin is closed.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from deepinfer_backend.engine.grammar_spec import GrammarSource

if TYPE_CHECKING:
    import xgrammar as xgr

FRAME_LENGTH = struct.Struct("<I")
MAX_COMPILED_BYTES = 128 * 2**20

_NICENESS = 10
_MAX_EXTRA_MEMORY_BYTES = 2 * 2**30
# On top of the queue's own timeout: a compiler whose engine died ends as well.
_ORPHAN_GRACE_S = 5

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
    """One line: what is wrong with the grammar (or, instead of `Ready`, with the tokenizer)."""

    reason: str


Answer = Ready | Compiled | Refused


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not come between the frames.
    os.dup2(2, 1)
    start = msgspec.msgpack.decode(_read_frame(requests), type=Start)
    try:
        info = load_tokenizer_info(Path(start.tokenizer_path), start.vocab_size, start.end_token_ids)
        _write_frame(answers, Ready(str(info.serialize_json())))
    except Exception as error:
        _write_frame(answers, Refused(f"the tokenizer cannot be used for grammars: {one_line(error)}"))
        return
    os.nice(_NICENESS)
    _limit_memory(_MAX_EXTRA_MEMORY_BYTES)
    while frame := _read_frame(requests):
        # Not handled in Python: xgrammar would not return to it.
        signal.setitimer(signal.ITIMER_REAL, start.compile_timeout_s + _ORPHAN_GRACE_S)
        answer = _compile(msgspec.msgpack.decode(frame, type=GrammarSource), info)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write_frame(answers, answer)


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
            return Refused(one_line(RuntimeError(warnings[0])))
        row = np.zeros((1, -(-info.vocab_size // 32)), np.int32)
        xgr.GrammarMatcher(compiled).fill_next_token_bitmask(row)
        if not row.any():
            return Refused("it allows no text that the model's tokens can begin")
        serialized = str(compiled.serialize_json())
    except MemoryError:
        return Refused("it needs too much memory to compile")
    except Exception as error:
        if "bad_alloc" in str(error):
            return Refused("it needs too much memory to compile")
        return Refused(one_line(error))
    if len(serialized) > MAX_COMPILED_BYTES:
        return Refused(f"it has {len(serialized)} bytes when compiled: must be at most {MAX_COMPILED_BYTES}")
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


def _read_frame(stream: IO[bytes]) -> bytes:
    header = stream.read(FRAME_LENGTH.size)
    if len(header) < FRAME_LENGTH.size:
        return b""
    return stream.read(FRAME_LENGTH.unpack(header)[0])


def _write_frame(stream: IO[bytes], message: Answer) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(FRAME_LENGTH.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main()
