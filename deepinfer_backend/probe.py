"""Does a running server generate? One token through HTTP under a deadline: what `/v2/health/ready` cannot tell."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlsplit

from deepinfer_backend.errors import ConfigError, DeepInferError, EngineError, UnavailableError, shown

_MAX_ANSWER_BYTES = 1 << 20


def generate_one_token(url: str, model: str, timeout_s: float) -> None:
    """Returns when `model` at `url` ("localhost:8000") has generated a token.

    Raises:
        ConfigError: `url` is not an HTTP address.
        UnavailableError: nothing answers there, or not within `timeout_s`.
        EngineError: the answer is an error.
    """
    base = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(base)
        is_http = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        is_http = False
    if not is_http:
        raise ConfigError(f"url is {shown(url)}: must be host:port or http(s)://host:port")
    address = f"{base.rstrip('/')}/v2/models/{quote(model, safe='')}/generate"

    failure: list[DeepInferError] = []

    def ask() -> None:
        try:
            _post(address, timeout_s)
        except DeepInferError as error:
            failure.append(error)

    # A socket's timeout begins anew with every byte; only somebody who waits outside keeps a deadline.
    asking = threading.Thread(target=ask, name="deepinfer-check", daemon=True)
    asking.start()
    asking.join(timeout_s)
    if asking.is_alive():
        raise UnavailableError(f"{address} did not answer within {timeout_s:g} s")
    if failure:
        raise failure[0]


def _post(address: str, timeout_s: float) -> None:
    # Token ids rather than text: a model may have no tokenizer, and every one has a token 0.
    body = json.dumps({"input_ids": [0], "max_tokens": 1}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    # Not through a proxy of the environment: it is this server's health that is asked for.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            answer = _parse(response.read(_MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            detail = _parse(error.read(_MAX_ANSWER_BYTES)).get("error", error.reason)
        raise EngineError(f"{address} answered {error.code}: {shown(detail)}") from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            raise UnavailableError(f"{address} did not answer within {timeout_s:g} s") from error
        raise UnavailableError(f"{address} cannot be reached: {getattr(error, 'reason', error)}") from error
    if "text_output" not in answer:
        raise EngineError(f"{address} answered without text_output: {shown(answer.get('error', answer))}")


def _parse(answer: bytes) -> dict[str, Any]:
    try:
        content = json.loads(answer)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
