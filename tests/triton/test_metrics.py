"""What the metrics endpoint shows of the live server's work."""

from __future__ import annotations

from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_client import http_generate
from tests.support.triton_server import read_metrics, wait_until

NUM_REQUESTS = "deepinfer_e2e_request_latency_seconds_count"


def settled_metrics(server: TritonServer) -> dict[str, float]:
    """The metrics once a request of our own is in them, and so all that came before it."""
    num_requests = read_metrics(server)[NUM_REQUESTS]
    assert http_generate(server, text_input="x", max_tokens=1)[0] == 200
    wait_until(lambda: read_metrics(server)[NUM_REQUESTS] > num_requests, 5, "the request is counted")
    return read_metrics(server)


def test_metrics_follow_the_work(server: TritonServer) -> None:
    before = settled_metrics(server)
    for number in range(3):
        status, _ = http_generate(server, input_ids=[number + 1] * 20, max_tokens=5, ignore_eos=True)
        assert status == 200

    def grown(name: str) -> float:
        return read_metrics(server)[name] - before[name]

    wait_until(lambda: grown("deepinfer_generation_tokens_total") == 15, 5, "generated tokens")
    wait_until(lambda: grown(NUM_REQUESTS) == 3, 5, "latencies")
    assert grown("deepinfer_prompt_tokens_total") == 60
    assert grown("deepinfer_time_to_first_token_seconds_count") == 3
    first_token_s = grown("deepinfer_time_to_first_token_seconds_sum")
    assert 0 < first_token_s < grown("deepinfer_e2e_request_latency_seconds_sum")
    metrics = read_metrics(server)
    assert metrics["deepinfer_requests_running"] == metrics["deepinfer_requests_waiting"] == 0
    assert 0 <= metrics["deepinfer_kv_cache_usage_ratio"] <= 1
    assert {"deepinfer_cached_prompt_tokens_total", "deepinfer_preemptions_total"} <= metrics.keys()
