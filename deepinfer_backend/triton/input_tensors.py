"""The values in a request's input tensors, copied out of shared memory and checked one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.errors import InvalidRequestError, shown


class InputTensors:
    """A Triton InferenceRequest's tensors by name. Reading one that the client did not send gives None.

    Raises (every method):
        InvalidRequestError: names the tensor, what it holds and what it must.
    """

    def __init__(self, request: Any) -> None:
        self._arrays: dict[str, NDArray[Any]] = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def bool(self, name: str) -> bool | None:
        value = self._element(name)
        return None if value is None else bool(value)

    def text(self, name: str) -> str | None:
        value = self._element(name)
        return None if value is None else decode_text(name, value)

    def elements(self, name: str) -> list[bytes]:
        """Of a STRING tensor with one dimension, as they are; none if the client did not send it."""
        array = self._arrays.get(name)
        if array is None:
            return []
        if array.ndim != 1:
            raise InvalidRequestError(f"{name} has shape {list(array.shape)}: must be [number of them]")
        return [value if isinstance(value, bytes) else str(value).encode() for value in array]

    def token_ids(self, name: str) -> NDArray[np.int32] | None:
        array = self._arrays.get(name)
        if array is None:
            return None
        if array.ndim != 1:
            raise InvalidRequestError(f"{name} has shape {list(array.shape)}: must be [number of tokens]")
        return np.array(array, dtype=np.int32)  # a copy: the tensor is a view of shared memory

    def _element(self, name: str) -> Any:
        array = self._arrays.get(name)
        if array is None:
            return None
        if array.shape != (1,):
            raise InvalidRequestError(f"{name} has shape {list(array.shape)}: must be [1] (one prompt in a request)")
        return array[0]


def decode_text(name: str, value: Any) -> str:
    """One element of a STRING tensor.

    Raises:
        InvalidRequestError: it is not UTF-8.
    """
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", errors="surrogatepass")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid UTF-8: byte {shown(data[error.start : error.start + 1])} at {error.start}"
        ) from None
