"""The values in the tensors of a request with a batch dimension, copied out of shared memory and checked one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.triton.input_tensors import decode_text


class BatchedInputs:
    """A Triton InferenceRequest's tensors by name, without the batch dimension in front. One not sent gives None.

    Raises (every method):
        InvalidRequestError: names the tensor, what it holds and what it must.
    """

    def __init__(self, request: Any) -> None:
        self._arrays: dict[str, NDArray[Any]] = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}

    def asks_for(self, name: str) -> bool:
        """Whether it holds anything but zeros, false and empty texts, which clients send for what they do not use."""
        array = self._arrays.get(name)
        if array is None:
            return False
        return any(array.ravel()) if array.dtype == np.object_ else bool(np.any(array))

    def boolean(self, name: str) -> bool | None:
        value = self._scalar(name)
        return None if value is None else bool(value)

    def integer(self, name: str) -> int | None:
        value = self._scalar(name)
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        value = self._scalar(name)
        if value is None:
            return None
        if not math.isfinite(value):
            raise InvalidRequestError(f"{name} is {value}: must be a finite number")
        return float(value)

    def text(self, name: str) -> str | None:
        value = self._scalar(name)
        return None if value is None else decode_text(name, value)

    def texts(self, name: str) -> list[str]:
        return [decode_text(name, value) for value in self._row(name, 1, "[1, number of texts]").ravel()]

    def vector(self, name: str) -> NDArray[Any]:
        """[length]; of length 0 if it was not sent."""
        return np.array(self._row(name, 1, "[1, length]"))

    def pixels(self, name: str) -> NDArray[np.uint8]:
        """[number of images, height, width, channels]; of length 0 if it was not sent."""
        return np.array(self._row(name, 4, "[1, number of them, height, width, 3]"), dtype=np.uint8)

    def word_list(self, name: str) -> list[list[int]]:
        """The token sequences in a [2, length] tensor: all their tokens, and where each of them ends; -1 fills up."""
        shape = "[1, 2, length]"
        row = self._row(name, 2, shape)
        if row.size == 0:
            return []
        if len(row) != 2:
            raise InvalidRequestError(f"{name} has shape {list(self._arrays[name].shape)}: must be {shape}")
        token_ids, ends = row.tolist()
        words: list[list[int]] = []
        begin = 0
        for end in ends:
            if end == -1:
                break
            if not begin <= end <= len(token_ids):
                raise InvalidRequestError(
                    f"{name} has the offset {end}: must be {begin} to {len(token_ids)}, or -1 after the last"
                )
            words.append(token_ids[begin:end])
            begin = end
        return [word for word in words if word]

    def _scalar(self, name: str) -> Any:
        if name not in self._arrays:
            return None
        # A config.pbtxt may have taken the dimension away ("reshape: { shape: [] }"): what is left is the batch's.
        row = self._row(name, 1, "[1, 1]")
        if row.size != 1:
            raise InvalidRequestError(f"{name} has shape {list(self._arrays[name].shape)}: must be [1, 1]")
        return row.item()

    def _row(self, name: str, num_dims: int, shape: str) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            return np.empty([0] * num_dims)
        if array.ndim == num_dims + 1 and len(array) == 1:
            return array[0]  # type: ignore[no-any-return]
        if array.ndim == num_dims:
            return array
        raise InvalidRequestError(f"{name} has shape {list(array.shape)}: must be {shape} (one prompt in a request)")
