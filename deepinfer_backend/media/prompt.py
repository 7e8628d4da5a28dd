"""What goes into the media processes and what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.media.medium import Medium

# The two of transformers' own arguments to a chat template that are a client's.
TEMPLATE_SWITCHES = frozenset({"add_generation_prompt", "continue_final_message"})


class MediaPrompt(msgspec.Struct, frozen=True):
    """A prompt that is not tokenized yet, because its media decide how many tokens they are.

    Either `text`, in which the model's own placeholders stand for the media in their order, or the chat template's
    variables: `messages`, in whose contents parts {"type": "image"} and {"type": "video"} do so, `tools` and
    `template_kwargs`.
    """

    media: list[Medium]
    text: str | None = None
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        return sum(len(medium.data) for medium in self.media)

    def without_contents(self) -> MediaPrompt:
        """For a message beside which the media's contents travel, one by one."""
        return msgspec.structs.replace(self, media=[msgspec.structs.replace(medium, data=b"") for medium in self.media])

    def with_contents(self, contents: Sequence[bytes | memoryview]) -> MediaPrompt:
        """Its other end."""
        media = [
            msgspec.structs.replace(medium, data=bytes(data)) for medium, data in zip(self.media, contents, strict=True)
        ]
        return msgspec.structs.replace(self, media=media)


class Tensor(msgspec.Struct, frozen=True):
    """A tensor on its way between processes: dtype as numpy calls it, content in native order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def to_tensor(array: NDArray[Any]) -> Tensor:
    array = np.ascontiguousarray(array)
    return Tensor(array.dtype.str, array.shape, array.reshape(-1).view(np.uint8).data)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """A view of its memory, that nobody may write."""
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


class MediumFeatures(msgspec.Struct, frozen=True):
    """What the vision part of the model is given of one medium, or of a tile or a frame that it encodes by itself.

    `positions`: the tokens of the prompt that it becomes, one after another. `tensors`: arguments of
    `get_image_features`, or of `get_video_features` if `pixel_values_videos` is among them. `digest`: of these.
    """

    digest: bytes
    positions: Tensor
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors.values())


class ProcessedPrompt(msgspec.Struct, frozen=True, tag=True):
    """A prompt as the model computes it. `token_ids`: int32 [num_tokens].

    `rope_positions`: int32 [3, num_tokens], of models with three-part rotary positions (time, height, width); those of
    the tokens that follow all go on from `next_rope_position`. None: a token's position is its place.
    """

    token_ids: Tensor
    media: list[MediumFeatures]
    rope_positions: Tensor | None
    next_rope_position: int

    @property
    def num_bytes(self) -> int:
        return sum(medium.num_bytes for medium in self.media)


class MediaRefused(msgspec.Struct, frozen=True, tag=True):
    """What is wrong with a prompt or its media: a message that names the field."""

    message: str


class MediaWorkerStart(msgspec.Struct, frozen=True):
    """What a media process is for. Limits as in EngineConfig."""

    model_path: str
    max_image_pixels: int
    max_video_frames: int
    num_video_frames: int


class MediaWorkerReady(msgspec.Struct, frozen=True, tag=True):
    """It takes prompts from here on."""


MediaAnswer = ProcessedPrompt | MediaRefused | MediaWorkerReady
