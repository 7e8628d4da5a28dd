"""What lies in a model's folder: found missing, damaged or unsafe here, with the file's name, before torch sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer_backend.errors import UnsupportedModelError

WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

_GGUF_REFERENCE_NAME = "gguf_file.json"
_GGUF_MAGIC = b"GGUF"
_MAX_JSON_BYTES = 64 << 20


def check_model_folder(folder: Path) -> None:
    """Raises UnsupportedModelError naming the first file of `folder` that is missing or cannot be used."""
    config = folder / "config.json"
    if not config.is_file():
        gguf_names = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; it holds {', '.join(gguf_names[:3])}: name that file as the model" if gguf_names else ""
        raise UnsupportedModelError(f"{folder} is not a model folder: it has no config.json{hint}")
    if "model_type" not in read_json(config):
        raise UnsupportedModelError(f"{config} names no model_type")
    if not has_weights(folder) and referenced_gguf(folder) is not None:
        return
    for path in weight_files(folder):
        _check_safetensors(path)


def has_weights(folder: Path) -> bool:
    """Whether there are weights in safetensors format."""
    return any((folder / name).is_file() for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model's weights; all of them exist."""
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    index = folder / WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise UnsupportedModelError(_describe_missing_weights(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModelError(f"{index} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    for name in sorted(names):
        # A name with a folder in it could point outside of the model.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsupportedModelError(f"{index} names {name!r}, which is not a safetensors file beside it")
        if not (folder / name).is_file():
            raise UnsupportedModelError(f"{folder / name} is missing ({index.name} names it)")
    return [folder / name for name in sorted(names)]


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_NAMES)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        UnsupportedModelError: it is unreadable, damaged or not an object.
    """
    if path.is_file() and path.stat().st_size > _MAX_JSON_BYTES:
        raise UnsupportedModelError(f"{path} is larger than {_MAX_JSON_BYTES} bytes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read as JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is not a JSON object")
    return content


def check_gguf(path: Path) -> None:
    """Raises UnsupportedModelError when `path` does not begin as a GGUF file does."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise UnsupportedModelError(f"{path} is not a GGUF file: it does not begin with {_GGUF_MAGIC.decode()!r}")


def referenced_gguf(folder: Path) -> Path | None:
    """The GGUF file that a converted folder was made from; None if `folder` is none.

    Raises:
        UnsupportedModelError: that file is gone, or is another one since.
    """
    reference = folder / _GGUF_REFERENCE_NAME
    if not reference.is_file():
        return None
    gguf_file = Path(str(read_json(reference).get("path")))
    if not refers_to(folder, gguf_file):
        raise UnsupportedModelError(
            f"{folder} was made from {gguf_file}, which is no longer there or has changed: name that file as the model"
        )
    return gguf_file


def refers_to(folder: Path, gguf_file: Path) -> bool:
    """Whether `folder` was made from this file, and the file is still the same."""
    reference = folder / _GGUF_REFERENCE_NAME
    return reference.is_file() and gguf_file.is_file() and read_json(reference) == _gguf_reference(gguf_file)


def write_gguf_reference(folder: Path, gguf_file: Path) -> None:
    written = folder / f".{_GGUF_REFERENCE_NAME}"
    written.write_text(json.dumps(_gguf_reference(gguf_file)), encoding="utf-8")
    written.replace(folder / _GGUF_REFERENCE_NAME)


def one_line(error: BaseException) -> str:
    """A library's error as the end of one of our messages."""
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__


def _gguf_reference(gguf_file: Path) -> dict[str, str | int]:
    """Its size and time tell a file from another of its name without reading it."""
    status = gguf_file.stat()
    return {"path": str(gguf_file), "num_bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        # Opening reads the header and compares it with the file's size; no tensor is read.
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise UnsupportedModelError(f"{path} is damaged or incomplete: {one_line(error)}") from error


def _describe_missing_weights(folder: Path) -> str:
    text = f"{folder} has no weights: neither {WEIGHTS_NAME} nor {WEIGHTS_INDEX_NAME}"
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        text += f"; {pickled[0]} is a pickle, which can run code and is never loaded: convert it to safetensors"
    return text
