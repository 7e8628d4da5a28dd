"""What a server said to one request of the fuzzer, over either wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """`outputs`: what came, to be compared. `status`: over HTTP only.

    is_refused_by_protocol: the connection or the stream ended instead, which is right only where what was sent is no
    request at all.
    """

    error: str | None
    status: int | None = None
    outputs: bytes = b""
    is_refused_by_protocol: bool = False
