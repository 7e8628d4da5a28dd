"""KV blocks of prompts, from the engine that computed them to the one that decodes: in pieces, each of them checked."""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass

import torch
import zmq

from deepinfer_backend._core import AwaitedBlocks, Scheduler
from deepinfer_backend.engine.client_sockets import ClientSockets
from deepinfer_backend.engine.messages import BlockContents, BlocksArrived, BlockSource, FetchBlocks
from deepinfer_backend.worker.device import DeviceStream
from deepinfer_backend.worker.kv_cache import KVCache

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 * 2**20
_NUM_PIECES_ASKED_AHEAD = 2
_MAX_REPEATS = 3
_NO_SOURCE = -1


@dataclass(slots=True)
class _Transfer:
    """Counts are of blocks."""

    awaited: AwaitedBlocks
    num_asked: int = 0
    num_written: int = 0
    num_repeats: int = 0


class BlockHandOver:
    """One engine's end of all hand-overs, as the one that gives blocks and as the one that gets them.

    1. A receiver asks for the next pieces of a prompt's blocks and writes them in order; what else comes is dropped.
    2. What does not come, because its source has ended, has it no more or repeats what is damaged, is computed here.
    3. Nothing is written for a sequence that does not await it any more. The device runs what is submitted in order, so
       a block is read after it was computed, and written before whoever gets it next.

    Used by the engine's thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KVCache,
        stream: DeviceStream,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
    ) -> None:
        """address: where this engine takes messages."""
        self.source = BlockSource(address, os.getpid())
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._stream = stream
        self._peers = ClientSockets(context)
        self._transfers: dict[int, _Transfer] = {}  # by seq_id
        self._arrived: list[BlocksArrived] = []
        self._piece_blocks = max(1, _PIECE_BYTES // kv_cache.block_bytes)

    def index_of(self, source: BlockSource) -> int:
        """What `AwaitedBlocks` calls it."""
        index = self._peers.index_of(source.address)
        if index is not None:
            return index
        try:
            return self._peers.add(source.address, source.address, source.process_id)
        except ProcessLookupError:
            return _NO_SOURCE

    def go_on(self) -> list[BlocksArrived]:
        """To be called after each step: asks for what was admitted; returns what has ended since the last call."""
        for awaited in self._scheduler.take_awaited():
            transfer = self._transfers[awaited.seq_id] = _Transfer(awaited)
            self._ask(transfer)
        if self._transfers:
            self._peers.remove_dead()
            for transfer in list(self._transfers.values()):
                if not self._scheduler.awaits_blocks(transfer.awaited.seq_id):
                    del self._transfers[transfer.awaited.seq_id]
                elif transfer.awaited.source not in self._peers:
                    self._give_up(transfer, "the engine that has them has ended")
        arrived, self._arrived = self._arrived, []
        return arrived

    def answer(self, fetch: FetchBlocks) -> None:
        self._peers.remove_dead()
        blocks = self._scheduler.prompted_blocks(fetch.request_id)[fetch.first_block :][: fetch.num_blocks]
        content = memoryview(b"")
        if len(blocks) == fetch.num_blocks:
            indices = torch.from_numpy(blocks)
            content = self._stream.submit(lambda: self._kv_cache.read_blocks(indices)).result().numpy().data
        receiver = self.index_of(BlockSource(fetch.address, fetch.process_id))
        contents = BlockContents(fetch.seq_id, fetch.first_block, zlib.crc32(content))
        self._peers.send_contents(receiver, contents, content)

    def take(self, contents: BlockContents, content: memoryview) -> None:
        transfer = self._transfers.get(contents.seq_id)
        if transfer is None or not self._scheduler.awaits_blocks(contents.seq_id):
            return
        if contents.first_block != transfer.awaited.first_block + transfer.num_written:
            return
        if not len(content):
            self._give_up(transfer, "the engine that had them has freed them")
            return
        blocks = transfer.awaited.blocks[transfer.num_written :][: self._piece_blocks]
        is_whole = len(content) == len(blocks) * self._kv_cache.block_bytes
        if not is_whole or zlib.crc32(content) != contents.checksum:
            self._repeat(transfer)
            return
        written, indices = torch.frombuffer(bytearray(content), dtype=torch.uint8), torch.from_numpy(blocks.copy())
        self._stream.submit(lambda: self._kv_cache.write_blocks(indices, written))
        transfer.num_written += len(blocks)
        self._ask(transfer)

    def _ask(self, transfer: _Transfer) -> None:
        awaited = transfer.awaited
        num_blocks, num_ahead = len(awaited.blocks), _NUM_PIECES_ASKED_AHEAD * self._piece_blocks
        while transfer.num_asked < min(num_blocks, transfer.num_written + num_ahead):
            piece = min(self._piece_blocks, num_blocks - transfer.num_asked)
            first_block = awaited.first_block + transfer.num_asked
            fetch = FetchBlocks(
                self.source.address, self.source.process_id, awaited.seq_id, awaited.request_id, first_block, piece
            )
            self._peers.send(awaited.source, fetch)
            transfer.num_asked += piece
        if transfer.num_written == num_blocks:
            self._end(transfer)

    def _repeat(self, transfer: _Transfer) -> None:
        transfer.num_repeats += 1
        if transfer.num_repeats > _MAX_REPEATS:
            self._give_up(transfer, f"they were damaged {transfer.num_repeats} times")
            return
        transfer.num_asked = transfer.num_written
        self._ask(transfer)

    def _give_up(self, transfer: _Transfer, reason: str) -> None:
        awaited = transfer.awaited
        logger.warning(
            "request %s: %d KV blocks of its prompt are computed again: %s",
            awaited.request_id,
            len(awaited.blocks) - transfer.num_written,
            reason,
        )
        self._end(transfer)

    def _end(self, transfer: _Transfer) -> None:
        awaited = transfer.awaited
        del self._transfers[awaited.seq_id]
        self._scheduler.blocks_arrived(awaited.seq_id, awaited.first_block + transfer.num_written)
        self._arrived.append(BlocksArrived(awaited.request_id, awaited.client_index))
