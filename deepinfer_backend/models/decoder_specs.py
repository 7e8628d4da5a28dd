"""DecoderSpecs kept in the cache folder: transformers, whose configuration they come from, takes seconds to import."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec

from deepinfer_backend.models import llama_family
from deepinfer_backend.models.conversion_cache import cache_folder
from deepinfer_backend.models.llama_family import DecoderSpec, decoder_spec, why_not_native
from deepinfer_backend.models.loader import load_config


def read_decoder_spec(folder: Path) -> DecoderSpec | str:
    """What the native decoder computes for the model in `folder`, or the reason why it does not compute it.

    Raises:
        UnsupportedModelError: transformers has no such architecture, or a value in its configuration is wrong.
    """
    kept = cache_folder() / "decoders" / f"{_digest(folder)}.json"
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(kept.read_bytes(), type=DecoderSpec)
    config = load_config(folder)
    reason = why_not_native(config)
    if reason is not None:
        return reason
    spec = decoder_spec(config)
    # A cache that cannot be written costs the next start its time and nothing else.
    with suppress(OSError):
        _write(kept, msgspec.json.encode(spec))
    return spec


def _digest(folder: Path) -> str:
    """Of all that a spec comes from: the model's configuration, and the code here and in transformers that reads it."""
    digest = hashlib.sha256(f"transformers {version('transformers')}\n".encode())
    for path in (Path(llama_family.__file__), folder / "config.json"):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
