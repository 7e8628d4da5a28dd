"""What a step writes into the Worker's own arrays, and which arrays it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_backend._core import SamplingOptions, StepArrays
from tests.core.fake_device import make_arrays
from tests.core.scheduler_driver import SchedulerDriver


def wrong_arrays() -> list[tuple[str, Any]]:
    read_only = np.zeros(4, np.int64)
    read_only.flags.writeable = False
    return [
        ("token_ids", np.zeros(8, np.int32)),
        ("positions", np.zeros(9, np.int64)),
        ("query_start_loc", np.zeros(4, np.int32)),
        ("block_tables", np.zeros(4, np.int32)),
        ("block_tables", np.zeros((5, 4), np.int32).T),
        ("advance_slots", np.zeros(3, np.int32)),
        ("token_sources", np.zeros(4, np.int32)),
        ("sample_start_loc", np.zeros(4, np.int32)),
        ("seeds", np.zeros(4, np.uint64)),
        ("min_p", np.zeros(4, np.float32)),
        ("seq_lens", np.zeros(0, np.int32)),
        ("logits_indices", np.zeros(0, np.int64)),
        ("logits_indices", read_only),
        ("slot_mapping", np.zeros(16, np.int64)[::2]),
        ("banned_token_ids", np.zeros(3, np.int64)),
        ("banned_until", np.zeros(3, np.int64)),
    ]


@pytest.mark.parametrize(("name", "array"), wrong_arrays())
def test_step_arrays_refuse_what_write_could_not_fill(name: str, array: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        StepArrays(**{**make_arrays(8, 4, 4), name: array})


def test_write_refuses_arrays_that_are_too_small_and_leaves_them_alone() -> None:
    driver = SchedulerDriver()
    options = SamplingOptions(max_tokens=9, min_tokens=2, eos_token_ids=[7, 8])
    with_prompt = SamplingOptions(max_tokens=9, min_tokens=2, eos_token_ids=[7, 8], prompt_logprobs=True)
    driver.scheduler.add_seq("a", np.arange(2, 8, dtype=np.int32), options)
    driver.scheduler.add_seq("b", np.arange(2, 6, dtype=np.int32), with_prompt)
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    for sizes, what in [
        ((9, 2, 2, 4, 3), "10 tokens"),
        ((10, 1, 2, 4, 4), "2 sequences"),
        ((10, 2, 1, 4, 3), "2 blocks"),
        ((10, 2, 2, 3, 3), "4 banned tokens"),
        ((10, 2, 2, 4, 2), "5 rows of logits, the arrays hold 4"),
    ]:
        arrays = make_arrays(*sizes)
        with pytest.raises(ValueError, match=what):
            batch.write(StepArrays(**arrays))
        assert all((array == -77).all() for array in arrays.values())
    arrays = make_arrays(10, 2, 2, 4, 4)
    batch.write(StepArrays(**arrays))
    assert arrays["banned_rows"].tolist() == [0, 0, 1, 1]
    assert arrays["banned_token_ids"].tolist() == [7, 8, 7, 8]
    assert arrays["logits_indices"].tolist() == [5, 9, 6, 7, 8, -77]
    assert arrays["query_start_loc"].tolist() == [0, 6, 10]


def test_step_arrays_keep_their_memory() -> None:
    driver = SchedulerDriver()
    step_arrays = StepArrays(**make_arrays(8, 4, 4))
    driver.scheduler.add_seq("a", np.array([2, 3], np.int32), SamplingOptions(max_tokens=1))
    driver.scheduler.schedule(driver.metadata_pool)[1].write(step_arrays)


def test_sampling_parameters_stand_beside_the_rows_that_sample() -> None:
    driver = SchedulerDriver()
    greedy = SamplingOptions(max_tokens=9)
    random = SamplingOptions(max_tokens=9, temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=2**64 - 9)
    for request_id, options in (("a", greedy), ("b", random)):
        driver.scheduler.add_seq(request_id, np.array([2, 3], np.int32), options)
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    arrays = make_arrays(8, 4, 4)
    batch.write(StepArrays(**arrays))
    assert arrays["temperature"][:2].tolist() == [0.0, 0.5]
    assert arrays["top_k"][:2].tolist() == [0, 3]
    assert arrays["top_p"][:2].tolist() == [1.0, 0.75]
    assert arrays["min_p"][:2].tolist() == [0.0, 0.25]
    assert arrays["seeds"][:2].tolist() == [0, -9]
    assert arrays["output_indices"][:2].tolist() == [0, 0]
    assert (batch.all_greedy, batch.max_top_k, batch.any_top_p, batch.any_min_p) == (False, 3, True, True)


def test_what_no_row_uses_is_not_announced() -> None:
    driver = SchedulerDriver()
    for index, options in enumerate(
        [
            SamplingOptions(max_tokens=9, temperature=1.0),
            SamplingOptions(max_tokens=9, top_k=3, top_p=0.5, min_p=0.5),  # greedy: has no use for them
        ]
    ):
        driver.scheduler.add_seq(f"{index}", np.array([2, 3], np.int32), options)
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    assert (batch.max_top_k, batch.any_top_p, batch.any_min_p, batch.any_lora) == (0, False, False, False)
    assert (batch.tracked_rows.tolist(), batch.prompt_logits.shape) == ([], (0, 3))
