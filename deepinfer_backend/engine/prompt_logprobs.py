"""Log-probabilities of prompts, put together from the chunks in which the prompts were computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.engine.messages import EngineRequest, PromptLogprobs


class _Table:
    """The rows of one request, [num_prompt_tokens - 1, 1 + k] each."""

    def __init__(self, request: EngineRequest) -> None:
        num_rows = len(request.prompt_token_ids) - 1
        width = 1 + (request.sampling_params.prompt_logprobs or 0)
        self.request_id = request.request_id
        self.client_index = request.client_index
        self.token_ids = np.zeros((num_rows, width), np.int32)
        self.logprobs = np.zeros((num_rows, width), np.float32)
        self.ranks = np.zeros((num_rows, width), np.int32)
        self.token_ids[:, 0] = request.prompt_token_ids[1:]
        self.ranks[:, 1:] = np.arange(1, width)


class PromptLogprobsTables:
    """Those of all requests that asked and whose prompts are not done. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}  # by sequence

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, seq_id: int, request: EngineRequest) -> None:
        if request.sampling_params.prompt_logprobs is not None:
            self._tables[seq_id] = _Table(request)

    def remove(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self._tables.pop(seq_id, None)

    def fill(
        self,
        seq_id: int,
        begin: int,
        logprobs: NDArray[np.float32],
        ranks: NDArray[np.int32],
        top_token_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
    ) -> None:
        """What the logits of positions `begin` … say about the tokens after them; arrays [num_positions(, k)].

        A prompt that was preempted half-way is computed from its beginning again and fills the same rows.
        """
        table = self._tables[seq_id]
        rows = slice(begin, begin + len(logprobs))
        num_top = table.token_ids.shape[1] - 1
        table.logprobs[rows, 0] = logprobs
        table.ranks[rows, 0] = ranks
        table.token_ids[rows, 1:] = top_token_ids[:, :num_top]
        table.logprobs[rows, 1:] = top_logprobs[:, :num_top]

    def take(self, seq_id: int) -> PromptLogprobs | None:
        """The whole table, for when the sequence's prompt is computed; None if it has none, or it was taken before."""
        table = self._tables.pop(seq_id, None)
        if table is None:
            return None
        return PromptLogprobs(
            table.request_id,
            table.token_ids.tobytes(),
            table.logprobs.tobytes(),
            table.ranks.tobytes(),
            client_index=table.client_index,
        )
