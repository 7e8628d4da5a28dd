"""The paged KV cache: how many blocks, their layout, and copies between them.

Layout of each layer: keys and values apart, [num_blocks + 1, block_size, num_kv_heads, head_dim]. Block 0 is the
dummy block: padding points to it, no sequence owns it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError, EngineError
from deepinfer_backend.models.interface import LayerShape

_CPU_SHARE_OF_FREE_MEMORY = 0.25


class KVCache:
    """Owns the keys and values of all layers. `num_blocks` counts the blocks that sequences can have.

    Raises (constructor):
        EngineError: the memory does not suffice; the message has the size.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

        def blocks(num_kv_heads: int, dim: int) -> torch.Tensor:
            shape = (num_blocks + 1, block_size, num_kv_heads, dim)
            if device.type == "cuda":
                return torch.zeros(shape, dtype=dtype, device=device)
            # numpy leaves the zeroing to the kernel, page by page: memory that no sequence reaches is never taken.
            return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

        try:
            self.keys = [blocks(layer.num_kv_heads, layer.key_dim) for layer in layers]
            self.values = [blocks(layer.num_kv_heads, layer.value_dim) for layer in layers]
        except (MemoryError, torch.OutOfMemoryError) as error:
            num_bytes = (num_blocks + 1) * block_size * sum(layer.bytes_per_token(dtype) for layer in layers)
            raise EngineError(
                f"the KV cache of {num_blocks} blocks of {block_size} tokens, {num_bytes} bytes, does not fit into "
                f"the memory of {device}: kv_cache_memory_bytes, max_num_seqs and max_model_len make it smaller"
            ) from error

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores key and value [num_tokens, num_kv_heads, dim] at slots [num_tokens] (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, value)

    def copy_blocks(self, copies: torch.Tensor) -> None:
        """Copies whole blocks in all layers; copies: [num_copies, 2] of (source, target)."""
        source, target = copies[:, 0].long(), copies[:, 1].long()
        for cache in (*self.keys, *self.values):
            cache[target] = cache[source]


def num_kv_blocks(
    config: EngineConfig,
    layers: list[LayerShape],
    *,
    block_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """How many blocks to allocate: the override, or what the memory allows, but no more than could ever be used.

    Raises:
        ConfigError: not even one block fits; the message has both sizes.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    block_bytes = block_size * sum(layer.bytes_per_token(dtype) for layer in layers)
    budget_bytes = config.kv_cache_memory_bytes or _memory_for_kv_cache(config, device)
    most_useful = config.max_num_seqs * -(-max_model_len // block_size)
    num_blocks = min(budget_bytes // block_bytes - 1, most_useful)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes is {budget_bytes}: must be at least {2 * block_bytes}, "
            f"two blocks of {block_size} tokens"
        )
    return int(num_blocks)


def _memory_for_kv_cache(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * config.gpu_memory_utilization) - (total - free))
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    available_kib = int(fields["MemAvailable"].split()[0])
    return int(available_kib * 1024 * _CPU_SHARE_OF_FREE_MEMORY)
