"""A prompt with media → token ids and features, with the model's own transformers processor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils.chat_template_utils import _get_template_variables
from transformers.video_utils import VideoMetadata

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.media.decoding import DecodedVideo, DecodingLimits, decode_image, decode_video
from deepinfer_backend.media.medium import Medium
from deepinfer_backend.media.prompt import (
    TEMPLATE_SWITCHES,
    MediaPrompt,
    MediumFeatures,
    ProcessedPrompt,
    Tensor,
    to_tensor,
)
from deepinfer_backend.models.loader import load_config
from deepinfer_backend.models.model_files import one_line
from deepinfer_backend.models.vision_families import Kind, vision_family

_DIGEST_BYTES = 16
# Their processors ask where in the text a token came from, which nobody knows of a text whose special tokens were made
# harmless.
_NEED_OFFSETS = frozenset({"idefics3"})


class PromptProcessor:
    """Owns a model's processor. Not for several threads at a time.

    Raises (constructor):
        UnsupportedModelError: the model is of none of the known families.
        Exception: whatever transformers raises about the processor's files.
    """

    def __init__(self, path: Path, limits: DecodingLimits) -> None:
        family = vision_family(path)
        assert family is not None
        self._limits = limits
        self._mixes_kinds = family.mixes_kinds
        self._processor: Any = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config = load_config(path)
        self._model_type: str = config.model_type
        self._rope_model: Any = None
        if family.has_rope_positions:
            # Where positions are is a method of the model, which needs nothing of it but its configuration.
            with torch.device("meta"):
                self._rope_model = AutoModelForImageTextToText.from_config(config).model
        self._replacements: list[dict[str, Any]] = []
        self._keep_replacements()

    def process(self, prompt: MediaPrompt) -> ProcessedPrompt:
        """
        Raises:
            InvalidRequestError: a medium is damaged or exceeds a limit, or the prompt does not go with its media.
        """
        if not self._mixes_kinds and len({medium.kind for medium in prompt.media}) > 1:
            raise InvalidRequestError(
                f"{_fields(prompt.media)}: this model takes images or videos: must not have both in one request"
            )
        images = [decode_image(medium, self._limits) for medium in prompt.media if medium.kind == "image"]
        videos = [decode_video(medium, self._limits) for medium in prompt.media if medium.kind == "video"]
        self._replacements = []
        try:
            inputs = self._run_processor(prompt, images, videos)
        except (InvalidRequestError, MemoryError):
            raise
        except Exception as error:  # a processor can raise anything about an image, a template anything at all
            raise InvalidRequestError(
                f"{_fields(prompt.media)}: the model's processor refuses them: {one_line(error)}"
            ) from error
        token_ids = np.asarray(inputs["input_ids"]).reshape(-1).astype(np.int32)
        positions = None if self._rope_model is None else self._rope_positions(token_ids, inputs)
        media = list(self._features(prompt, token_ids, positions, inputs))
        if positions is None:
            return ProcessedPrompt(to_tensor(token_ids), media, None, 0)
        return ProcessedPrompt(to_tensor(token_ids), media, to_tensor(positions), int(positions.max()) + 1)

    def _run_processor(self, prompt: MediaPrompt, images: list[Any], videos: list[DecodedVideo]) -> Any:
        options: dict[str, Any] = {"return_tensors": "pt"}
        if videos:
            options |= {"video_metadata": [_metadata(video) for video in videos], "do_sample_frames": False}
        frames = [video.frames for video in videos]
        if prompt.text is not None:
            media = {name: given for name, given in (("images", images), ("videos", frames)) if given}
            return self._processor(text=[prompt.text], **media, **options)
        may_sanitize = self._model_type not in _NEED_OFFSETS
        if not may_sanitize:
            self._refuse_special_tokens(prompt)
        return self._processor.apply_chat_template(
            _with_media(prompt.messages, images, frames),
            tools=prompt.tools,
            tokenize=True,
            return_dict=True,
            sanitize_control_tokens=may_sanitize,
            return_tensors=options.pop("return_tensors"),
            processor_kwargs=options,
            **self._template_kwargs(prompt),
        )

    def _template_kwargs(self, prompt: MediaPrompt) -> dict[str, Any]:
        """What of the request's variables the template knows: the library gives the others to the processor, where
        `images` could be an address to fetch.
        """
        known = TEMPLATE_SWITCHES
        has_own_template = self._model_type != "smolvlm" or all(medium.kind == "image" for medium in prompt.media)
        if has_own_template and isinstance(self._processor.chat_template, str):
            known = known | _get_template_variables(self._processor.chat_template)
        return {name: value for name, value in prompt.template_kwargs.items() if name in known}

    def _refuse_special_tokens(self, prompt: MediaPrompt) -> None:
        given = json.dumps([prompt.messages, prompt.tools, prompt.template_kwargs], ensure_ascii=False)
        for token in self._processor.tokenizer.all_special_tokens:
            if token in given:
                raise InvalidRequestError(f"messages: has {token!r}, a special token: must be left out beside media")

    def _keep_replacements(self) -> None:
        """What stands for each medium in the text, which the processor knows and does not always tell."""
        expand = self._processor.get_text_with_replacements

        def expand_and_keep(*args: Any, **kwargs: Any) -> tuple[list[str], list[Any]]:
            texts, replacements = expand(*args, **kwargs)
            self._replacements = [each for of_text in replacements for each in of_text]
            return texts, replacements

        self._processor.get_text_with_replacements = expand_and_keep

    def _features(
        self, prompt: MediaPrompt, token_ids: NDArray[np.int32], positions: NDArray[np.int32] | None, inputs: Any
    ) -> Iterator[MediumFeatures]:
        """In the order of the text. The n-th place of a medium is the n-th placeholder in the token ids."""
        placeholder_ids = {"image": self._processor.image_token_ids[0], "video": self._video_token_id()}
        places = np.flatnonzero(np.isin(token_ids, list(placeholder_ids.values())))
        text_of = {
            kind: self._processor.tokenizer.convert_ids_to_tokens(token_id)
            for kind, token_id in placeholder_ids.items()
        }
        numbers: dict[Kind, int] = {"image": 0, "video": 0}
        begin = 0
        split = _Split(self._model_type, self._processor, inputs)
        if len(self._replacements) != len(prompt.media):
            raise InvalidRequestError(
                f"{_fields(prompt.media)}: the prompt has placeholders for {len(self._replacements)}: must have one "
                f"for each of {len(prompt.media)}"
            )
        for replacement in self._replacements:
            kind: Kind = replacement["type"]
            num_tokens = replacement["replacement"].count(text_of[kind])
            parts = split.parts_of(kind, numbers[kind], num_tokens)
            for given in parts:
                tensors = {name: to_tensor(value.numpy()) for name, value in given.items()}
                own_places = places[begin : begin + num_tokens // len(parts)]
                yield MediumFeatures(_digest(kind, tensors, own_places, positions), to_tensor(own_places), tensors)
                begin += len(own_places)
            numbers[kind] += 1
        if begin != len(places):
            raise InvalidRequestError(
                f"{_fields(prompt.media)}: the prompt has {len(places)} tokens that stand for media, these are {begin}"
            )

    def _video_token_id(self) -> int:
        token_id = self._processor.video_token_ids[0]
        # A video may be nothing but its frames.
        known = token_id is not None and token_id != self._processor.tokenizer.unk_token_id
        return int(token_id if known else self._processor.image_token_ids[0])

    def _rope_positions(self, token_ids: NDArray[np.int32], inputs: Any) -> NDArray[np.int32]:
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        positions, _ = self._rope_model.get_rope_index(
            torch.from_numpy(token_ids)[None].long(),
            torch.as_tensor(inputs["mm_token_type_ids"]),
            **{name: inputs[name] for name in names if name in inputs},
        )
        rope_positions: NDArray[np.int32] = positions[:, 0].numpy().astype(np.int32)
        return rope_positions


class _Split:
    """The processor's tensors of all media → those of the parts of each that the model encodes one by one: tiles and
    crops of the same size, frames, or a whole medium. Media of a kind are asked for in order, each once.
    """

    def __init__(self, model_type: str, processor: Any, inputs: Any) -> None:
        self._model_type = model_type
        self._processor = processor
        self._inputs = inputs
        self._num_taken = 0

    def parts_of(self, kind: Kind, number: int, num_tokens: int) -> list[dict[str, torch.Tensor]]:
        match self._model_type:
            case "llava":
                return [self._rows("pixel_values", number=number)]
            case "llava_onevision" if kind == "video":
                return [self._rows("pixel_values_videos", number=number)]
            case "llava_onevision":
                return [self._tiles(number)]
            case "qwen2_vl" | "qwen2_5_vl":
                return [self._patches(*_QWEN_NAMES[kind], number)]
            case "gemma3":
                rows = self._take(num_tokens // self._processor.image_seq_length)
                return [self._rows("pixel_values", number=row) for row in rows]
            case _:  # SmolVLM, Idefics 3
                rows = self._take(num_tokens // self._processor.image_seq_len)
                names = ("pixel_values", "pixel_attention_mask")
                return [{name: self._inputs[name][:, row : row + 1] for name in names} for row in rows]

    def _rows(self, *names: str, number: int) -> dict[str, torch.Tensor]:
        return {name: self._inputs[name][number : number + 1] for name in names}

    def _take(self, num_rows: int) -> range:
        begin = self._num_taken
        self._num_taken += num_rows
        return range(begin, self._num_taken)

    def _patches(self, pixels: str, grid: str, number: int) -> dict[str, torch.Tensor]:
        grids = self._inputs[grid]
        ends = grids.prod(dim=-1).cumsum(dim=0).tolist()
        begin = ends[number - 1] if number else 0
        return {pixels: self._inputs[pixels][begin : ends[number]], **self._rows(grid, number=number)}

    def _tiles(self, number: int) -> dict[str, torch.Tensor]:
        """An image alone in its sample is cut into tiles; the others have one, and what pads them is left out."""
        num_images = torch.as_tensor(self._inputs["batch_num_images"])
        of_its_sample = int(num_images.repeat_interleave(num_images)[number])
        tensors = self._rows("pixel_values", "image_sizes", number=number)
        if of_its_sample > 1:
            tensors["pixel_values"] = tensors["pixel_values"][:, :1]
        return {**tensors, "batch_num_images": torch.tensor([min(of_its_sample, 2)])}


_QWEN_NAMES: dict[Kind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}


def _digest(
    kind: Kind, tensors: dict[str, Tensor], places: NDArray[np.int64], positions: NDArray[np.int32] | None
) -> bytes:
    """Of all that the keys and values of its tokens depend on, besides what stands before them."""
    digest = hashlib.blake2b(kind.encode(), digest_size=_DIGEST_BYTES)
    if positions is not None and len(places):
        # The same frames at another rate lie further apart in time.
        own_positions = positions[:, places]
        digest.update((own_positions - own_positions[:, :1]).tobytes())
    for name, tensor in tensors.items():
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(tensor.data)
    return digest.digest()


def _metadata(video: DecodedVideo) -> VideoMetadata:
    num_frames, fps = video.num_total_frames, video.fps
    return VideoMetadata(
        total_num_frames=num_frames,
        fps=fps,
        height=video.frames.shape[1],
        width=video.frames.shape[2],
        duration=num_frames / fps if fps else None,
        frames_indices=video.indices,
    )


def _with_media(messages: list[dict[str, Any]], images: list[Any], videos: list[Any]) -> list[dict[str, Any]]:
    """The messages with each medium in its place."""
    media = {"image": iter(images), "video": iter(videos)}

    def with_medium(part: dict[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        return {**part, kind: next(media[kind])} if kind in media else part

    return [
        {**message, "content": [with_medium(part) for part in message["content"]]} if message["content"] else message
        for message in messages
    ]


def _fields(media: list[Medium]) -> str:
    return " and ".join(dict.fromkeys(medium.field.split(".")[0] for medium in media))
