"""What the metrics endpoint of a live server says after known requests: every family, kind, label and count."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deepinfer_backend.triton.metric_families import ENGINE_FAMILIES, FAMILIES, REQUEST_FAMILIES, MetricFamily
from deepinfer_backend.triton.server import TritonServer
from tests.support.metrics_scrape import Scrape, scrape
from tests.support.triton_client import GrpcRequest, http_generate, http_post, stream_error, stream_text
from tests.support.triton_server import running_server, wait_until

OWNER, GUEST = "deepinfer", "guest"
WAIT_S = 30
NUM_BLOCKS, BLOCK_SIZE = 96, 16
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_model_len": 1024,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": NUM_BLOCKS,
}
LONG_PROMPT = list(range(100, 140))
NUM_GENERATED = 1 + 5 + 2 * 4 + 1 + 1 + 3  # an embedding's prefill samples one as well, but that is nobody's
REJECTED = ("invalid_arg", "queue_full", "unavailable")
CANCELLED = ("client", "timeout", "queue_timeout", "request_id")


@dataclass(frozen=True)
class Scrapes:
    """The same server at four times."""

    idle: Scrape
    answered: Scrape  # after requests whose every count is known
    cancelled: Scrape  # and some that did not come to an end
    unloaded: Scrape  # GUEST
    all_unloaded: Scrape


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Two models with one engine."""
    models = {OWNER: ARGUMENTS, GUEST: {"engine_of": OWNER}}
    with running_server(tmp_path_factory.mktemp("metered"), models, explicit_model_control=True) as running:
        yield running


@pytest.fixture(scope="module")
def scrapes(metered: TritonServer) -> Scrapes:
    wait_until(lambda: len(names_of(scrape(metered), OWNER)) >= len(FAMILIES), WAIT_S, "all families")
    idle = scrape(metered)
    send_known_requests(metered)
    wait_until(lambda: num_ended(metered, OWNER) == 7 and num_ended(metered, GUEST) == 1, WAIT_S, "all counted")
    # The other model's tokens are told by this one's process, in its own time.
    tokens = "deepinfer_generation_tokens_total"
    wait_until(lambda: scrape(metered).value(tokens, model=OWNER) >= NUM_GENERATED, WAIT_S, "all tokens")
    answered = scrape(metered)
    end_some_requests(metered)
    wait_until(lambda: num_ended(metered, OWNER) == 9, WAIT_S, "all counted")
    wait_until(lambda: gauge(metered, "used") == 0, WAIT_S, "no block in use")
    cancelled = scrape(metered)
    unload(metered, GUEST)
    unloaded = scrape(metered)
    unload(metered, OWNER)
    return Scrapes(idle, answered, cancelled, unloaded, scrape(metered))


def send_known_requests(server: TritonServer) -> None:
    """Each is answered before the next: 6 answers and a refusal of OWNER's, one of GUEST's."""

    def answer(model: str = OWNER, **body: Any) -> None:
        status, _ = http_generate(server, model=model, ignore_eos=True, **body)
        assert status == 200

    one_token = json.dumps({"allowed_token_ids": [7], "stop_token_ids": [7], "max_tokens": 9})
    assert http_generate(server, input_ids=[1, 2, 3], sampling_parameters=one_token)[0] == 200
    five = GrpcRequest(
        server, input_ids=list(range(20, 40)), sampling_parameters={"max_tokens": 5, "ignore_eos": True}, stream=True
    )
    stream_text(five.result())
    answer(input_ids=list(range(40, 50)), max_tokens=4, n=2)
    answer(input_ids=LONG_PROMPT, max_tokens=1)
    answer(input_ids=LONG_PROMPT, max_tokens=1)
    embedding = json.dumps({"input": list(range(10, 20))})
    assert http_generate(server, embedding_request=embedding)[0] == 200
    assert http_generate(server, input_ids=[1], max_tokens=0)[0] == 400
    answer(GUEST, input_ids=[5, 6, 7, 8, 9], max_tokens=3)


def end_some_requests(server: TritonServer) -> None:
    long = {"max_tokens": 900, "ignore_eos": True}
    left = GrpcRequest(server, input_ids=[1, 2], sampling_parameters=long, stream=True)
    left.wait_first()
    left.cancel()
    late = GrpcRequest(server, input_ids=[1, 2], sampling_parameters=long, parameters={"timeout": 200_000}, stream=True)
    assert stream_error(late.result()).startswith("CANCELLED")


def unload(server: TritonServer, model: str) -> None:
    assert http_post(server, f"/v2/repository/models/{model}/unload", b"{}")[0] == 200
    wait_until(lambda: not names_of(scrape(server), model), WAIT_S, f"nothing left of {model}")


def num_ended(server: TritonServer, model: str) -> float:
    """The histogram of whole times is published last; what was not answered is in the counter alone."""
    now = scrape(server)
    reasons = ("cancelled", "rejected", "error")
    others = sum(now.value("deepinfer_requests_total", model=model, finish_reason=reason) for reason in reasons)
    return now.value("deepinfer_e2e_request_latency_seconds_count", model=model) + others


def gauge(server: TritonServer, block_type: str) -> float:
    return scrape(server).value("nv_trt_llm_kv_cache_block_metrics", model=OWNER, kv_cache_block_type=block_type)


def sample_name(family: MetricFamily) -> str:
    return f"{family.name}_count" if family.kind.value == "histogram" else family.name


def names_of(now: Scrape, model: str) -> set[str]:
    """Which of our families have a series of `model`."""
    return {
        family.name
        for family in FAMILIES
        for name, labels in now.samples
        if name == sample_name(family) and ("model", model) in labels
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_there_before_the_first_request(scrapes: Scrapes, family: MetricFamily) -> None:
    idle = scrapes.idle
    assert idle.kinds[family.name] == family.kind.value
    assert idle.descriptions[family.name] == family.description
    extra = {family.label} if family.label else set()
    assert idle.label_names(sample_name(family)) == {"model", "version", *extra}
    if family.label:
        assert idle.label_values(family.name, family.label) == set(family.label_values)
    if family.buckets:
        limits = {float(limit) for limit in idle.label_values(f"{family.name}_bucket", "le")}
        assert limits == {*family.buckets, float("inf")}


def test_requests_are_counted_once_by_how_they_ended(scrapes: Scrapes) -> None:
    def counts(now: Scrape, model: str) -> dict[str, float]:
        reasons = ("stop", "length", "error", "cancelled", "rejected")
        found = {each: now.value("deepinfer_requests_total", model=model, finish_reason=each) for each in reasons}
        return {reason: count for reason, count in found.items() if count}

    assert counts(scrapes.idle, OWNER) == {}
    assert counts(scrapes.answered, OWNER) == {"stop": 2, "length": 4, "rejected": 1}
    assert counts(scrapes.answered, GUEST) == {"length": 1}
    assert counts(scrapes.cancelled, OWNER) == {"stop": 2, "length": 4, "rejected": 1, "cancelled": 2}


def test_rejections_and_cancellations_have_their_reason(scrapes: Scrapes) -> None:
    now = scrapes.cancelled
    rejected = {each: now.value("deepinfer_requests_rejected_total", model=OWNER, reason=each) for each in REJECTED}
    assert rejected == {"invalid_arg": 1, "queue_full": 0, "unavailable": 0}
    cancelled = {each: now.value("deepinfer_requests_cancelled_total", model=OWNER, reason=each) for each in CANCELLED}
    assert cancelled == {"client": 1, "timeout": 1, "queue_timeout": 0, "request_id": 0}


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("deepinfer_prompt_tokens_total", 3 + 20 + 10 + 40 + 40 + 10 + 5),
        ("deepinfer_cached_prompt_tokens_total", 2 * BLOCK_SIZE),
        ("deepinfer_generation_tokens_total", NUM_GENERATED),
        ("deepinfer_preemptions_total", 0),
        ("deepinfer_draft_tokens_total", 0),
        ("deepinfer_accepted_draft_tokens_total", 0),
    ],
)
def test_an_engine_counts_the_tokens_of_all_its_models(scrapes: Scrapes, name: str, total: int) -> None:
    assert scrapes.answered.value(name, model=OWNER) == total


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("deepinfer_time_to_first_token_seconds", 5, None),
        ("deepinfer_time_per_output_token_seconds", 2, None),
        ("deepinfer_inter_token_latency_seconds", 4 + 2 * 3, None),
        ("deepinfer_request_queue_time_seconds", 6, None),
        ("deepinfer_request_prefill_time_seconds", 6, None),
        ("deepinfer_request_decode_time_seconds", 5, None),
        ("deepinfer_e2e_request_latency_seconds", 6, None),
        ("deepinfer_request_prompt_tokens", 6, 3 + 20 + 10 + 40 + 40 + 10),
        ("deepinfer_request_generation_tokens", 5, 1 + 5 + 2 * 4 + 1 + 1),
    ],
)
def test_histograms_have_the_requests_that_were_answered(
    scrapes: Scrapes, name: str, count: int, total: int | None
) -> None:
    now = scrapes.answered
    assert now.value(f"{name}_count", model=OWNER) == count
    if total is None:
        assert 0 < now.value(f"{name}_sum", model=OWNER) < 60
    else:
        assert now.value(f"{name}_sum", model=OWNER) == total
    assert scrapes.cancelled.value("deepinfer_e2e_request_latency_seconds_count", model=OWNER) == 6


def test_a_requests_parts_add_up_to_its_whole_time(scrapes: Scrapes) -> None:
    def total(name: str) -> float:
        return scrapes.answered.value(f"deepinfer_{name}_sum", model=OWNER)

    parts = total("request_queue_time_seconds") + total("request_prefill_time_seconds")
    assert total("time_to_first_token_seconds") < parts  # an embedding has the two, but no token
    parts += total("request_decode_time_seconds")
    assert parts <= total("e2e_request_latency_seconds") < parts + 1
    # Two requests have more than one token: 4 gaps in the one, 3 in each of the other's two sequences.
    assert total("inter_token_latency_seconds") <= 2 * total("request_decode_time_seconds")
    mean_gap = total("inter_token_latency_seconds") / 10
    assert total("time_per_output_token_seconds") / 2 == pytest.approx(mean_gap, rel=0.9)


def test_gauges_tell_of_cache_and_batch(scrapes: Scrapes) -> None:
    now = scrapes.cancelled

    def blocks(block_type: str) -> float:
        return now.value("nv_trt_llm_kv_cache_block_metrics", model=OWNER, kv_cache_block_type=block_type)

    assert (blocks("max"), blocks("used"), blocks("free")) == (NUM_BLOCKS, 0, NUM_BLOCKS)
    assert (blocks("tokens_per"), blocks("fraction")) == (BLOCK_SIZE, 0)
    assert scrapes.answered.value(
        "nv_trt_llm_kv_cache_block_metrics", model=OWNER, kv_cache_block_type="reused"
    ) == pytest.approx(2)
    requests = {
        each: now.value("nv_trt_llm_request_metrics", model=OWNER, request_type=each)
        for each in ("active", "max", "scheduled", "waiting")
    }
    assert requests == {"active": 0, "max": 8, "scheduled": 0, "waiting": 0}
    for name in ("deepinfer_requests_running", "deepinfer_requests_waiting", "deepinfer_kv_cache_usage_ratio"):
        assert now.value(name, model=OWNER) == 0
    hit_ratio = scrapes.answered.value("deepinfer_prefix_cache_hit_ratio", model=OWNER)
    assert hit_ratio == pytest.approx(32 / 123)


def test_an_engines_own_metrics_are_those_of_its_owner(scrapes: Scrapes) -> None:
    assert names_of(scrapes.answered, OWNER) == {family.name for family in FAMILIES}
    assert names_of(scrapes.answered, GUEST) == {family.name for family in REQUEST_FAMILIES}
    assert scrapes.answered.value("deepinfer_request_generation_tokens_sum", model=GUEST) == 3
    engine_names = {each.family.name for each in ENGINE_FAMILIES}
    assert all(("model", OWNER) in labels for name, labels in scrapes.answered.samples if name in engine_names)


def test_nothing_of_an_unloaded_model_stays(scrapes: Scrapes) -> None:
    assert names_of(scrapes.unloaded, GUEST) == set()
    assert names_of(scrapes.unloaded, OWNER) == {family.name for family in FAMILIES}
    ours = re.compile("deepinfer_|nv_trt_llm_")
    assert [name for name in scrapes.all_unloaded.names() if ours.match(name)] == []


def test_a_load_report_has_what_triton_makes_it_of(metered: TritonServer, scrapes: Scrapes) -> None:
    """Tritons that can report (2.51 of the wheel cannot) read three values, with this pattern of orca_http.cc."""
    del scrapes  # asked for first: this test must not load the model back before the others
    pattern = re.compile(r"nv_trt_llm_kv_cache_block_metrics(?:{(.*?)})?\s*(\d+(?:\.\d+)?)")
    assert http_post(metered, f"/v2/repository/models/{OWNER}/load", b"{}", timeout_s=120)[0] == 200
    wait_until(lambda: gauge(metered, "max") > 0, WAIT_S, "gauges")
    with urllib.request.urlopen(f"http://localhost:{metered.metrics_port}/metrics", timeout=5) as response:
        found = pattern.findall(response.read().decode())
    values = {dict(re.findall(r'(\w+)="(.*?)"', labels))["kv_cache_block_type"]: value for labels, value in found}
    assert (values["max"], values["used"], values["tokens_per"]) == (str(NUM_BLOCKS), "0", str(BLOCK_SIZE))
