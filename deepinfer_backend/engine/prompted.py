"""What goes with a request from the engine that computed its prompt to the one that decodes."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_backend._core import PromptedSequence, RequestOutput
from deepinfer_backend.engine.messages import BlockSource, Prompted


def prompted_among(outputs: Iterable[RequestOutput], source: BlockSource) -> list[Prompted]:
    """Of the first outputs of sequences, those that go on; source: where their prompts' blocks are."""
    return [
        Prompted(
            output.request_id,
            output.token_id,
            output.num_cached_tokens,
            output.first_scheduled_time_ns,
            source,
            output.client_index,
        )
        for output in outputs
        if not output.finished
    ]


def prompted_sequence(prompted: Prompted) -> PromptedSequence:
    """As the scheduler takes it."""
    return PromptedSequence(
        first_token_id=prompted.first_token_id,
        source=prompted.source_index,
        num_cached_tokens=prompted.num_cached_tokens,
        first_scheduled_time_ns=prompted.first_scheduled_time_ns,
    )
