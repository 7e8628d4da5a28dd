"""What a device and a model allow, where the configuration leaves it open."""

from __future__ import annotations

import torch

from deepinfer_backend.errors import ConfigError

_CPU_BLOCK_SIZE = 16
# The paged kernels behind torch's varlen attention take pages of this size and its multiples only.
_CUDA_BLOCK_SIZE = 256


def resolve_device(name: str) -> torch.device:
    """Raises ConfigError for "cuda" where there is none."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but torch finds no CUDA device here")
    return torch.device("cuda" if name != "cpu" and has_cuda else "cpu")


def resolve_block_size(block_size: int | None, device: torch.device) -> int:
    """Raises ConfigError for a size that the device's attention kernel does not take."""
    if device.type != "cuda":
        return block_size or _CPU_BLOCK_SIZE
    if block_size is not None and block_size % _CUDA_BLOCK_SIZE:
        raise ConfigError(f"block_size is {block_size}: on cuda it must be a multiple of {_CUDA_BLOCK_SIZE}")
    return block_size or _CUDA_BLOCK_SIZE


def resolve_max_model_len(max_model_len: int | None, max_position_embeddings: int) -> int:
    """Raises ConfigError for more tokens than the model has positions."""
    if max_model_len is not None and max_model_len > max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}: the model has positions for at most {max_position_embeddings} tokens"
        )
    return max_model_len or max_position_embeddings
