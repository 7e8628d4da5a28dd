"""Which rank gets a request: the one with the least to do, or the one that knows its prompt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_backend.engine.messages import BlockSource, EngineRequest, Prompted
from deepinfer_backend.engine.request_router import RequestRouter
from deepinfer_backend.sampling_params import SamplingParams


def request(request_id: str, prompt: list[int], **params: Any) -> EngineRequest:
    return EngineRequest(request_id, np.array(prompt, dtype=np.int32), SamplingParams(**params))


def test_requests_that_are_alike_are_shared_evenly() -> None:
    router = RequestRouter(3)
    ranks = [router.assign(request(str(index), [index] * 10), range(3)) for index in range(30)]
    assert Counter(ranks) == {0: 10, 1: 10, 2: 10}


def test_one_long_prompt_is_worth_many_short_ones() -> None:
    router = RequestRouter(2)
    assert router.assign(request("long", list(range(1000))), range(2)) == 0
    assert {router.assign(request(str(index), [index]), range(2)) for index in range(10)} == {1}


def test_a_prompt_is_work_until_its_first_token_is_there() -> None:
    router = RequestRouter(2)
    router.assign(request("long", list(range(1000))), range(2))
    router.end_prefill("long")
    assert [router.assign(request(str(index), [index]), range(2)) for index in range(3)] == [1, 0, 1]
    router.end_prefill("unknown")
    for request_id in ("long", "0", "1", "2"):
        router.end_prefill(request_id)
        router.release(request_id)
    assert router._work == [0, 0]


def test_what_has_ended_is_no_work_any_more() -> None:
    router = RequestRouter(2)
    router.assign(request("long", list(range(1000))), range(2))
    assert router.release("long")
    assert not router.release("long")
    assert router.assign(request("next", [7]), range(2)) == 0


@pytest.mark.parametrize("field", ["n", "beam_width"])
def test_each_sequence_is_work(field: str) -> None:
    router = RequestRouter(2)
    assert router.assign(request("many", [1], **{field: 4}), range(2)) == 0
    assert [router.assign(request(str(index), [index]), range(2)) for index in range(4)] == [1, 1, 1, 1]


PREFIX = list(range(1, 257))


def test_a_prompt_that_begins_like_one_before_goes_where_that_went() -> None:
    router = RequestRouter(2)
    router.assign(request("other", [5]), range(2))
    assert router.assign(request("first", [*PREFIX, 3]), range(2)) == 1
    router.release("first")
    router.release("other")
    assert [router.assign(request(str(index), [*PREFIX, index]), range(2)) for index in range(4)] == [1, 1, 1, 1]


def test_a_rank_that_knows_the_prompt_but_has_far_more_to_do_does_not_get_it() -> None:
    router = RequestRouter(2)
    ranks = [router.assign(request(str(index), [*PREFIX, index]), range(2)) for index in range(12)]
    assert set(ranks) == {0, 1}


@pytest.mark.parametrize("params", [{"lora_name": "law"}, {"cache_salt": "mine"}])
def test_what_another_adapter_or_salt_computed_is_not_known(params: dict[str, str]) -> None:
    router = RequestRouter(2)
    router.assign(request("other", [5]), range(2))
    assert router.assign(request("first", PREFIX), range(2)) == 1
    router.release("first")
    router.release("other")
    assert router.assign(request("second", PREFIX, **params), range(2)) == 0


def test_a_rank_that_has_died_had_these_and_knows_nothing() -> None:
    router = RequestRouter(2)
    for index in range(4):
        router.assign(request(str(index), [*PREFIX, index]), [1])
    router.assign(request("elsewhere", [1]), [0])
    assert sorted(router.release_rank(1).request_ids) == ["0", "1", "2", "3"]
    router.release("elsewhere")
    assert router.rank_of("0") is None
    assert router.assign(request("next", PREFIX), range(2)) == 0


def prompted(request_id: str) -> Prompted:
    return Prompted(request_id, 5, 0, 1, BlockSource("ipc://nowhere", 1))


def test_a_request_goes_from_one_that_prefills_to_the_one_that_decodes_least() -> None:
    router = RequestRouter(4, num_prompt_ranks=2)
    ranks = [router.assign(request(str(index), [index] * 10), range(4)) for index in range(6)]
    assert Counter(ranks) == {0: 3, 1: 3}
    handed = [router.hand_over(prompted(str(index)), range(4)) for index in range(6)]
    assert Counter(rank for rank, _ in filter(None, handed)) == {2: 3, 3: 3}
    assert router._work[:2] == [0, 0]
    assert router.by_rank(["1"], str) == {ranks[1]: ["1"], router.rank_of("1"): ["1"]}
    assert router.end_hand_over("1") == ranks[1]
    assert router.by_rank(["1"], str) == {router.rank_of("1"): ["1"]}


@pytest.mark.parametrize("field", ["n", "beam_width"])
def test_what_has_several_sequences_is_prefilled_where_it_is_decoded(field: str) -> None:
    assert RequestRouter(3, num_prompt_ranks=2).assign(request("many", [1], **{field: 4}), range(3)) == 2


def test_without_one_that_prefills_those_that_decode_do_it() -> None:
    assert RequestRouter(3, num_prompt_ranks=2).assign(request("only", [1]), [2]) == 2


def test_a_request_that_has_ended_is_not_handed_over() -> None:
    router = RequestRouter(2, num_prompt_ranks=1)
    assert router.hand_over(prompted("unknown"), range(2)) is None
    router.assign(request("one", [1]), range(2))
    assert router.hand_over(prompted("one"), [0]) is None
    assert router.rank_of("one") == 0


def test_a_hand_over_begins_anew_when_the_rank_dies_that_was_to_decode() -> None:
    router = RequestRouter(3, num_prompt_ranks=1)
    for request_id in ("handed", "arrived", "prefilling"):
        router.assign(request(request_id, [1]), range(3))
    for request_id in ("handed", "arrived"):
        router.hand_over(prompted(request_id), [1])
    router.end_hand_over("arrived")
    loss = router.release_rank(1)
    assert (loss.request_ids, [each.request_id for each in loss.prompted]) == (["arrived"], ["handed"])
    assigned = router.hand_over(loss.prompted[0], [2])
    assert assigned is not None and assigned[0] == 2
    assert router.end_hand_over("handed") == 0
    assert router._work[1] == 0


def test_the_death_of_one_that_prefills_is_not_that_of_what_it_handed_over() -> None:
    router = RequestRouter(2, num_prompt_ranks=1)
    for request_id in ("handed", "prefilling"):
        router.assign(request(request_id, [1]), range(2))
    router.hand_over(prompted("handed"), range(2))
    assert router.release_rank(0).request_ids == ["prefilling"]
    assert router.rank_of("handed") == 1 and router.end_hand_over("handed") is None


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.sets(st.integers(0, 2), min_size=1)), max_size=60))
def test_only_available_ranks_get_requests_and_all_work_is_given_back(
    requests: list[tuple[int, bool, set[int]]],
) -> None:
    router = RequestRouter(3)
    for index, (num_tokens, is_released, available) in enumerate(requests):
        assert router.assign(request(str(index), [*PREFIX[:num_tokens], 1]), available) in available
        if is_released:
            router.release(str(index))
    for index in range(len(requests)):
        router.release(str(index))
    assert router._work == [0, 0, 0] and not router._assignments
