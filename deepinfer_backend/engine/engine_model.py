"""What an engine computes with, from its configuration: the model, its drafter and their KV cache."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from pathlib import Path

from deepinfer_backend._core import SchedulerConfig
from deepinfer_backend.config import EngineConfig
from deepinfer_backend.models.interface import Model
from deepinfer_backend.models.loader import resolve_dtype, resolve_model
from deepinfer_backend.models.runnable_model import load_engine_model
from deepinfer_backend.models.vision_families import VisionFamily, vision_family
from deepinfer_backend.ops.rank_world import RankWorld, TensorGroup
from deepinfer_backend.speculation.drafter import Drafter
from deepinfer_backend.speculation.make_drafter import load_draft_source, make_drafter
from deepinfer_backend.worker.device import DeviceStream
from deepinfer_backend.worker.kv_cache import KVCache, num_kv_blocks, resolve_kv_cache_dtype
from deepinfer_backend.worker.limits import resolve_block_size, resolve_max_model_len
from deepinfer_backend.worker.media_embeddings import MediaEmbeddings
from deepinfer_backend.worker.step_buffers import MAX_EXTRA_LOGITS, StepBuffers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """drafter_computes: it has a model of its own, or a module, with layers in the KV cache.

    ranks: those that compute the model, of which this engine's is the leader; None if it is alone. family: of a model
    that takes images or videos.
    """

    path: Path
    model: Model
    drafter: Drafter | None
    drafter_computes: bool
    kv_cache: KVCache
    max_model_len: int
    num_speculative_tokens: int
    ranks: TensorGroup | None
    family: VisionFamily | None

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a sequence."""
        return min(self.max_model_len, self.kv_cache.num_blocks * self.kv_cache.block_size)

    def scheduler_config(self, config: EngineConfig, *, is_prompt_engine: bool) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=self.kv_cache.num_blocks,
            block_size=self.kv_cache.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_num_extra_logits=MAX_EXTRA_LOGITS,
            num_speculative_tokens=self.num_speculative_tokens,
            num_lookahead_tokens=self.num_speculative_tokens if self.drafter_computes else 0,
            max_tokens_behind=self.drafter.max_tokens_behind if self.drafter is not None else 0,
            enable_prefix_caching=config.enable_prefix_caching,
            max_consecutive_prefills=config.max_consecutive_prefills,
            prefill_attempt_interval=config.prefill_attempt_interval,
            priority_aging_s=config.priority_aging_s,
            hash_seed=random.SystemRandom().getrandbits(64),
            is_prompt_engine=is_prompt_engine,
        )

    def media_embeddings(self, config: EngineConfig) -> MediaEmbeddings | None:
        encoder = self.model.media_encoder
        if encoder is None:
            return None
        return MediaEmbeddings(
            encoder,
            hidden_size=self.model.hidden_size,
            dtype=self.model.dtype,
            device=self.model.device,
            max_bytes=config.media_cache_bytes,
        )

    def step_buffers(self, config: EngineConfig) -> StepBuffers:
        return StepBuffers(
            max_num_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=-(-self.max_seq_len // self.kv_cache.block_size),
            num_speculative_tokens=self.num_speculative_tokens,
            device=self.model.device,
        )


def set_up_model(config: EngineConfig, stream: DeviceStream, world: RankWorld | None) -> EngineModel:
    """Loads it, and waits for the other ranks.

    Raises:
        ConfigError, UnsupportedModelError: the model cannot run with this configuration.
    """
    device, ranks = stream.device, None if world is None else world.tensor
    dtype, path = resolve_dtype(config.dtype, device), resolve_model(config.model)
    # Whatever computes runs on the stream, from the first tensor on: were this thread to compute in parallel too,
    # OpenMP would count two teams, more threads than cores, and send the device's to sleep between any two operations
    # (20 ms a step on two cores).
    model = stream.submit(lambda: load_engine_model(config, path, dtype, device, ranks)).result()
    draft_source = load_draft_source(config.speculative_config, model, path, dtype, stream)
    layers = model.layers + (draft_source.layers if draft_source is not None else [])
    block_size = resolve_block_size(config.block_size, device)
    max_model_len = resolve_max_model_len(config.max_model_len, model.max_position_embeddings)
    kv_cache_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, dtype, device)
    num_blocks = num_kv_blocks(
        config, layers, block_size=block_size, max_model_len=max_model_len, dtype=kv_cache_dtype, device=device
    )
    drafter = make_drafter(
        config.speculative_config,
        draft_source,
        max_num_seqs=config.max_num_seqs,
        max_seq_len=min(max_model_len, num_blocks * block_size),
        block_size=block_size,
        device=device,
    )
    kv_cache = KVCache(layers, num_blocks=num_blocks, block_size=block_size, dtype=kv_cache_dtype, device=device)
    if drafter is not None:
        drafter.use_caches(kv_cache.layers[len(model.layers) :])
    if world is not None:
        world.wait_for_all()
    if ranks is not None:
        ranks.send([num_blocks])
    engine_model = EngineModel(
        path=path,
        model=model,
        drafter=drafter,
        drafter_computes=draft_source is not None,
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        num_speculative_tokens=config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
        ranks=ranks,
        family=vision_family(path, device.type),
    )
    logger.info(
        "%s on %s in %s: %d KV blocks of %d tokens, at most %d tokens a sequence",
        path.name,
        device,
        model.weight_format,
        num_blocks,
        block_size,
        engine_model.max_seq_len,
    )
    return engine_model
