"""Handles, metadata and packed outputs: what is stale or malformed raises, it is never read."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer_backend._core import (
    FinishReason,
    RequestOutput,
    RequestOutputPool,
    SamplingOptions,
    StepArrays,
    StepLogprobs,
    WrittenSequence,
)
from tests.core.fake_device import TopLogprobs, make_arrays, make_logprobs
from tests.core.scheduler_driver import SchedulerDriver

FIELDS = [
    "request_id",
    "seq_id",
    "sequence_index",
    "output_index",
    "token_id",
    "finished",
    "finish_reason",
    "stop_token_id",
    "num_prompt_tokens",
    "num_cached_tokens",
    "first_scheduled_time_ns",
    "logprob",
    "rank",
    "top_logprobs",
]


def one_step(
    driver: SchedulerDriver, *request_ids: str, logprobs: StepLogprobs | None = None, num_logprobs: int = -1
) -> NDArray[np.uint64]:
    """The handles of one prefill step's outputs."""
    for request_id in request_ids:
        options = SamplingOptions(max_tokens=1, num_logprobs=num_logprobs)
        driver.scheduler.add_seq(request_id, np.array([2, 3], np.int32), options)
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    token_ids = np.full((len(request_ids), 1), 5, np.int32)
    num_tokens = np.ones(len(request_ids), np.int32)
    driver.scheduler.process_outputs(batch, token_ids, num_tokens, logprobs=logprobs)
    return driver.scheduler.build_request_outputs(batch, driver.output_pool)


def fields_of(outputs: list[RequestOutput]) -> str:
    """As text, in which NaN equals NaN."""
    return repr([[getattr(output, name) for name in FIELDS] for output in outputs])


TWO_TOPS: list[TopLogprobs] = [[(3, -0.25), (5, -1.5)], [(5, -0.5), (4, -2.0)]]


def test_clone_outlives_its_handle() -> None:
    driver = SchedulerDriver()
    handles = one_step(driver, "a")
    assert handles.dtype == np.uint64
    kept = RequestOutput.clone(handles[0])
    driver.output_pool.release(handles)
    assert (kept.request_id, kept.token_id, kept.finish_reason) == ("a", 5, FinishReason.LENGTH)


def test_stale_handle_raises_even_when_its_place_is_used_again() -> None:
    driver = SchedulerDriver()
    handles = one_step(driver, "a")
    driver.output_pool.release(handles)
    one_step(driver, "b")
    with pytest.raises(LookupError, match="stale"):
        RequestOutput.clone(int(handles[0]))
    for use in (driver.output_pool.clone, driver.output_pool.pack, driver.output_pool.release):
        with pytest.raises(LookupError):
            use(handles)
    assert driver.output_pool.num_in_use == 1


def test_handle_is_released_once() -> None:
    driver = SchedulerDriver()
    handles = one_step(driver, "a", "b")
    with pytest.raises(LookupError):
        driver.output_pool.release(np.array([handles[0], handles[0]]))
    assert driver.output_pool.num_in_use == 1


@pytest.mark.parametrize("handle", [0, 1, 2**64 - 1, 2**48])
def test_handle_that_was_never_given_out_raises(handle: int) -> None:
    pool = RequestOutputPool()
    with pytest.raises(LookupError):
        RequestOutput.clone(handle)
    with pytest.raises(LookupError):
        pool.clone(np.array([handle], dtype=np.uint64))


def test_handle_of_another_pool_or_of_one_that_is_gone_raises() -> None:
    driver = SchedulerDriver()
    handles = one_step(driver, "a")
    with pytest.raises(LookupError):
        RequestOutputPool().release(handles)
    del driver
    with pytest.raises(LookupError, match="no pool"):
        RequestOutput.clone(handles[0])


def test_metadata_of_a_step_that_is_over_raises() -> None:
    driver = SchedulerDriver()
    driver.scheduler.add_seq("a", np.array([2, 3], np.int32), SamplingOptions(max_tokens=1))
    metadata, batch = driver.scheduler.schedule(driver.metadata_pool)
    (row,) = metadata
    assert (row.request_id, row.block_table.tolist(), row.seqlen_q, row.seqlen_k) == ("a", [1], 2, 2)
    assert (len(metadata), metadata[0].samples, metadata[-1].output_index) == (1, True, 0)
    with pytest.raises(IndexError):
        metadata[1]
    driver.scheduler.process_outputs(batch, np.array([[5]], np.int32), np.ones(1, np.int32))
    assert row.is_prefill
    driver.scheduler.build_request_outputs(batch, driver.output_pool)
    for name in ("request_id", "seq_id", "block_table", "samples"):
        with pytest.raises(LookupError):
            getattr(row, name)
    with pytest.raises(LookupError):
        _ = metadata[0].seq_id
    with pytest.raises(LookupError, match="step is over"):
        batch.write(StepArrays(**make_arrays(8, 8, 8)))
    assert driver.metadata_pool.num_in_use == 0


def test_metadata_outlives_its_scheduler_without_harm() -> None:
    driver = SchedulerDriver()
    driver.scheduler.add_seq("a", np.array([2, 3], np.int32), SamplingOptions(max_tokens=1))
    metadata, batch = driver.scheduler.schedule(driver.metadata_pool)
    del driver
    assert metadata[0].request_id == "a"
    del batch, metadata


def test_batches_and_metadata_are_recycled() -> None:
    driver = SchedulerDriver()
    for index in range(3):
        driver.output_pool.release(one_step(driver, f"a{index}", f"b{index}"))
        driver.scheduler.free_finished_seqs()
    assert (driver.metadata_pool.num_in_use, driver.output_pool.num_in_use) == (0, 0)


FLOATS = st.floats(width=32)


@given(
    st.lists(
        st.tuples(st.text(max_size=20), FLOATS, st.integers(0, 2**31 - 1), st.lists(FLOATS, min_size=2, max_size=2)),
        min_size=1,
        max_size=8,
        unique_by=lambda request: request[0],
    ),
    st.integers(-1, 3),
)
def test_unpack_gives_back_what_was_packed(
    requests: list[tuple[str, float, int, list[float]]], num_logprobs: int
) -> None:
    request_ids, logprobs, ranks, tops = zip(*requests, strict=True)
    driver = SchedulerDriver()
    told = make_logprobs(
        list(range(len(requests))), list(logprobs), list(ranks), [list(enumerate(top)) for top in tops]
    )
    handles = one_step(driver, *request_ids, logprobs=told, num_logprobs=num_logprobs)
    outputs = driver.output_pool.clone(handles)
    unpacked = RequestOutput.unpack(pack(driver, handles))
    assert fields_of(unpacked) == fields_of(outputs)
    assert [output.request_id for output in unpacked] == list(request_ids)
    if num_logprobs >= 0:
        assert [output.rank for output in unpacked] == list(ranks)
        assert repr([output.logprob for output in unpacked]) == repr(list(logprobs))
    wanted = [list(enumerate(top))[: max(num_logprobs, 0)] for top in tops]
    assert repr([output.top_logprobs for output in unpacked]) == repr(wanted)


def test_data_that_is_cut_or_too_long_or_something_else_is_refused() -> None:
    driver = SchedulerDriver()
    told = make_logprobs([0, 1], [-1.5, -0.5], [2, 1], TWO_TOPS)
    data = pack(driver, one_step(driver, "request", "other", logprobs=told, num_logprobs=2))
    assert [output.top_logprobs for output in RequestOutput.unpack(data)] == TWO_TOPS
    for size in range(len(data)):
        with pytest.raises(ValueError, match="packed outputs"):
            RequestOutput.unpack(data[:size])
        # Also when the header agrees that it is no longer.
        with pytest.raises(ValueError, match="packed outputs"):
            RequestOutput.unpack(with_size_in_header(data[:size]))
    longer = with_size_in_header(data + b"x")
    for wrong in (data + b"x", longer, b"x" + data[1:], b"x" * len(data)):
        with pytest.raises(ValueError, match="packed outputs"):
            RequestOutput.unpack(wrong)
    assert driver.output_pool.pack(np.empty(0, np.uint64)) == {}


def pack(driver: SchedulerDriver, handles: NDArray[np.uint64]) -> bytes:
    """Those of the only client."""
    return driver.output_pool.pack(handles)[0]


def with_size_in_header(data: bytes) -> bytes:
    """The header: magic, version, number of outputs, then the size of all data as a uint64."""
    return data[:16] + len(data).to_bytes(8, sys.byteorder) + data[24:]


@given(st.integers(0, 400), st.integers(0, 255))
def test_broken_data_is_read_or_refused_but_never_past_its_end(index: int, value: int) -> None:
    driver = SchedulerDriver()
    told = make_logprobs([0, 1], [-1.5, -0.5], [2, 1], TWO_TOPS)
    data = bytearray(pack(driver, one_step(driver, "request", "other", logprobs=told, num_logprobs=2)))
    data[index % len(data)] = value
    with contextlib.suppress(ValueError, UnicodeDecodeError):
        assert [(len(output.request_id), output.top_logprobs) for output in RequestOutput.unpack(bytes(data))]


def test_written_sequence_comes_out_token_by_token_for_the_request_of_its_sequence() -> None:
    driver = SchedulerDriver()
    seq_id = driver.add("a", [2, 3, 4, 5, 6], 9, is_beam=True)
    driver.step()
    text = WrittenSequence(
        sequence_index=2,
        token_ids=[5, 6, 7],
        logprobs=[-0.5, -1.5, -2.0],
        finish_reason=FinishReason.STOP,
        stop_token_id=7,
    )
    handles = driver.scheduler.build_sequence_outputs(seq_id, driver.output_pool, text)
    outputs = RequestOutput.unpack(pack(driver, handles))
    driver.output_pool.release(handles)
    assert [(o.request_id, o.sequence_index, o.num_prompt_tokens) for o in outputs] == [("a", 2, 5)] * 3
    assert [(o.output_index, o.token_id, o.logprob, o.finished) for o in outputs] == [
        (0, 5, -0.5, False),
        (1, 6, -1.5, False),
        (2, 7, -2.0, True),
    ]
    assert [(o.finish_reason.name, o.stop_token_id) for o in outputs] == [("NONE", -1)] * 2 + [("STOP", 7)]
    assert all(output.first_scheduled_time_ns > 0 for output in outputs)
    with pytest.raises(LookupError, match="no sequence 7"):
        driver.scheduler.build_sequence_outputs(7, driver.output_pool, text)
    for token_ids, logprobs in [([], []), ([5], []), ([5], [-1.0, -1.0])]:
        wrong = WrittenSequence(
            sequence_index=0, token_ids=token_ids, logprobs=logprobs, finish_reason=FinishReason.STOP
        )
        with pytest.raises(ValueError, match="one entry at least"):
            driver.scheduler.build_sequence_outputs(seq_id, driver.output_pool, wrong)
    driver.drain()
