"""The paged KV cache: how many blocks, of which type and layout, and copies between them.

Block 0 is the dummy block: padding points to it, no sequence owns it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError, EngineError, shown
from deepinfer_backend.models.interface import LayerShape
from deepinfer_backend.ops.paged_attention import LayerCache

_CPU_SHARE_OF_FREE_MEMORY = 0.25
_ALIGNMENT_BYTES = 64
_CPU_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class KVCache:
    """Owns the keys and values of all layers, of `dtype`. `num_blocks` counts the blocks that sequences can have.

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

        allocate = _allocate_on_cuda if device.type == "cuda" else _allocate_on_cpu
        try:
            self.layers = [allocate(layer, num_blocks + 1, block_size, dtype, device) for layer in layers]
        except (MemoryError, torch.OutOfMemoryError) as error:
            num_bytes = (num_blocks + 1) * block_size * sum(layer.bytes_per_token(dtype) for layer in layers)
            raise EngineError(
                f"the KV cache of {num_blocks} blocks of {block_size} tokens, {num_bytes} bytes, does not fit into "
                f"the memory of {device}: kv_cache_memory_bytes, max_num_seqs and max_model_len make it smaller"
            ) from error

    def copy_blocks(self, copies: torch.Tensor) -> None:
        """Copies whole blocks in all layers; copies: [num_copies, 2] of (source, target)."""
        source, target = copies[:, 0].long(), copies[:, 1].long()
        for tensor in self._tensors():
            tensor[target] = tensor[source]

    @property
    def block_bytes(self) -> int:
        """Of all layers together."""
        return sum(tensor[0].nbytes for tensor in self._tensors())

    def read_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Their whole content, [num_blocks · block_bytes] uint8 in host memory: by layer, and there by block."""
        indices, content = blocks.long(), torch.empty(len(blocks) * self.block_bytes, dtype=torch.uint8)
        for tensor, part in self._with_parts(content, len(blocks)):
            if tensor.device.type == "cpu":
                torch.index_select(tensor, 0, indices, out=part)
            else:
                part.copy_(tensor[indices.to(tensor.device)])
        return content

    def write_blocks(self, blocks: torch.Tensor, content: torch.Tensor) -> None:
        """content: as `read_blocks` of a cache of the same layers, type and block size returns it."""
        for tensor, part in self._with_parts(content, len(blocks)):
            tensor.index_copy_(0, blocks.long().to(tensor.device), part.to(tensor.device))

    def _with_parts(self, content: torch.Tensor, num_blocks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the cache with its part of the content of so many blocks, [num_blocks, ...]."""
        begin = 0
        for tensor in self._tensors():
            end = begin + num_blocks * tensor[0].nbytes
            yield tensor, content[begin:end].view(tensor.dtype).view(num_blocks, *tensor.shape[1:])
            begin = end

    def _tensors(self) -> Iterator[torch.Tensor]:
        """[num_blocks, ...] each."""
        for layer in self.layers:
            for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
                if tensor is not None:
                    yield tensor


def _allocate_on_cuda(
    layer: LayerShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    def blocks(dim: int) -> torch.Tensor:
        return torch.zeros(num_blocks, block_size, layer.num_kv_heads, dim, dtype=dtype, device=device)

    return LayerCache(blocks(layer.key_dim), blocks(layer.value_dim))


def _allocate_on_cpu(
    layer: LayerShape, num_blocks: int, block_size: int, dtype: torch.dtype, _: torch.device
) -> LayerCache:
    rows = (num_blocks, layer.num_kv_heads)
    packed = torch.float32.itemsize // dtype.itemsize
    keys = _zeros((*rows, layer.key_dim // packed, block_size, packed), dtype)
    values = _zeros((*rows, block_size, layer.value_dim), dtype)
    if dtype != torch.int8:
        return LayerCache(keys, values)
    key_scales, value_scales = (_zeros((*rows, block_size), torch.float32) for _ in range(2))
    return LayerCache(keys, values, key_scales, value_scales)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Aligned to cache lines. numpy leaves the zeroing to the operating system, page by page: memory that no sequence
    reaches is never taken.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(buffer[start : start + num_bytes]).view(dtype).view(shape)


def resolve_kv_cache_dtype(requested: str, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of a cache's elements for `kv_cache_dtype`; CPU kernels store no float16 and keep float32 instead.

    Raises:
        ConfigError: the device's attention does not read that type.
    """
    if device.type == "cuda":
        if requested != "auto":
            raise ConfigError(f'kv_cache_dtype is {shown(requested)}: must be "auto" on cuda')
        return model_dtype
    if requested != "auto":
        return _CPU_DTYPES[requested]
    return torch.bfloat16 if model_dtype == torch.bfloat16 else torch.float32


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
    return int(available_kib * 1024 * _CPU_SHARE_OF_FREE_MEMORY / config.num_processes)
