"""Several clients of one scheduler: each is told of its own requests, and can end them alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend._core import RequestOutput, SamplingOptions
from tests.core.scheduler_driver import SchedulerDriver


def add(driver: SchedulerDriver, request_id: str, client_index: int, num_tokens: int = 2, n: int = 1) -> None:
    prompt = np.full(num_tokens, 3, np.int32)
    options = SamplingOptions(max_tokens=5, n=n)
    driver.scheduler.add_seq(request_id, prompt, options, client_index=client_index)


def step(driver: SchedulerDriver) -> NDArray[np.uint64]:
    _, batch = driver.scheduler.schedule(driver.metadata_pool)
    token_ids = np.full((batch.num_sampled, 1), 5, np.int32)
    driver.scheduler.process_outputs(batch, token_ids, np.ones(batch.num_sampled, np.int32))
    return driver.scheduler.build_request_outputs(batch, driver.output_pool)


def ids_by_client(driver: SchedulerDriver, handles: NDArray[np.uint64]) -> dict[int, list[str]]:
    packed = driver.output_pool.pack(handles)
    return {index: [output.request_id for output in RequestOutput.unpack(data)] for index, data in packed.items()}


def test_outputs_are_packed_for_the_client_of_their_request_in_order_forks_too() -> None:
    driver = SchedulerDriver()
    for request_id, client_index in (("a", 0), ("b", 2), ("c", 0)):
        add(driver, request_id, client_index)
    add(driver, "d", 2, n=2)
    assert ids_by_client(driver, step(driver)) == {0: ["a", "c"], 2: ["b", "d"]}
    assert ids_by_client(driver, step(driver)) == {0: ["a", "c"], 2: ["b", "d", "d"]}


def test_a_client_that_goes_takes_its_requests_along_and_nobody_elses() -> None:
    driver = SchedulerDriver()
    for request_id, client_index in (("a", 0), ("b", 1), ("c", 1)):
        add(driver, request_id, client_index)
    step(driver)
    add(driver, "waiting", 1)
    driver.scheduler.abort_client(1)
    assert driver.scheduler.num_unfinished_requests == 1
    assert ids_by_client(driver, step(driver)) == {0: ["a"]}
    driver.scheduler.abort_client(0)
    driver.scheduler.free_finished_seqs()
    assert driver.scheduler.num_used_blocks == 0
    driver.scheduler.check_invariants()


def test_a_request_was_scheduled_once_a_step_has_begun_it() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    add(driver, "first", 0, num_tokens=6)
    add(driver, "second", 0, num_tokens=6)
    assert not driver.scheduler.was_scheduled("first")
    step(driver)
    assert driver.scheduler.was_scheduled("first")
    assert not driver.scheduler.was_scheduled("second")
    assert not driver.scheduler.was_scheduled("unknown")
