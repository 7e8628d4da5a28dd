"""What stands for images and videos in prompts: named by negative tokens, and perhaps not to be cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_backend._core import (
    RequestOutputPool,
    SamplingOptions,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
    SequenceMetadataPool,
    StepArrays,
)
from tests.core.fake_device import make_arrays

BLOCK_SIZE = 4


def make_scheduler(**changes: int) -> Scheduler:
    config: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 128,
    }
    return Scheduler(SchedulerConfig(**{**config, **changes}))


def add(
    scheduler: Scheduler,
    request_id: str,
    tokens: list[int],
    spans: list[tuple[int, int]] | None = None,
    *,
    media: int = 1,
    whole: bool = True,
) -> None:
    options = SamplingOptions(max_tokens=60, media_id=media)
    scheduler.add_seq(request_id, np.array(tokens, np.int32), options, media_spans=spans or [], keeps_media_whole=whole)


def process(scheduler: Scheduler, batch: SchedulerOutputs) -> None:
    tokens = np.full((batch.num_sampled, 1), 7, np.int32)
    scheduler.process_outputs(batch, tokens, np.ones(batch.num_sampled, np.int32))
    scheduler.build_request_outputs(batch, RequestOutputPool())
    scheduler.check_invariants()


def prefill(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    """Of each prefill step until none is left: what it computes of sequences with media, (begin, end)."""
    pool, chunks = SequenceMetadataPool(), []
    while scheduler.num_waiting:
        _, batch = scheduler.schedule(pool)
        if batch.is_prefill:
            chunks.append([(begin, begin + num) for _, _, begin, num in batch.media_rows.tolist()])
        process(scheduler, batch)
    return chunks


def test_the_device_gets_no_negative_token() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", [5, -3, -3, 6])
    _, batch = scheduler.schedule(SequenceMetadataPool())
    arrays = make_arrays(max_tokens=16, max_seqs=8, max_blocks=32)
    batch.write(StepArrays(**arrays))
    assert arrays["token_ids"][:4].tolist() == [5, 0, 0, 6]
    assert batch.media_rows.tolist() == [[1, 0, 0, 4]]


def test_rows_of_media_say_where_they_are_in_step_and_sequence() -> None:
    scheduler = make_scheduler()
    add(scheduler, "text", [1, 2, 3], media=0)
    add(scheduler, "a", list(range(1, 31)), media=5)
    pool = SequenceMetadataPool()
    rows = []
    while scheduler.num_waiting:
        _, batch = scheduler.schedule(pool)
        rows.append(batch.media_rows.tolist())
        process(scheduler, batch)
    assert rows == [[[5, 3, 0, 13]], [[5, 0, 13, 16]], [[5, 0, 29, 1]]]


def test_the_prefix_cache_tells_contents_apart() -> None:
    scheduler = make_scheduler()
    prompt = [1, 2, -1, -1, -1, -1, -1, -1, 3, 4, 5, 6]
    add(scheduler, "a", prompt)
    prefill(scheduler)
    before = scheduler.num_cached_tokens
    add(scheduler, "same", prompt)
    prefill(scheduler)
    assert scheduler.num_cached_tokens - before == 8
    add(scheduler, "other", [2 if token == 2 else -2 if token == -1 else token for token in prompt])
    prefill(scheduler)
    assert scheduler.num_cached_tokens - before == 8


def test_no_chunk_ends_within_a_span() -> None:
    scheduler = make_scheduler()
    spans = [(5, 15), (20, 36)]
    add(scheduler, "a", list(range(1, 41)), spans)
    chunks = [chunk for step in prefill(scheduler) for chunk in step]
    assert [begin for begin, _ in chunks[1:]] == [end for _, end in chunks[:-1]]
    for _, end in chunks:
        assert not any(begin < end < last for begin, last in spans)


def test_others_use_the_room_that_a_span_leaves() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", list(range(1, 31)), [(4, 18)])
    add(scheduler, "b", [1, 2, 3], media=0)
    _, first = scheduler.schedule(SequenceMetadataPool())
    assert (first.num_tokens, first.num_seqs) == (7, 2)


def test_while_others_could_decode_a_step_computes_one_medium() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    spans = [(1, 5), (6, 10), (10, 14), (20, 24)]
    add(scheduler, "alone", list(range(1, 31)), spans, whole=False)
    assert prefill(scheduler) == [[(0, 30)]]
    add(scheduler, "beside", list(range(2, 32)), spans, whole=False)
    add(scheduler, "too", list(range(3, 33)), spans, whole=False)
    steps = prefill(scheduler)
    num_media = [
        sum(first < end and begin < last for begin, end in chunks for first, last in spans) for chunks in steps
    ]
    assert max(num_media) == 1
    assert sum(num_media) == 8


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([(0, 17)], r"17 tokens must be computed in one step, which has at most 16 \(max_num_batched_tokens\)"),
        ([(5, 5)], "parts of the prompt, in order"),
        ([(5, 9), (8, 12)], "parts of the prompt, in order"),
        ([(25, 31)], "parts of the prompt, in order"),
    ],
)
def test_a_span_that_cannot_be_is_refused(spans: list[tuple[int, int]], reason: str) -> None:
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match=reason):
        add(scheduler, "a", list(range(1, 31)), spans)
    assert not scheduler.has_unfinished_seqs()
