"""A multi-token-prediction module of a native model, its layer on our own kernels (csrc/decoder)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.interface import ForwardResult, LayerShape
from deepinfer_backend.models.native_model import NativeModel, Packer, add_layer, make_decoder, run_decoder, use_caches
from deepinfer_backend.models.weights import WeightSource
from deepinfer_backend.ops.kernels import kernels
from deepinfer_backend.ops.paged_attention import AttentionStep, LayerCache


class NativeMtpHead:
    """An `MtpHead` whose layer is one more of the model's kind, behind its last one.

    Weights are named as in DeepSeek-V3's checkpoints, model.layers.N being the first layer that the model itself has
    not: enorm, hnorm, eh_proj, the layer's own, shared_head.norm. It shares the model's embedding and output layer; of
    the latter it computes those tokens alone that draft_token_ids has, ascending, if that is there (Zhao et al. 2025,
    "FR-Spec": most of a small model's draft would be its output layer, and most tokens are rare).

    Raises (constructor):
        UnsupportedModelError: a weight is missing or has another shape than the model's configuration says.
    """

    def __init__(self, model: NativeModel, model_source: WeightSource, source: WeightSource) -> None:
        # Rounded: it decides how fast tokens come, and never which.
        spec, packer = model.spec, Packer(source, torch.bfloat16)
        prefix = f"model.layers.{len(spec.windows)}"
        if not packer.has(f"{prefix}.eh_proj.weight"):
            raise UnsupportedModelError(f"there is no multi-token-prediction module: no weight {prefix}.eh_proj.weight")
        self.layers = [LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim)]
        self._eps = spec.rms_norm_eps
        self._embedding = model.embedding
        self._embedding_norm = packer.vector(f"{prefix}.enorm.weight", spec.hidden_size)
        self._hidden_norm = packer.vector(f"{prefix}.hnorm.weight", spec.hidden_size)
        (self._projection,) = packer.linear([(f"{prefix}.eh_proj", [spec.hidden_size])], 2 * spec.hidden_size)
        self.draft_token_ids: torch.Tensor | None = None
        output_layer = model.output_layer
        if packer.has(f"{prefix}.draft_token_ids"):
            self.draft_token_ids = source.tensor(f"{prefix}.draft_token_ids").long()
            output_layer = Packer(model_source, torch.bfloat16).some_outputs(
                model.output_weight, self.draft_token_ids, spec.vocab_size, spec.hidden_size
            )
        final_norm = packer.vector(f"{prefix}.shared_head.norm.weight", spec.hidden_size)
        self._decoder = make_decoder(spec, model.embedding, final_norm, output_layer)
        add_layer(self._decoder, spec, packer, prefix, spec.windows[-1])

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        use_caches(self._decoder, caches)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep,
        logits_indices: torch.Tensor,
    ) -> ForwardResult:
        both = torch.cat(
            [
                kernels.rms_norm(self._embedding.unpack_rows(token_ids), self._embedding_norm, self._eps),
                kernels.rms_norm(hidden_states, self._hidden_norm, self._eps),
            ],
            dim=1,
        )
        embeddings = self._projection.forward(both)
        return run_decoder(self._decoder, token_ids, positions, attention, logits_indices, embeddings=embeddings)
