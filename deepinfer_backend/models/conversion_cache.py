"""GGUF files, converted once into folders that load in seconds.

A converted folder is complete from the moment it exists: it is written beside its place, under a lock, and moved
there as a whole. What a killed conversion left behind is removed by the next one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer_backend.errors import ConfigError, UnsupportedModelError
from deepinfer_backend.models.model_files import check_gguf, one_line
from deepinfer_backend.progress import Advance, show_progress

# Part of a converted folder's name: raise it when the conversion's result changes.
_CONVERTER_VERSION = 1
# Where the bar stands when a part of the work is done. transformers reads the whole header, string by string in
# Python, for the configuration, the weights and the tokenizer: most of the time of a small model.
_SHARE_HEADER, _SHARE_WEIGHTS, _SHARE_TOKENIZER = 0.1, 0.8, 0.95


def cache_folder() -> Path:
    """$DEEPINFER_CACHE_DIR, else $XDG_CACHE_HOME/deepinfer, else ~/.cache/deepinfer."""
    if folder := os.environ.get("DEEPINFER_CACHE_DIR"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()).absolute() / "deepinfer"


def converted_folder(gguf_file: Path) -> Path:
    """The folder in Hugging Face format with this file's model (float32) and tokenizer; converts it if need be.

    Safe to call from several processes at once: one converts, the others wait.

    Raises:
        UnsupportedModelError: the file is damaged, or holds a model that transformers cannot read from GGUF.
        ConfigError: the cache folder cannot be written.
    """
    check_gguf(gguf_file)
    folder = cache_folder() / "converted" / _folder_name(gguf_file)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not folder.is_dir():
                _convert(gguf_file, folder)
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted model to {folder.parent}: {error.strerror or one_line(error)} "
            "(DEEPINFER_CACHE_DIR names another place)"
        ) from error
    return folder


def _folder_name(gguf_file: Path) -> str:
    """Two files share a folder only if their whole contents are equal."""
    from importlib.metadata import version

    with gguf_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{gguf_file.stem}-{digest[:24]}-v{_CONVERTER_VERSION}-transformers-{version('transformers')}"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by the one process that converts into `folder`; the kernel frees it when that process dies."""
    from filelock import FileLock

    with FileLock(folder.with_name(f".{folder.name}.lock")):
        yield


def _convert(gguf_file: Path, folder: Path) -> None:
    """Only under the lock: then the one partial folder of this name belongs to us, or to somebody who died."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with show_progress(f"Converting {gguf_file.name} (once)") as advance:
            _write_model(gguf_file, partial, advance)
            _write_tokenizer(gguf_file, partial)
            advance(_SHARE_TOKENIZER)
            _finish(partial)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_model(gguf_file: Path, folder: Path, advance: Advance) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GgufConfig

    from deepinfer_backend.models.library_bars import report_loading

    def advance_weights(share: float) -> None:
        advance(_SHARE_HEADER + share * (_SHARE_WEIGHTS - _SHARE_HEADER))

    with report_loading(advance_weights), _gguf_errors(gguf_file):
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


def _write_tokenizer(gguf_file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    with _gguf_errors(gguf_file):
        tokenizer = AutoTokenizer.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True, trust_remote_code=False
        )
    tokenizer.save_pretrained(folder)


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
