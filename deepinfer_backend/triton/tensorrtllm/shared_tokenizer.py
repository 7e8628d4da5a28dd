"""The tokenizer of a model that needs no engine: of a folder, or of the engine that another model owns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from deepinfer_backend.engine.engine_info_file import read_engine_info
from deepinfer_backend.engine.engine_link import follow
from deepinfer_backend.engine.input_processor import max_prompt_chars
from deepinfer_backend.engine.messages import EngineInfo
from deepinfer_backend.errors import ConfigError, DeepInferError, UnavailableError, UnsupportedModelError, shown
from deepinfer_backend.models.loader import load_tokenizer, resolve_tokenizer
from deepinfer_backend.triton.engine_folder import ENGINE_OF, engine_folder

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.2
_TOKENIZER_LIBRARY = "transformers.models.auto.tokenization_auto"


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A transformers tokenizer, and what is known of the model that it is for.

    `vocab_size`: the width of the model's logits, or how many tokens the tokenizer has where no model is known.
    `max_chars`: no longer text can be a prompt; None: not known.
    """

    tokenizer: Any
    vocab_size: int
    max_chars: int | None


class TokenizerSource(Protocol):
    def get(self) -> LoadedTokenizer:
        """Raises DeepInferError: there is none, or none yet (UnavailableError)."""
        ...

    def close(self) -> None: ...


def find_tokenizer(tokenizer_dir: str, arguments: Mapping[str, Any]) -> TokenizerSource:
    """`tokenizer_dir`: a folder or hub id, loaded at once; if it is "", that of the model that `engine_of` names.

    Raises:
        ConfigError: neither is there, or they are not what they must be.
        UnsupportedModelError: the tokenizer's files are damaged.
    """
    if tokenizer_dir:
        return FolderTokenizer(tokenizer_dir)
    owner = arguments.get(ENGINE_OF)
    if not isinstance(owner, str) or not owner:
        raise ConfigError(
            f"{ENGINE_OF} in model.json is {shown(owner)}: must be the name of the model whose tokenizer this is "
            "(or config.pbtxt must have tokenizer_dir)"
        )
    return EngineTokenizer(engine_folder(owner, rank=0), owner)


class FolderTokenizer:
    """That of a folder or hub id, from the beginning to the end."""

    def __init__(self, tokenizer_dir: str) -> None:
        tokenizer = load_tokenizer(resolve_tokenizer(tokenizer_dir, Path()))
        assert tokenizer is not None
        self._loaded = LoadedTokenizer(tokenizer, len(tokenizer), None)

    def get(self) -> LoadedTokenizer:
        return self._loaded

    def close(self) -> None:
        """Nothing: it owns no thread."""


class EngineTokenizer:
    """That of another model's engine, which may not be there yet: a thread of its own loads it as soon as it is.

    When another engine takes that one's place, with another model, its tokenizer is loaded.
    """

    def __init__(self, link: Path, owner: str) -> None:
        """`link` leads to the engine's folder; `owner`: for messages, the name of the model whose engine it is."""
        self._link = link
        self._owner = owner
        self._lock = threading.Lock()  # guards _loaded and _info; held while a tokenizer or its library is loaded
        self._loaded: LoadedTokenizer | None = None
        self._info: EngineInfo | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._load_early, name="deepinfer-tokenizer", daemon=True)
        self._thread.start()

    def get(self) -> LoadedTokenizer:
        """Waits for one that is being loaded, never for the engine."""
        with self._lock:
            folder = follow(self._link)
            info = None if folder is None else read_engine_info(folder)
            # An engine that is being restarted has the same tokenizer as before.
            if info is not None and info != self._info:
                self._loaded = self._load(info)
                self._info = info
            if self._loaded is None:
                raise UnavailableError(f"the engine of {self._owner} is not ready", reason="engine")
            return self._loaded

    def close(self) -> None:
        self._closing.set()

    def _load(self, info: EngineInfo) -> LoadedTokenizer:
        tokenizer = None if info.config["skip_tokenizer_init"] else load_tokenizer(Path(info.tokenizer_path))
        if tokenizer is None:
            raise UnsupportedModelError(f"model {self._owner} has no tokenizer: set tokenizer_dir in config.pbtxt")
        return LoadedTokenizer(tokenizer, info.vocab_size, max_prompt_chars(info))

    def _load_early(self) -> None:
        """So that the first request need not wait for it."""
        with self._lock:  # what a request loads meanwhile would find modules that are half made
            import_module(_TOKENIZER_LIBRARY)  # takes as long as an engine to start: side by side
        while not self._closing.wait(_LOOK_INTERVAL_S):
            try:
                self.get()
            except UnavailableError:
                continue
            except DeepInferError as error:
                logger.error("%s", error)
            return
