"""Small random vision-language models of each family, with processors that have the settings of the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    Gemma3Config,
    Idefics3Config,
    LlavaConfig,
    LlavaOnevisionConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
)
from transformers.models.clip import CLIPImageProcessor
from transformers.models.gemma3 import Gemma3ImageProcessor, Gemma3Processor
from transformers.models.idefics3 import Idefics3ImageProcessor, Idefics3Processor
from transformers.models.llava import LlavaProcessor
from transformers.models.llava_onevision import (
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
)
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor
from transformers.models.smolvlm import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

from tests.support.media import frames, picture
from tests.support.tiny_text_model import byte_tokenizer

_FIRST_ADDED_ID = 259  # after the byte tokenizer's own
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.3,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How to make one: its tokens besides bytes (their ids begin at 259, in this order), configuration, processor.

    image, video: what a prompt has where a medium stands; None: it takes none of this kind.
    """

    tokens: tuple[str, ...]
    config: Callable[[Callable[[str], int]], Any]
    processor: Callable[[Any], Any]
    image: str
    video: str | None = None
    named_tokens: dict[str, str] = field(default_factory=dict)
    takes_both: bool = True  # in one prompt


def _llava_processor(tokenizer: Any) -> Any:
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, do_convert_rgb=True
    )
    return LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _onevision_processor(tokenizer: Any) -> Any:
    return LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(),
        tokenizer,
        LlavaOnevisionVideoProcessor(),
        num_image_tokens=729,
        vision_feature_select_strategy="full",
    )


def _qwen_vision(**fields: Any) -> dict[str, Any]:
    return {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, **fields}


_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _qwen_ids(id_of: Callable[[str], int]) -> dict[str, Any]:
    return {
        "vision_start_token_id": id_of("<|vision_start|>"),
        "vision_end_token_id": id_of("<|vision_end|>"),
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
    }


_QWEN_TEXT = {**_TEXT, "rope_parameters": _ROPE}
_ROWS_AND_COLS = tuple(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5))

VISION_FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily(
        tokens=("<image>",),
        config=lambda id_of: LlavaConfig(
            text_config={"model_type": "llama", **_TEXT},
            vision_config=CLIPVisionConfig(**_VISION, image_size=336, patch_size=14),
            image_token_id=id_of("<image>"),
        ),
        processor=_llava_processor,
        image="<image>",
    ),
    "llava_onevision": VisionFamily(
        tokens=("<image>", "<video>"),
        config=lambda id_of: LlavaOnevisionConfig(
            text_config={"model_type": "qwen2", **_TEXT},
            vision_config=SiglipVisionConfig(**_VISION, image_size=384, patch_size=14, vision_use_head=False),
            image_token_id=id_of("<image>"),
            video_token_id=id_of("<video>"),
        ),
        processor=_onevision_processor,
        image="<image>",
        video="<video>",
    ),
    "qwen2_vl": VisionFamily(
        tokens=_QWEN_TOKENS,
        config=lambda id_of: Qwen2VLConfig(
            text_config=_QWEN_TEXT,
            vision_config=_qwen_vision(embed_dim=32, hidden_size=64, mlp_ratio=2),
            **_qwen_ids(id_of),
        ),
        processor=lambda tokenizer: Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor()),
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "qwen2_5_vl": VisionFamily(
        tokens=_QWEN_TOKENS,
        config=lambda id_of: Qwen2_5_VLConfig(
            text_config=_QWEN_TEXT,
            vision_config=_qwen_vision(
                hidden_size=32, intermediate_size=64, out_hidden_size=64, fullatt_block_indexes=[1], window_size=112
            ),
            **_qwen_ids(id_of),
        ),
        processor=lambda tokenizer: Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor()),
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    "smolvlm": VisionFamily(
        tokens=("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_ROWS_AND_COLS),
        config=lambda id_of: SmolVLMConfig(
            text_config={"model_type": "llama", **_TEXT},
            vision_config={**_VISION, "image_size": 512, "patch_size": 16},
            image_token_id=id_of("<image>"),
            scale_factor=4,
            pad_token_id=2,
        ),
        processor=lambda tokenizer: SmolVLMProcessor(
            SmolVLMImageProcessor(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}),
            tokenizer,
            SmolVLMVideoProcessor(size={"longest_edge": 512}, max_image_size={"longest_edge": 512}),
            image_seq_len=64,
        ),
        image="<image>",
        video="<video>",
        takes_both=False,
    ),
    "idefics3": VisionFamily(
        tokens=("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_ROWS_AND_COLS),
        config=lambda id_of: Idefics3Config(
            text_config={"model_type": "llama", **_TEXT},
            vision_config={**_VISION, "image_size": 364, "patch_size": 14},
            image_token_id=id_of("<image>"),
            scale_factor=2,
            pad_token_id=2,
        ),
        processor=lambda tokenizer: Idefics3Processor(Idefics3ImageProcessor(), tokenizer, image_seq_len=169),
        image="<image>",
    ),
    "gemma3": VisionFamily(
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        config=lambda id_of: Gemma3Config(
            text_config={
                **_TEXT,
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 96,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            vision_config=SiglipVisionConfig(**_VISION, image_size=896, patch_size=14, vision_use_head=False),
            boi_token_index=id_of("<start_of_image>"),
            eoi_token_index=id_of("<end_of_image>"),
            image_token_id=id_of("<image_soft_token>"),
        ),
        processor=lambda tokenizer: Gemma3Processor(
            Gemma3ImageProcessor(size={"height": 896, "width": 896}), tokenizer
        ),
        image="<start_of_image>",
    ),
}


def make_vision_model(name: str, folder: Path) -> Path:
    """Writes a random model of the family with its processor and a chat template, in float32; returns its folder."""
    family = VISION_FAMILIES[name]
    path = folder / name
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True, normalized=False) for token in family.tokens]}
    )
    assert tokenizer.convert_tokens_to_ids(family.tokens[0]) == _FIRST_ADDED_ID
    if family.named_tokens:
        tokenizer._set_model_specific_special_tokens(family.named_tokens)
    processor = family.processor(tokenizer)
    template = _CHAT_TEMPLATE.replace("IMAGE", family.image).replace("VIDEO", family.video or "")
    processor.chat_template = tokenizer.chat_template = template
    processor.save_pretrained(path)
    torch.manual_seed(0)
    config = family.config(tokenizer.convert_tokens_to_ids)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    return path


@dataclass(frozen=True, slots=True)
class MediaCase:
    """A prompt with its media, and what transformers makes of it: `prompt_token_ids` and greedy `token_ids`."""

    name: str
    prompt: str
    images: list[Any]
    videos: list[Any]
    prompt_token_ids: list[int]
    token_ids: list[int]

    @property
    def multi_modal_data(self) -> dict[str, Any]:
        return {"image": self.images, "video": self.videos}


class VisionOracle:
    """What transformers' own processor and `generate` make of prompts with media, one at a time."""

    def __init__(self, path: Path) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(path)
        self._model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def answer(
        self,
        prompt: str,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        name: str = "",
        num_tokens: int,
        **options: Any,
    ) -> MediaCase:
        """options: of the processor."""
        media = {kind: list(given) for kind, given in (("images", images), ("videos", videos)) if given}
        inputs = self.processor(text=[prompt], return_tensors="pt", **media, **options)
        return MediaCase(name, prompt, list(images), list(videos), *self._generate(inputs, num_tokens))

    def chat(self, messages: list[dict[str, Any]], *, num_tokens: int, **options: Any) -> tuple[list[int], list[int]]:
        """→ (prompt token ids, new token ids)."""
        inputs = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **options
        )
        return self._generate(inputs, num_tokens)

    @torch.inference_mode()
    def _generate(self, inputs: Any, num_tokens: int) -> tuple[list[int], list[int]]:
        output = self._model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        prompt = inputs["input_ids"][0].tolist()
        return prompt, output[0, len(prompt) :].tolist()


def media_cases(family: VisionFamily, oracle: VisionOracle, num_tokens: int) -> list[MediaCase]:
    """One and several images of several sizes, a video, an image beside it, and text alone."""
    image, video = family.image, family.video
    small, wide, tall = picture(120, 90, 1), picture(300, 100, 2), picture(70, 210, 3)
    given: dict[str, tuple[str, list[Any], list[Any]]] = {
        "one image": (f"A picture: {image} What is it?", [small], []),
        "two images": (f"{image}{image}", [wide, small], []),
        "three images": (f"First {image}, then {image} and at the end {image}.", [tall, wide, small], []),
        "text": ("No picture at all, only a text that is not short.", [], []),
    }
    if video is not None:
        given["a video"] = (f"Look: {video} What happens?", [], [frames(6, 112, 84, 4)])
    if video is not None and family.takes_both:
        given["an image and a video"] = (f"{image} and {video}", [small], [frames(4, 112, 84, 5)])
    return [oracle.answer(*each, name=name, num_tokens=num_tokens) for name, each in given.items()]
