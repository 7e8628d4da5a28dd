"""Turns the progress bars of transformers' loading into ours: the only place that knows where it draws them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepinfer_backend.progress import Advance


class _Bar:
    """What transformers uses of a tqdm bar: to iterate over it, and `update`."""

    def __init__(self, iterable: Iterable[Any] | None, total: int | None, advance: Advance) -> None:
        self._iterable = iterable
        self._total = total or (len(iterable) if hasattr(iterable, "__len__") else 0)  # type: ignore[arg-type]
        self._advance = advance
        self._num_done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable or ():
            yield item
            self.update()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, num_items: int = 1) -> None:
        self._num_done += num_items
        if self._total:
            self._advance(self._num_done / self._total)

    def set_postfix(self, *_: object, **__: object) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def report_loading(advance: Advance) -> Iterator[None]:
    """While the block runs, what transformers would draw as bars goes to `advance`."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loading
    from transformers.utils import logging as transformers_logging

    def make_bar(iterable: Iterable[Any] | None = None, *_: Any, total: int | None = None, **__: Any) -> _Bar:
        return _Bar(iterable, total, advance)

    previous_hook = transformers_logging.set_tqdm_hook(lambda _, args, kwargs: make_bar(*args, **kwargs))
    # The GGUF reader takes its bar from tqdm directly, past the hook.
    previous_tqdm = gguf_loading.tqdm
    gguf_loading.tqdm = make_bar
    try:
        yield
    finally:
        gguf_loading.tqdm = previous_tqdm
        transformers_logging.set_tqdm_hook(previous_hook)
