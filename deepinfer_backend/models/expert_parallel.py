"""The experts of a mixture-of-experts model shared by engines in lockstep, through transformers' expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from deepinfer_backend.errors import UnsupportedModelError

_NAME = "deepinfer_lockstep"


class _OneRank:
    """As much of a device mesh as AllToAllEP asks for."""

    def size(self) -> int:
        return 1


class LockstepExperts(AllToAllEP):  # type: ignore[misc]
    """Sends each token to the ranks that have its experts, and gets back what they say.

    transformers takes ranks that share experts without sharing weights in any other way for ranks with one batch, of
    which each sends its slice; here each has a batch of its own.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.tp_mesh = _OneRank()


EPImplementationInterface.register(_NAME, LockstepExperts)


def shared_experts(config: PreTrainedConfig, num_ranks: int) -> DistributedConfig:
    """Of all ranks of torch.distributed's world; everything but the experts is whole on each.

    config: the model's.

    Raises:
        UnsupportedModelError: transformers has no plan for its experts.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if not model.ep_plan:
        raise UnsupportedModelError(
            f"enable_expert_parallel is true: transformers has no plan to share experts of {config.model_type} models"
        )
    return DistributedConfig(
        tp_size=num_ranks,
        tp_plan=dict.fromkeys(model.tp_plan, "replicate"),
        ep_size=num_ranks,
        ep_implementation=_NAME,
    )
