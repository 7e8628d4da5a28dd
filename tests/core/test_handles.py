"""Handles, metadata, packed outputs and step arrays: what is stale or malformed raises, it is never read."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer_backend._core import FinishReason, RequestOutput, RequestOutputPool, SamplingOptions, StepArrays
from tests.core.fake_device import SchedulerDriver, make_arrays

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
]


def one_step(driver: SchedulerDriver, *request_ids: str) -> NDArray[np.uint64]:
    """The handles of one prefill step's outputs."""
    for request_id in request_ids:
        driver.scheduler.add_seq(request_id, np.array([2, 3], np.int32), SamplingOptions(max_tokens=1))
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    num_rows = len(request_ids)
    driver.scheduler.process_outputs(batch, np.full((num_rows, 1), 5, np.int32), np.ones(num_rows, np.int32))
    return driver.scheduler.build_request_outputs(batch, driver.output_pool)


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


@given(st.lists(st.text(max_size=20), min_size=1, max_size=8, unique=True))
def test_unpack_gives_back_what_was_packed(request_ids: list[str]) -> None:
    driver = SchedulerDriver()
    handles = one_step(driver, *request_ids)
    outputs = driver.output_pool.clone(handles)
    unpacked = RequestOutput.unpack(driver.output_pool.pack(handles))
    assert [[getattr(output, name) for name in FIELDS] for output in unpacked] == [
        [getattr(output, name) for name in FIELDS] for output in outputs
    ]
    assert {output.request_id for output in unpacked} == set(request_ids)


def test_data_that_is_cut_or_too_long_or_something_else_is_refused() -> None:
    driver = SchedulerDriver()
    data = driver.output_pool.pack(one_step(driver, "request", "other"))
    for size in range(len(data)):
        with pytest.raises(ValueError, match="packed outputs"):
            RequestOutput.unpack(data[:size])
    for wrong in (data + b"x", b"x" + data[1:], b"x" * len(data)):
        with pytest.raises(ValueError, match="packed outputs"):
            RequestOutput.unpack(wrong)
    assert RequestOutput.unpack(driver.output_pool.pack(np.empty(0, np.uint64))) == []


@given(st.integers(0, 150), st.integers(0, 255))
def test_broken_data_is_read_or_refused_but_never_past_its_end(index: int, value: int) -> None:
    driver = SchedulerDriver()
    data = bytearray(driver.output_pool.pack(one_step(driver, "request", "other")))
    data[index % len(data)] = value
    with contextlib.suppress(ValueError, UnicodeDecodeError):
        assert [len(output.request_id) for output in RequestOutput.unpack(bytes(data))]


def wrong_arrays() -> list[tuple[str, Any]]:
    read_only = np.zeros(4, np.int64)
    read_only.flags.writeable = False
    return [
        ("token_ids", np.zeros(8, np.int64)),
        ("positions", np.zeros(9, np.int64)),
        ("query_start_loc", np.zeros(4, np.int32)),
        ("block_tables", np.zeros(4, np.int32)),
        ("block_tables", np.zeros((5, 4), np.int32).T),
        ("uniforms", np.zeros(4, np.float32)),
        ("seq_lens", np.zeros(0, np.int32)),
        ("logits_indices", read_only),
        ("slot_mapping", np.zeros(16, np.int64)[::2]),
        ("banned_token_ids", np.zeros(3, np.int64)),
    ]


@pytest.mark.parametrize(("name", "array"), wrong_arrays())
def test_step_arrays_refuse_what_write_could_not_fill(name: str, array: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        StepArrays(**{**make_arrays(8, 4, 4), name: array})


def test_write_refuses_arrays_that_are_too_small_and_leaves_them_alone() -> None:
    driver = SchedulerDriver()
    options = SamplingOptions(max_tokens=9, min_tokens=2, eos_token_ids=[7, 8])
    driver.scheduler.add_seq("a", np.arange(2, 8, dtype=np.int32), options)
    driver.scheduler.add_seq("b", np.arange(2, 8, dtype=np.int32), options)
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    for sizes, what in [
        ((11, 2, 2, 4), "12 tokens"),
        ((12, 1, 2, 4), "2 sequences"),
        ((12, 2, 1, 4), "2 blocks"),
        ((12, 2, 2, 3), "4 banned tokens"),
    ]:
        arrays = make_arrays(*sizes)
        with pytest.raises(ValueError, match=what):
            batch.write(StepArrays(**arrays))
        assert (arrays["token_ids"] == -77).all()
    arrays = make_arrays(12, 2, 2, 4)
    batch.write(StepArrays(**arrays))
    assert arrays["banned_rows"].tolist() == [0, 0, 1, 1]
    assert arrays["banned_token_ids"].tolist() == [7, 8, 7, 8]
    assert arrays["logits_indices"].tolist() == [5, 11]
    assert arrays["query_start_loc"].tolist() == [0, 6, 12]


def test_step_arrays_keep_their_memory() -> None:
    driver = SchedulerDriver()
    step_arrays = StepArrays(**make_arrays(8, 4, 4))
    driver.scheduler.add_seq("a", np.array([2, 3], np.int32), SamplingOptions(max_tokens=1))
    driver.scheduler.schedule(driver.metadata_pool)[1].write(step_arrays)


def test_sampling_parameters_stand_beside_the_rows_that_sample() -> None:
    driver = SchedulerDriver()
    greedy = SamplingOptions(max_tokens=9)
    random = SamplingOptions(max_tokens=9, temperature=0.5, top_k=3, top_p=0.75, seed=9)
    for request_id, options in (("a", greedy), ("b", random)):
        driver.scheduler.add_seq(request_id, np.array([2, 3], np.int32), options)
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    arrays = make_arrays(8, 4, 4)
    batch.write(StepArrays(**arrays))
    assert arrays["temperature"][:2].tolist() == [0.0, 0.5]
    assert arrays["top_k"][:2].tolist() == [0, 3]
    assert arrays["top_p"][:2].tolist() == [1.0, 0.75]
    assert (batch.all_greedy, batch.any_top_k, batch.any_top_p) == (False, True, True)


def test_uniforms_of_neighbouring_seeds_and_positions_are_spread_evenly() -> None:
    driver = SchedulerDriver(max_num_seqs=64, num_blocks=1024, max_num_batched_tokens=64)
    for seed in range(64):
        options = SamplingOptions(max_tokens=40, temperature=1.0, seed=seed)
        driver.scheduler.add_seq(f"{seed}", np.array([2], np.int32), options)
    arrays = make_arrays(64, 64, 16)
    step_arrays, uniforms = StepArrays(**arrays), []
    while driver.scheduler.has_unfinished_seqs():
        _, batch = driver.scheduler.schedule(driver.metadata_pool)
        batch.write(step_arrays)
        uniforms.append(arrays["uniforms"].copy())
        driver.scheduler.process_outputs(batch, np.full((64, 1), 5, np.int32), np.ones(64, np.int32))
        driver.output_pool.release(driver.scheduler.build_request_outputs(batch, driver.output_pool))
    table = np.array(uniforms)  # [output index, seed]
    assert len(np.unique(table)) == table.size == 40 * 64
    assert abs(table.mean() - 0.5) < 0.02
    histogram = np.histogram(table, bins=10, range=(0, 1))[0] / table.size
    assert abs(histogram - 0.1).max() < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.06
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.06
