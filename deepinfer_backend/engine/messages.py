"""Every message between an engine process and its clients, the frontends: typed, length-checked, no pickle.

Client → engine: Attach, Detach, AddRequest, AbortRequests, AbortSequences, Shutdown. Engine → client: EngineReady,
EngineFailed, StepOutputs. Engine → engine: FetchBlocks, BlockContents. Each is one msgpack frame, BlockContents with
the blocks as a second one, AddRequest with one more for each medium's content: on the engine's one socket, or on each
client's own.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.errors import DeepInferError
from deepinfer_backend.media.prompt import MediaPrompt, ProcessedPrompt
from deepinfer_backend.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 64 * 2**20


class EmbeddingParams(msgspec.Struct, frozen=True):
    """How a prompt's embedding is made: its first `dimensions` numbers, all if None, scaled to length 1."""

    dimensions: int | None = None


class BlockSource(msgspec.Struct, frozen=True):
    """An engine that has a prompt's KV blocks: where it takes messages, and its process."""

    address: str
    process_id: int


class Prompted(msgspec.Struct, frozen=True, tag=True):
    """An engine that only prefills has computed a request's prompt and its first token, which is an output of its own.

    It keeps the prompt's blocks until the request is aborted there. `source_index`: what the engine that gets them
    calls the source; its side fills it in.
    """

    request_id: str
    first_token_id: int
    num_cached_tokens: int
    first_scheduled_time_ns: int
    source: BlockSource
    client_index: int = 0
    source_index: int = 0


class EngineRequest(msgspec.Struct, frozen=True):
    """A request as the engine takes it: checked token ids and valid sampling parameters.

    `request_id` is unique among the engine's live requests. `priority`: a lower value goes first.
    `bad_words_token_ids`: the token sequences that the output must not contain. `embedding`: asks for the prompt's
    embedding, not for tokens. `queue_timeout_s`: it fails if no step has begun to compute it so long after `arrival_s`
    (of time.monotonic; 0.0: when the engine gets it). `client_index`: which of the engine's clients it belongs to; the
    engine's side fills it in. `prompted`: what another engine has computed of it; None: nothing. `media`: what its
    prompt is to be made of, instead of `prompt_token_ids`, which the engine fills in when there is `processed`, that
    which was made.
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    sampling_params: SamplingParams
    priority: int = 0
    bad_words_token_ids: list[list[int]] = []
    embedding: EmbeddingParams | None = None
    queue_timeout_s: float | None = None
    client_index: int = 0
    arrival_s: float = 0.0
    prompted: Prompted | None = None
    media: MediaPrompt | None = None
    processed: ProcessedPrompt | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True):
    """Log-probabilities of a prompt's tokens but the first; comes before the request's first output.

    token_ids, ranks: int32 and logprobs: float32, each [num_prompt_tokens - 1, 1 + k] in native order: the prompt's own
    token, then the k likeliest, best first.
    """

    request_id: str
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    client_index: int = 0


class Embedding(msgspec.Struct, frozen=True, tag=True):
    """A prompt's pooled hidden state, not normalized: float32 in native order; comes before the request's output."""

    request_id: str
    values: bytes
    client_index: int = 0


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine refused this request, or failed it alone; nothing else comes of it.

    `word` and `reason`: those of an error.
    """

    request_id: str
    word: str
    message: str
    reason: str = ""
    client_index: int = 0


class BlocksArrived(msgspec.Struct, frozen=True, tag=True):
    """A request's engine needs its prompt's blocks elsewhere no more; comes before its first output here."""

    request_id: str
    client_index: int = 0


class MediaReady(msgspec.Struct, frozen=True, tag=True):
    """A request's media are processed: its prompt, int32 in native order; comes before all else of it."""

    request_id: str
    prompt_token_ids: bytes
    client_index: int = 0


RequestResult = PromptLogprobs | Embedding | RequestFailed | Prompted | BlocksArrived | MediaReady
"""What an engine tells about a request besides its tokens."""


def request_failed(request: EngineRequest, error: DeepInferError) -> RequestFailed:
    return RequestFailed(request.request_id, error.word, error.message, error.reason, request.client_index)


class EngineInfo(msgspec.Struct, frozen=True):
    """What a frontend must know of a ready engine to check requests at its own door.

    `default_sampling_params`: what the model's generation_config says about fields that a request leaves out.
    `config`: the EngineConfig that the engine runs with, for frontends that share it. `tokenizer_path`: a folder.
    `modalities`: which kinds of media the model takes besides text.
    """

    model_path: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    hidden_size: int = 0
    default_sampling_params: dict[str, float | int] = {}
    tokenizer_path: str = ""
    config: dict[str, Any] = {}
    modalities: list[str] = []


class EngineStats(msgspec.Struct, frozen=True):
    """Counters (since the engine started), gauges (now) and sizes (always) that travel with each step's outputs."""

    num_waiting: int = 0
    num_running: int = 0
    max_num_seqs: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    block_size: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_accepted_by_position: list[int] = []
    num_steps: int = 0
    num_engines: int = 0

    def __add__(self, other: EngineStats) -> EngineStats:
        """Of two engines of one model in all, or of two that were there one after the other: then of the counters."""
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__struct_fields__
            if name not in ("num_accepted_by_position", "block_size")
        }
        by_position = itertools.zip_longest(self.num_accepted_by_position, other.num_accepted_by_position, fillvalue=0)
        return EngineStats(
            **sums,
            block_size=max(self.block_size, other.block_size),
            num_accepted_by_position=[sum(pair) for pair in by_position],
        )


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A client that wants to share the engine: answered by EngineReady on its own socket, as soon as there is one.

    `client_id`: unique among all that ever attach. `process_id`: when that ends, so do the client's requests.
    """

    client_id: str
    outputs_address: str
    process_id: int


class Detach(msgspec.Struct, frozen=True, tag=True):
    """Ends the client's requests; it is told nothing any more."""

    client_id: str


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    client_id: str
    request_id: str
    prompt_token_ids: bytes  # int32, native order
    sampling_params: dict[str, object]
    priority: int
    bad_words_token_ids: list[list[int]]
    embedding: EmbeddingParams | None
    queue_timeout_s: float | None
    arrival_s: float
    prompted: Prompted | None
    media: MediaPrompt | None = None


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class AbortSequences(msgspec.Struct, frozen=True, tag=True):
    """Single sequences, each by its request's id and its index."""

    sequences: list[tuple[str, int]]


class FetchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Asks for blocks of a request's prompt, `num_blocks` from its block `first_block` on.

    The answer goes to `address`, with `seq_id`; not if the process has ended.
    """

    address: str
    process_id: int
    seq_id: int
    request_id: str
    first_block: int
    num_blocks: int


class BlockContents(msgspec.Struct, frozen=True, tag=True):
    """Goes before the content of blocks, as KVCache.read_blocks returns it, of which this is the CRC-32.

    No content: the request is not there any more.
    """

    seq_id: int
    first_block: int
    checksum: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    process_id: int


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; its process ends after this message."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """What one step brought a client: results first, then outputs, packed by `RequestOutputPool.pack`; b"" is none.

    `stats`: for the owner alone, of the whole engine.
    """

    results: list[RequestResult]
    outputs: bytes
    stats: EngineStats | None


ToEngine = Attach | Detach | AddRequest | AbortRequests | AbortSequences | FetchBlocks | BlockContents | Shutdown
FromEngine = EngineReady | EngineFailed | StepOutputs

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Raises ValueError for a message over MAX_MESSAGE_BYTES."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes: must be at most {MAX_MESSAGE_BYTES}")
    return data


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    """Raises msgspec.DecodeError for anything that is not one whole message."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.DecodeError for anything that is not one whole message."""
    return _from_engine.decode(data)
