"""A vision-language model of transformers: its text part over our paged cache, its vision part once a medium."""

from __future__ import annotations

import torch

from deepinfer_backend.models.interface import ForwardResult, MediaInputs
from deepinfer_backend.models.lora import LoraLayers
from deepinfer_backend.models.transformers_model import Attention, TransformersModel


class VisionLanguageModel(TransformersModel):
    """`models.interface.Model`, and its own `MediaEncoder`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.media_encoder = self
        self.lora = LoraLayers(module, self.device, module.get_decoder())  # type: ignore[operator]

    def encode(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        model = self.module.base_model
        self.lora.set_step(None)
        encode = model.get_video_features if "pixel_values_videos" in tensors else model.get_image_features  # type: ignore[union-attr]
        given = {
            name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }
        embeddings = encode(**given, return_dict=True).pooler_output  # type: ignore[operator]
        # Of one medium, but in as many tensors as it has parts.
        return torch.cat(list(embeddings)).to(self.dtype)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        logits_indices: torch.Tensor,
        media: MediaInputs | None = None,
    ) -> ForwardResult:
        embeddings = self.module.get_input_embeddings()(token_ids)  # type: ignore[operator]
        position_ids = positions[None]
        if media is not None:
            embeddings.index_copy_(0, media.rows, media.embeddings)
            if media.rope_offsets is not None:
                position_ids = (positions + media.rope_offsets)[:, None]
        return self._run({"inputs_embeds": embeddings[None], "position_ids": position_ids}, attention, logits_indices)
