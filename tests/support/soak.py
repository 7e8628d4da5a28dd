"""A crowd of clients that ask for everything at once, and note every answer that is not what it must be."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import grpc
from tritonclient.grpc import service_pb2_grpc

from deepinfer_backend.triton.server import TritonServer
from tests.support.triton_client import Response, build_message, read_message

ANSWER_TIMEOUT_S = 120.0
_NUM_CHANNELS = 8
_MAX_CHARS = 300
_CANCEL_WITHIN_S = 1.0
_LENGTHS = (1, 4, 16, 48)


@dataclass(frozen=True)
class Known:
    """A greedy request whose answer is known."""

    prompt: str
    max_tokens: int
    token_ids: list[int]
    text: str


@dataclass
class Verdicts:
    """What became of the requests so far, by kind of request and of end; and what must not have been."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    num_right_texts: int = 0

    def note(self, kind: str, end: str) -> None:
        self.counts[kind, end] += 1

    def num(self, end: str) -> int:
        return sum(count for (_, each), count in self.counts.items() if each == end)

    def complain(self, kind: str, what: object) -> None:
        self.counts[kind, "WRONG"] += 1
        self.complaints.append(f"{kind}: {str(what)[:_MAX_CHARS]}")


class Crowd:
    """Sends one request of a random kind each time it is asked to. Used by one event loop."""

    def __init__(self, server: TritonServer, known: Sequence[Known], verdicts: Verdicts) -> None:
        self._known = known
        self._verdicts = verdicts
        self._channels = [grpc.aio.insecure_channel(f"localhost:{server.grpc_port}") for _ in range(_NUM_CHANNELS)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        self._address = f"http://localhost:{server.http_port}/v2/models/deepinfer/"
        self._grpc_address = f"localhost:{server.grpc_port}"
        self._kinds: dict[Callable[[Random], Any], int] = {
            self._known_over_grpc: 8,
            self._known_over_http: 6,
            self._sampled: 6,
            self._long_prompt: 2,
            self._structured: 1,
            self._beams: 1,
            self._embedding: 1,
            self._wrong: 3,
            self._cancelled: 4,
            self._disconnected_grpc: 1,
            self._disconnected_http: 2,
            self._late: 2,
        }

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def send_one(self, random: Random) -> None:
        """Returns when the request has ended and its end was noted; never raises."""
        (send,) = random.choices(list(self._kinds), list(self._kinds.values()))
        kind = send.__name__.strip("_")
        try:
            await asyncio.wait_for(send(random), ANSWER_TIMEOUT_S)
        except TimeoutError:
            self._verdicts.complain(kind, f"no end within {ANSWER_TIMEOUT_S:g} s")
        except Exception as error:
            self._verdicts.complain(kind, repr(error))

    # ---- the kinds of requests ----

    async def _known_over_grpc(self, random: Random) -> None:
        known = random.choice(self._known)
        stream = random.random() < 0.7
        responses = await self._over_grpc(
            random, text_input=known.prompt, stream=stream, exclude_input_in_output=True, sampling_parameters=_of(known)
        )
        if self._has_answer("known_over_grpc", responses):
            tokens = [token for response in responses for token in response.token_ids]
            self._compare("known_over_grpc", known, tokens, "".join(response.text for response in responses))

    async def _known_over_http(self, random: Random) -> None:
        known = random.choice(self._known)
        body = {"text_input": known.prompt, "exclude_input_in_output": True, **_of(known)}
        body["priority"] = random.randrange(3)
        if random.random() < 0.5:
            events = await self._over_sse({**body, "stream": True})
        else:
            events = [await self._over_http(body)]
        if "error" in events[-1]:
            self._take_error("known_over_http", events[-1]["error"])
            return
        tokens = [token for event in events for token in _as_list(event["token_ids"])]
        self._compare("known_over_http", known, tokens, "".join(event["text_output"] for event in events))

    async def _sampled(self, random: Random) -> None:
        n, num_tokens = random.choice((1, 2, 4)), random.choice(_LENGTHS)
        responses = await self._over_grpc(
            random,
            text_input="x" * random.randrange(1, 40),
            stream=random.random() < 0.5,
            return_logprobs=random.random() < 0.5,
            return_num_output_tokens=True,
            sampling_parameters={
                "n": n,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "temperature": random.choice((0.5, 1.0)),
                "top_p": random.choice((0.9, 1.0)),
                "top_k": random.choice((0, 20)),
                "frequency_penalty": random.choice((0, 0.5)),
                "seed": random.randrange(1000),
            },
        )
        if self._has_answer("sampled", responses):
            counts = [count for response in responses for count in response.outputs["num_output_tokens"]]
            if sum(counts) == n * num_tokens:
                self._verdicts.note("sampled", "answered")
            else:
                self._verdicts.complain("sampled", f"{sum(counts)} tokens instead of {n * num_tokens}")

    async def _long_prompt(self, random: Random) -> None:
        await self._plain("long_prompt", random, text_input="y" * random.randrange(100, 400), max_tokens=4)

    async def _structured(self, random: Random) -> None:
        grammar = random.choice(({"regex": "[ab]{3,6}"}, {"choice": ["yes", "no"]}))
        await self._plain("structured", random, text_input="z", max_tokens=12, structured_outputs=grammar)

    async def _beams(self, random: Random) -> None:
        await self._plain("beams", random, text_input="b", max_tokens=8, beam_width=3, n=2)

    async def _embedding(self, random: Random) -> None:
        responses = await self._over_grpc(random, embedding_request={"input": "e" * random.randrange(1, 30)})
        if self._has_answer("embedding", responses):
            self._verdicts.note("embedding", "answered")

    async def _wrong(self, random: Random) -> None:
        parameters = random.choice(({"temperature": -1}, {"max_tokens": 0}, {"no_such_field": 1}, {"n": 1000}))
        responses = await self._over_grpc(random, text_input="w", sampling_parameters=parameters)
        error = responses[-1].error
        if error is None or not error.startswith(("INVALID_ARG", "UNAVAILABLE: ")):
            self._verdicts.complain("wrong", error)
        else:
            self._verdicts.note("wrong", "refused")

    async def _cancelled(self, random: Random) -> None:
        responses = await self._over_grpc(
            random,
            cancel_after_s=random.random() * _CANCEL_WITHIN_S,
            text_input="c",
            stream=random.random() < 0.5,
            sampling_parameters={"max_tokens": 300, "ignore_eos": True, "n": random.choice((1, 3))},
        )
        self._note_if_well("cancelled", responses)

    async def _disconnected_grpc(self, random: Random) -> None:
        """A client that dies with its connection."""
        async with grpc.aio.insecure_channel(self._grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            inputs = {"text_input": "d", "stream": True, "sampling_parameters": {"max_tokens": 300, "ignore_eos": True}}
            call = stub.ModelStreamInfer(_once(build_message("deepinfer", "", {}, [], {}, inputs)))
            asking = asyncio.ensure_future(call.read())
            await asyncio.wait([asking], timeout=random.random() * _CANCEL_WITHIN_S)
            asking.cancel()
        self._verdicts.note("disconnected_grpc", "left")

    async def _disconnected_http(self, random: Random) -> None:
        timeout = aiohttp.ClientTimeout(total=0.01 + random.random() * _CANCEL_WITHIN_S)
        body = {"text_input": "h", "stream": True, "max_tokens": 300, "ignore_eos": True}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self._address + "generate_stream", json=body) as response,
            ):
                await response.read()
        except TimeoutError:
            pass
        self._verdicts.note("disconnected_http", "left")

    async def _late(self, random: Random) -> None:
        body = {"text_input": "l", "max_tokens": 200, "ignore_eos": True, "timeout": random.randrange(1_000, 2_000_000)}
        answer = await self._over_http(body)
        if "error" in answer:
            self._take_error("late", answer["error"])
        else:
            self._verdicts.note("late", "answered")

    # ---- the ways to send one ----

    async def _plain(self, kind: str, random: Random, *, text_input: str, **parameters: Any) -> None:
        responses = await self._over_grpc(
            random, text_input=text_input, return_finish_reason=True, sampling_parameters=parameters
        )
        if self._has_answer(kind, responses):
            reasons = responses[-1].outputs["finish_reason"]
            if all(reason in ("stop", "length") for reason in reasons):
                self._verdicts.note(kind, "answered")
            else:
                self._verdicts.complain(kind, reasons)

    async def _over_grpc(self, random: Random, *, cancel_after_s: float | None = None, **inputs: Any) -> list[Response]:
        """All messages of a stream with one request; no more after the first if it was cancelled."""
        message = build_message("deepinfer", str(random.randrange(100)), {}, [], {}, inputs)
        call = random.choice(self._stubs).ModelStreamInfer(_once(message))
        responses: list[Response] = []

        async def read() -> None:
            responses.extend([read_message(each) async for each in call])

        if cancel_after_s is None:
            await read()
            return responses
        reading = asyncio.ensure_future(read())
        await asyncio.wait([reading], timeout=cancel_after_s)
        call.cancel()
        await asyncio.wait([reading])
        return responses if not reading.cancelled() and reading.exception() is None else []

    async def _over_http(self, body: dict[str, Any]) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._address + "generate", json=body) as response,
        ):
            answer: dict[str, Any] = await response.json(content_type=None)
            return answer

    async def _over_sse(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._address + "generate_stream", json=body) as response,
        ):
            lines = (await response.text()).splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line]

    # ---- what the answers must be ----

    def _has_answer(self, kind: str, responses: list[Response]) -> bool:
        """Whether it ended well; if not, how it ended has been noted."""
        finals = [response.is_final for response in responses]
        if not responses or finals != [False] * (len(finals) - 1) + [True]:
            self._verdicts.complain(kind, f"FINAL flags {finals}, error {responses and responses[-1].error}")
            return False
        error = responses[-1].error
        if error is not None:
            self._take_error(kind, error)
        return error is None

    def _note_if_well(self, kind: str, responses: list[Response]) -> None:
        if not responses:
            self._verdicts.note(kind, "left")
        elif self._has_answer(kind, responses):
            self._verdicts.note(kind, "answered")

    def _take_error(self, kind: str, error: str) -> None:
        """Of a request that is right: only the load and its own deadline may end it."""
        if error.startswith("UNAVAILABLE: ") and "max_queue_size" in error:
            self._verdicts.note(kind, "queue full")
        elif kind == "late" and error.startswith("CANCELLED: "):
            self._verdicts.note(kind, "too late")
        else:
            self._verdicts.complain(kind, error)

    def _compare(self, kind: str, known: Known, token_ids: list[int], text: str) -> None:
        if (token_ids, text) == (known.token_ids, known.text):
            self._verdicts.note(kind, "answered")
            self._verdicts.num_right_texts += 1
        else:
            self._verdicts.complain(kind, f"{token_ids} {text!r} instead of {known.token_ids} {known.text!r}")


def _of(known: Known) -> dict[str, Any]:
    return {"max_tokens": known.max_tokens, "temperature": 0, "ignore_eos": True}


def _as_list(value: int | list[int]) -> list[int]:
    """Triton's JSON has a bare number for one element."""
    return value if isinstance(value, list) else [value]


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message
