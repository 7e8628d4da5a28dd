"""Probabilities that a step tells: they come out with the tokens that asked for them, or are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from deepinfer_backend._core import SamplingOptions, StepLogprobs
from tests.core.fake_device import TopLogprobs, make_logprobs
from tests.core.scheduler_driver import SchedulerDriver

TWO_TOPS: list[TopLogprobs] = [[(3, -0.25), (5, -1.5)], [(5, -0.5), (4, -2.0)]]


def test_logprobs_go_to_the_rows_that_asked_for_them_and_to_no_other() -> None:
    driver = SchedulerDriver()
    for index, num_logprobs in enumerate([1, -1, 0, 2]):
        options = SamplingOptions(max_tokens=9, num_logprobs=num_logprobs)
        driver.scheduler.add_seq(f"{index}", np.array([2, 3], np.int32), options)
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    told = make_logprobs([0, 1, 2], [-1.5, -0.5, -2.5], [2, 1, 7], [*TWO_TOPS, TWO_TOPS[0]])
    driver.scheduler.process_outputs(batch, np.full((4, 1), 5, np.int32), np.ones(4, np.int32), logprobs=told)
    outputs = driver.output_pool.clone(driver.scheduler.build_request_outputs(batch, driver.output_pool))
    assert repr([(output.logprob, output.rank, output.top_logprobs) for output in outputs]) == repr(
        [(-1.5, 2, TWO_TOPS[0][:1]), (math.nan, 0, []), (-2.5, 7, []), (math.nan, 0, [])]
    )


def test_token_without_logprobs_has_none_left_over_from_another_step() -> None:
    driver = SchedulerDriver()
    options = SamplingOptions(max_tokens=9, num_logprobs=2)
    driver.scheduler.add_seq("a", np.array([2, 3], np.int32), options)
    tops = []
    for index in range(8):
        _, batch = driver.scheduler.schedule(driver.metadata_pool)
        told = make_logprobs([0], [-1.5], [2], TWO_TOPS[:1]) if index % 4 < 2 else None
        driver.scheduler.process_outputs(batch, np.array([[5]], np.int32), np.ones(1, np.int32), logprobs=told)
        handles = driver.scheduler.build_request_outputs(batch, driver.output_pool)
        (output,) = driver.output_pool.clone(handles)
        driver.output_pool.release(handles)
        assert math.isnan(output.logprob) == (told is None)
        assert output.rank == (0 if told is None else 2)
        tops.append(len(output.top_logprobs))
    assert tops == [2, 2, 0, 0] * 2


def wrong_logprobs() -> list[tuple[str, Callable[[], StepLogprobs]]]:
    ones = [-1.0, -1.0]
    return [
        ("rows must ascend and be below 2, got 0", lambda: make_logprobs([1, 0], ones, [1, 1], TWO_TOPS)),
        ("rows must ascend and be below 2, got 0", lambda: make_logprobs([0, 0], ones, [1, 1], TWO_TOPS)),
        ("rows must ascend and be below 2, got 2", lambda: make_logprobs([0, 2], ones, [1, 1], TWO_TOPS)),
        ("rows must ascend and be below 2, got -1", lambda: make_logprobs([-1, 0], ones, [1, 1], TWO_TOPS)),
        ("shapes do not match", lambda: make_logprobs([0, 1], [-1.0], [1, 1], TWO_TOPS)),
        ("shapes do not match", lambda: make_logprobs([0, 1], ones, [1], TWO_TOPS)),
        ("shapes do not match", lambda: make_logprobs([0], [-1.0], [1], TWO_TOPS)),
        ("top_token_ids", lambda: make_logprobs([0], [-1.0], [1], [])),
    ]


@pytest.mark.parametrize(("message", "make"), wrong_logprobs())
def test_logprobs_that_do_not_match_the_step_are_refused_and_change_nothing(
    message: str, make: Callable[[], StepLogprobs]
) -> None:
    driver = SchedulerDriver()
    for request_id in ("a", "b"):
        options = SamplingOptions(max_tokens=1, num_logprobs=2)
        driver.scheduler.add_seq(request_id, np.array([2, 3], np.int32), options)
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    token_ids = np.full((2, 1), 5, np.int32)
    with pytest.raises(ValueError, match=message):
        driver.scheduler.process_outputs(batch, token_ids, np.ones(2, np.int32), logprobs=make())
    driver.scheduler.check_invariants()
    driver.scheduler.process_outputs(batch, token_ids, np.ones(2, np.int32))
    assert len(driver.scheduler.build_request_outputs(batch, driver.output_pool)) == 2


def test_top_arrays_of_different_width_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes do not match"):
        StepLogprobs(
            rows=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            ranks=np.zeros(1, np.int32),
            top_token_ids=np.zeros((1, 2), np.int32),
            top_logprobs=np.zeros((1, 3), np.float32),
        )
