"""GGUF files and the folders that they are loaded from: converted once, ready in seconds afterwards.

A converted folder has the configuration and the tokenizer in Hugging Face's format and a reference to the file, which
native models read their weights from as they are stored (`gguf_weights.py`). For all others the weights are written
into the folder as float32, the first time that they are needed.

A folder, and the weights in it, are complete from the moment they exist: they are written beside their place, under a
lock, and moved there as a whole. What a killed conversion left behind is removed by the next one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from deepinfer_backend.errors import ConfigError, UnsupportedModelError
from deepinfer_backend.models.model_files import (
    check_gguf,
    has_weights,
    one_line,
    referenced_gguf,
    refers_to,
    write_gguf_reference,
)
from deepinfer_backend.progress import Advance, show_progress

logger = logging.getLogger(__name__)

# Part of a converted folder's name: raise it when the conversion's result changes.
_CONVERTER_VERSION = 2


def cache_folder() -> Path:
    """$DEEPINFER_CACHE_DIR, else $XDG_CACHE_HOME/deepinfer, else ~/.cache/deepinfer."""
    if folder := os.environ.get("DEEPINFER_CACHE_DIR"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()).absolute() / "deepinfer"


def converted_folder(gguf_file: Path) -> Path:
    """The folder in Hugging Face format with this file's model and tokenizer; converts it if need be.

    Safe to call from several processes at once: one converts, the others wait.

    Raises:
        UnsupportedModelError: the file is damaged, or holds a model that transformers cannot read from GGUF.
        ConfigError: the cache folder cannot be written.
    """
    check_gguf(gguf_file)
    folder = cache_folder() / "converted" / _folder_name(gguf_file)
    if refers_to(folder, gguf_file):
        return folder
    with _writing_to(folder):
        if folder.is_dir():
            # The same content at another place.
            write_gguf_reference(folder, gguf_file)
        else:
            _convert(gguf_file, folder)
    return folder


def write_float32_weights(folder: Path) -> None:
    """Puts the weights into a converted folder that has none yet; does nothing in other folders.

    Raises:
        UnsupportedModelError: the file that they come from is gone, has changed, or cannot be read by transformers.
        ConfigError: the cache folder cannot be written.
    """
    gguf_file = None if has_weights(folder) else referenced_gguf(folder)
    if gguf_file is None:
        return
    with _writing_to(folder):
        if has_weights(folder):
            return
        partial = folder / ".partial"
        with _removed_at_the_end(partial), show_progress(f"Dequantizing {gguf_file.name} (once)") as advance:
            _write_weights(gguf_file, partial, advance)
            _finish(partial)
            # What names the others comes last.
            for path in sorted(partial.glob("*.safetensors*"), key=lambda path: path.suffix == ".json"):
                path.replace(folder / path.name)


def _folder_name(gguf_file: Path) -> str:
    """Two files share a folder only if their whole contents are equal."""
    from importlib.metadata import version

    with gguf_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{gguf_file.stem}-{digest[:24]}-v{_CONVERTER_VERSION}-transformers-{version('transformers')}"


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Only one process at a time is in here; the kernel lets the next one in when it dies."""
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            yield
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted model to {folder.parent}: {error.strerror or one_line(error)} "
            "(DEEPINFER_CACHE_DIR names another place)"
        ) from error


@contextmanager
def _removed_at_the_end(partial: Path) -> Iterator[None]:
    """An empty folder for what is written and moved from there; what is left of it goes."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf_file: Path, folder: Path) -> None:
    from deepinfer_backend.models.gguf_header import read_gguf_header
    from deepinfer_backend.models.gguf_weights import why_unreadable

    # Under the lock the one partial folder of this name belongs to us, or to somebody who died.
    partial = folder.with_name(f".{folder.name}.partial")
    with (
        _removed_at_the_end(partial),
        show_progress(f"Converting {gguf_file.name} (once)") as advance,
        _one_reader(),
    ):
        reason = why_unreadable(read_gguf_header(gguf_file))
        _write_config(gguf_file, partial)
        _write_tokenizer(gguf_file, partial)
        if reason is not None:
            logger.info("%s is dequantized to float32: %s", gguf_file.name, reason)
            _write_weights(gguf_file, partial, advance)
        write_gguf_reference(partial, gguf_file)
        _finish(partial)
        partial.replace(folder)


def _write_config(gguf_file: Path, folder: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    with _gguf_errors(gguf_file):
        config = AutoConfig.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True, trust_remote_code=False
        )
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _write_tokenizer(gguf_file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    with _gguf_errors(gguf_file):
        tokenizer = AutoTokenizer.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True, trust_remote_code=False
        )
    tokenizer.save_pretrained(folder)


def _write_weights(gguf_file: Path, folder: Path, advance: Advance) -> None:
    """And the configuration of the model that they were loaded into."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GgufConfig

    from deepinfer_backend.models.library_bars import report_loading

    with report_loading(advance), _gguf_errors(gguf_file):
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            # A model of packed weights could not be saved again.
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
        )
    try:
        with report_loading(lambda _: None):
            model.save_pretrained(folder)
    except SafetensorError as error:  # what a full disk looks like from there
        raise OSError(one_line(error)) from error


@contextmanager
def _one_reader() -> Iterator[None]:
    """While the block runs, a file's header is read once: transformers reads it, string by string in Python, for the
    configuration, the tokenizer and the weights."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@contextmanager
def _gguf_errors(gguf_file: Path) -> Iterator[None]:
    """Whatever the reader stumbles over (it raises a dozen kinds) is the file's fault, and says so."""
    try:
        yield
    except MemoryError as error:
        raise UnsupportedModelError(f"{gguf_file} does not fit into memory as float32") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{gguf_file} cannot be read; it is damaged or its architecture is not supported: {one_line(error)}"
        ) from error


def _finish(folder: Path) -> None:
    """Makes the files what an atomic move needs: on the disk, and as readable as the folder is."""
    for path in folder.iterdir():
        # safetensors writes files that only their owner can read; a shared cache has other readers.
        path.chmod(folder.stat().st_mode & 0o666)
        with path.open("rb") as file:
            os.fsync(file.fileno())
