"""Which LoRA adapters are in memory: loaded when a request first asks, unloaded when another needs the place."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from deepinfer_backend.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    nearest_name,
    shown,
)
from deepinfer_backend.models.lora import LoraLayers
from deepinfer_backend.models.lora_adapter import LoraAdapter, read_lora_adapter, read_lora_layout

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_SHOWN_NAMES = 10


class RunOnStream(Protocol):
    def __call__(self, work: Callable[[], T], /) -> T:
        """Runs work on the device's stream and waits for it; raises what it raised."""


@dataclass(slots=True)
class _Loaded:
    lora_id: int
    num_requests: int = 0


class AdapterCache:
    """Owns the configured adapters' names and which of them are in memory.

    1. At most `max_loras` adapters are in memory; one that a request uses stays there.
    2. A lora_id means one adapter as it was loaded once: it is never given a second time, so what was computed with
       it (cached prefixes) cannot be mistaken for another's.
    3. A failed `acquire` is as if nobody had asked, but that an unused adapter may have been unloaded.

    `acquire` and `release` come in pairs, one per request. Owned by the thread that steps the engine.
    """

    def __init__(
        self,
        layers: LoraLayers,
        lora_modules: Mapping[str, str],
        *,
        max_loras: int,
        max_lora_rank: int,
        run_on_stream: RunOnStream,
    ) -> None:
        self._layers = layers
        self._folders = {name: Path(folder).expanduser() for name, folder in lora_modules.items()}
        self._max_loras = max_loras
        self._max_lora_rank = max_lora_rank
        self._run_on_stream = run_on_stream
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # the least recently used first
        self._next_lora_id = 1

    def check_configured(self) -> None:
        """Reads every adapter's configuration and shapes, but no numbers.

        Raises:
            ConfigError: one of them cannot be used with this model; the message names it.
        """
        for name, folder in self._folders.items():
            self._layers.check(read_lora_layout(name, folder, self._max_lora_rank))

    def check_known(self, name: str) -> None:
        """
        Raises:
            InvalidRequestError: no adapter of this name is configured.
        """
        if name not in self._folders:
            raise InvalidRequestError(self._describe_unknown(name))

    def is_loaded(self, name: str) -> bool:
        """Whether it is in memory, so that one more request can have it at once."""
        return name in self._loaded

    def acquire(self, name: str) -> int | None:
        """The lora_id (at least 1) of the adapter for one more request; loads it if need be, waiting for the device.

        None while requests use `max_loras` others: it has no place until one of them is released by all.

        Raises:
            InvalidRequestError: no adapter of this name is configured.
            EngineError: it can no longer be loaded.
        """
        self.check_known(name)
        loaded = self._loaded.get(name)
        if loaded is None:
            is_full = len(self._loaded) >= self._max_loras
            unused = self._find_unused() if is_full else None
            if is_full and unused is None:
                return None
            loaded = self._load(name, unused)
        loaded.num_requests += 1
        self._loaded.move_to_end(name)
        return loaded.lora_id

    def release(self, name: str) -> None:
        """Ends one request's use of the adapter, which stays in memory until its place is needed."""
        loaded = self._loaded[name]
        assert loaded.num_requests > 0
        loaded.num_requests -= 1
        self._loaded.move_to_end(name)

    @property
    def loaded_names(self) -> list[str]:
        """The adapters in memory, the least recently used first."""
        return list(self._loaded)

    def _load(self, name: str, unused: str | None) -> _Loaded:
        """`unused`: the one whose place it takes."""
        lora_id = self._next_lora_id
        try:
            adapter = self._run_on_stream(lambda: self._read(name))
            if unused is not None:
                self._unload(unused)
            self._run_on_stream(lambda: self._layers.load(lora_id, adapter))
        except (ConfigError, torch.OutOfMemoryError, MemoryError) as error:
            logger.error("%s", error)
            raise EngineError(f"lora_name {shown(name)} cannot be loaded; the log has the reason") from error
        self._next_lora_id += 1
        loaded = self._loaded[name] = _Loaded(lora_id)
        return loaded

    def _read(self, name: str) -> LoraAdapter:
        adapter = read_lora_adapter(name, self._folders[name], self._max_lora_rank)
        self._layers.check(adapter.layout)
        return adapter

    def _unload(self, name: str) -> None:
        lora_id = self._loaded.pop(name).lora_id
        # In its turn: a step in flight may still compute with it.
        self._run_on_stream(lambda: self._layers.unload(lora_id))

    def _find_unused(self) -> str | None:
        return next((name for name, loaded in self._loaded.items() if loaded.num_requests == 0), None)

    def _describe_unknown(self, name: str) -> str:
        if not self._folders:
            return f"lora_name is {shown(name)}: no adapters are configured (lora_modules)"
        known = ", ".join(map(shown, list(self._folders)[:_MAX_SHOWN_NAMES]))
        more = f" or {len(self._folders) - _MAX_SHOWN_NAMES} others" if len(self._folders) > _MAX_SHOWN_NAMES else ""
        return f"lora_name is {shown(name)}: must be one of {known}{more}{nearest_name(name, self._folders)}"
