"""A tensor-parallel rank on another machine than Triton's: it learns there what it is to compute.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1000000 -m deepinfer_backend.worker.remote_rank \\
        --node-rank 1 --master-addr 10.0.0.1

It ends when the engine does, or when nothing is heard of it for 5 s, and is to be started again: then it waits for the
next one.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated

import typer

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError
from deepinfer_backend.ops.heartbeat import send_heartbeats
from deepinfer_backend.ops.rendezvous import connect_to_store
from deepinfer_backend.rank_place import RankPlace
from deepinfer_backend.worker.tensor_ranks import CONFIG_KEY, end_process, run_rank

logger = logging.getLogger(__name__)


def main(
    node_rank: Annotated[int, typer.Option(min=1, help="Which machine this is, of nnodes; Triton's is 0.")],
    master_addr: Annotated[str, typer.Option(help="The address of Triton's machine.")],
    master_port: Annotated[int, typer.Option(min=1, max=65_535, help="The port there.")] = 29500,
    local_rank: Annotated[int, typer.Option(min=0, envvar="LOCAL_RANK", help="Which rank of this machine.")] = 0,
) -> None:
    """Computes one rank's part of the model until the engine ends."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(local_rank))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s deepinfer rank %(levelname)s: %(message)s")
    logger.info("waiting for an engine at %s:%d", master_addr, master_port)
    store = connect_to_store(master_addr, master_port)
    config = EngineConfig(**json.loads(store.get(CONFIG_KEY)))
    if node_rank >= config.nnodes or local_rank >= config.num_local_ranks:
        raise ConfigError(
            f"node_rank is {node_rank} and local_rank {local_rank}: the engine has nnodes {config.nnodes}, and "
            f"{config.num_local_ranks} ranks on each"
        )
    rank = node_rank * config.num_local_ranks + local_rank
    send_heartbeats(store, master_addr, rank)
    place = RankPlace(0, 1, rank, config.tensor_parallel_size, f"tcp://{master_addr}:{master_port}")
    end_process(run_rank(config, place))


if __name__ == "__main__":
    typer.run(main)
