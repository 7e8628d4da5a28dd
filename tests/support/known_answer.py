"""What a server with the tiny text model is asked to see that it serves, and whether it is idle."""

from __future__ import annotations

from pathlib import Path

from deepinfer_backend.triton.server import TritonServer
from tests.support.oracle import TransformersOracle
from tests.support.tiny_text_model import byte_tokenizer
from tests.support.triton_client import GrpcRequest
from tests.support.triton_server import read_metrics

PROMPT = "the sea"
_NUM_TOKENS = 100
_GREEDY = {"ignore_eos": True, "temperature": 0}
LONG = {**_GREEDY, "max_tokens": 1900}
_GAUGES = ("deepinfer_requests_running", "deepinfer_requests_waiting", "deepinfer_kv_cache_usage_ratio")


def expected_answer(model: Path) -> list[int]:
    """transformers' own."""
    return TransformersOracle(model).greedy(byte_tokenizer()(PROMPT)["input_ids"], _NUM_TOKENS, ignore_eos=True)


def known_answer(server: TritonServer) -> list[int] | None:
    """None for an error."""
    sampling = {**_GREEDY, "max_tokens": _NUM_TOKENS}
    responses = GrpcRequest(server, text_input=PROMPT, stream=True, sampling_parameters=sampling).result()
    if responses[-1].error is not None:
        return None
    return [token for response in responses for token in response.token_ids]


def start_long_streams(server: TritonServer, count: int) -> list[GrpcRequest]:
    return [GrpcRequest(server, text_input=PROMPT, stream=True, sampling_parameters=LONG) for _ in range(count)]


def is_idle(server: TritonServer) -> bool:
    metrics = read_metrics(server)
    return all(metrics[name] == 0 for name in _GAUGES)
