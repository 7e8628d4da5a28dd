"""Types and contracts of the C++ core: sequences, blocks, scheduler, request outputs.

Every class here is owned by one thread at a time (the one that steps the engine). Calls that take more than a few
microseconds release the GIL.
"""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

class FinishReason:
    """Why a sequence ended; callers see `name` in lower case: none, stop, length, abort, error."""

    NONE: FinishReason
    STOP: FinishReason
    LENGTH: FinishReason
    ABORT: FinishReason
    ERROR: FinishReason
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class SamplingOptions:
    """What the core needs to know of a request's sampling parameters.

    `eos_token_ids` and `stop_token_ids` end a sequence once `min_tokens` are out; `ignore_eos` lets it pass the first.
    `seed` feeds one uniform number per output position, so that tokens do not depend on the batch. With `n` sequences
    all but the first are forked when the prompt is computed; sequence i samples with `seed + i`. `num_logprobs`: how
    many of a step's likeliest tokens an output carries; -1 is none, and no log-probability of its own. Steps give
    logits for each token of the prompt with `prompt_logprobs`. `is_tracked`: the Worker keeps a state for each of its
    sequences. `is_beam`: sequences are held after each step, until `append_token`. `lora_id`, and `media_id` of the
    images and videos in the prompt: 0 is none.

    Raises:
        ValueError: a value is out of its range; among them `min_tokens` above `max_tokens`.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        eos_token_ids: list[int] = ...,
        stop_token_ids: list[int] = ...,
        ignore_eos: bool = False,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        n: int = 1,
        num_logprobs: int = -1,
        prompt_logprobs: bool = False,
        is_tracked: bool = False,
        is_beam: bool = False,
        lora_id: int = 0,
        media_id: int = 0,
    ) -> None: ...

@final
class SchedulerConfig:
    """Limits of the scheduler; every one is checked by the constructor.

    num_speculative_tokens: the most drafts that one step verifies for a sequence; 0 is none. num_lookahead_tokens: for
    how many positions behind a step's own there are blocks, where a drafter with a model proposes; 0 is a drafter
    without one. max_tokens_behind: last tokens of a sequence that such a drafter computes at once; further behind, it
    proposes nothing for it any more. max_num_extra_logits: the most rows of logits that a step has beyond one for each
    sequence: those of prompt tokens, or of drafts. is_prompt_engine: it only prefills; a sequence stays prompted, with
    its first token, until it is aborted.

    Raises:
        ValueError: a limit is out of its range, or the cache holds fewer than 2 tokens.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_extra_logits: int = 1,
        num_speculative_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        max_tokens_behind: int = 64,
        enable_prefix_caching: bool = True,
        max_consecutive_prefills: int = 2,
        prefill_attempt_interval: int = 1,
        priority_aging_s: float = 0.0,  # seconds that one level of priority is worth; 0: strict
        hash_seed: int = 0,
        is_prompt_engine: bool = False,
    ) -> None: ...

@final
class PromptedSequence:
    """What an engine that only prefills made of a sequence: its first output token, and what its outputs tell of it.

    source: which engine, to be told again by `AwaitedBlocks`.
    """

    def __init__(
        self, *, first_token_id: int, source: int = 0, num_cached_tokens: int = 0, first_scheduled_time_ns: int = 0
    ) -> None: ...

@final
class AwaitedBlocks:
    """Blocks whose content comes from another engine: `blocks`, int32, of a sequence's prompt from number `first_block`
    on.
    """

    seq_id: int
    request_id: str
    client_index: int
    source: int
    first_block: int
    blocks: NDArray[np.int32]

@final
class StepArrays:
    """The Worker's own host buffers, which `SchedulerOutputs.write` fills in place.

    T = max_num_batched_tokens, S = max_num_seqs, B = max_blocks_per_seq, L = S + max_num_extra_logits, M = capacity of
    the mask list.

    The scheduler counts a step in flight as one token, however many drafts the device accepts in it. Where the device
    must add what it accepted there (`advance_slots`), what stands here is for none: positions, slot_mapping, seq_lens
    and output_indices. What the step may have written is in the block table either way.

    The device's state has one row for each slot, 0 to S - 1: `next_tokens` [S, 1 + num_speculative_tokens], the last
    token that was sampled for the slot and then the drafts for those after it, and `num_accepted` [S] of the last step.

    Raises (constructor):
        ValueError: an array has the wrong dtype or shape, is not C-contiguous, or is read-only.
    """

    def __init__(
        self,
        *,
        token_ids: NDArray[np.int64],  # [T] host-known token ids (0 where the device knows better)
        token_sources: NDArray[np.int32],  # [T] index into next_tokens, flattened, of this token, or -1
        positions: NDArray[np.int64],  # [T]
        slot_mapping: NDArray[np.int64],  # [T] block * block_size + offset, where the token's K and V go
        query_start_loc: NDArray[np.int32],  # [S + 1]
        seq_lens: NDArray[np.int32],  # [S] keys of each sequence, this step's included
        advance_slots: NDArray[np.int32],  # [S] slot whose num_accepted is to be added, or -1; never in a prefill
        block_tables: NDArray[np.int32],  # [S, B] rows padded with block 0
        logits_indices: NDArray[
            np.int64
        ],  # [L] index into the tokens of each row of logits that samples, then of others
        sample_start_loc: NDArray[np.int32],  # [S + 1] first row of logits of each sequence that samples, and their end
        sample_slots: NDArray[np.int32],  # [S] its slot
        temperature: NDArray[np.float32],  # [L] one per row of logits that samples, as are the next three
        top_k: NDArray[np.int32],  # [L] 0 = off
        top_p: NDArray[np.float32],  # [L]
        min_p: NDArray[np.float32],  # [L] 0 = off
        seeds: NDArray[np.int64],  # [S] of each sequence that samples, the bits of an unsigned number, and
        output_indices: NDArray[np.int64],  # [S] which of its outputs its first row samples
        banned_rows: NDArray[np.int64],  # [M] row of logits,
        banned_token_ids: NDArray[np.int64],  # [M] the token it must not sample (min_tokens), and
        banned_until: NDArray[np.int64],  # [M] the first output that may be that token
    ) -> None: ...

@final
class StepLogprobs:
    """Probabilities of the tokens that a step sampled, for the rows of logits that asked for them.

    Raises:
        ValueError: the shapes do not match.
    """

    def __init__(
        self,
        *,
        rows: NDArray[np.int32],  # [m] rows of logits, ascending
        logprobs: NDArray[np.float32],  # [m] of the token that was sampled
        ranks: NDArray[np.int32],  # [m] its rank, 1 is the likeliest
        top_token_ids: NDArray[np.int32],  # [m, k] the likeliest, best first
        top_logprobs: NDArray[np.float32],  # [m, k]
    ) -> None: ...

@final
class SequenceMetadata:
    """One sequence's part in one step; reading one whose step is over raises LookupError."""

    request_id: str
    seq_id: int
    is_prefill: bool
    block_table: NDArray[np.int32]
    seqlen_q: int  # tokens this step computes, drafts included
    seqlen_k: int  # keys it attends to, its own included; the least, as is the next
    samples: bool  # false for a prefill chunk that is not the last
    output_index: int  # position among the sequence's outputs of the first token it samples

@final
class SequenceMetadataPool:
    """Fixed-type pool of SequenceMetadata; grows to the largest step, then never allocates again."""

    def __init__(self) -> None: ...
    @property
    def num_in_use(self) -> int: ...

@final
class SchedulerOutputs:
    """One scheduled batch: either prefill or decode, possibly empty. Valid until its step was post-processed."""

    def is_empty(self) -> bool: ...
    is_prefill: bool
    num_seqs: int
    num_tokens: int
    num_sampled: int  # sequences that sample, in batch order
    num_sampled_rows: int  # their rows of logits: one each, and one for each draft
    num_prompt_logits: int  # rows of logits that follow those
    max_query_len: int
    max_seq_len: int  # the most that the device may come to
    max_num_blocks: int  # longest block table of the batch
    all_greedy: bool
    max_top_k: int  # of the rows that are not greedy, as are the next two; 0: nobody uses it
    any_top_p: bool
    any_min_p: bool
    any_lora: bool
    lora_ids: NDArray[np.int32]  # [num_seqs]
    tracked_rows: NDArray[np.int32]  # [num_tracked] which of the sequences that sample are tracked, ascending
    tracked_seq_ids: NDArray[np.int64]  # [num_tracked]
    prompt_logits: NDArray[np.int64]  # [num_spans, 3] (sequence, first position, number of tokens), in order of rows
    # [num_media_rows, 4] of the sequences with media: (media_id, first of the step's tokens, its position, how many)
    media_rows: NDArray[np.int64]
    # [num_sampled] how many of its last tokens, the new one included, the drafter computes to propose what follows; it
    # knows those before. 0: it proposes nothing, or has no model.
    draft_query_lens: NDArray[np.int32]
    max_num_proposed: int  # how many drafts are worth proposing, for whom most are
    # (slot, all its tokens so far) of each sequence that samples for the first time since it got the slot; with drafts
    new_slots: list[tuple[int, NDArray[np.int32]]]
    num_banned: int
    num_preempted: int  # sequences that had to give up their blocks for this batch
    num_cached_tokens: int  # prompt tokens found in the prefix cache by this batch
    block_copies: NDArray[np.int32]  # [num_copies, 2] (source, target) of copy-on-write
    def write(self, arrays: StepArrays) -> None:
        """Fills the first `num_tokens` / `num_seqs` / `num_sampled` / `num_sampled_rows` / `num_banned` entries.

        `logits_indices` has `num_prompt_logits` more than `num_sampled_rows`. Rows of `block_tables` are padded with
        block 0 up to `max_num_blocks`; what lies behind is left as it was. When no logits are asked for,
        `logits_indices[0]` is 0, so that a forward that must ask for one row asks for one that exists.

        Raises:
            ValueError: an array is too small for the step; then none was written.
            LookupError: the step is over.
        """

@final
class RequestOutput:
    """One new token of one sequence, or (token_id = -1) the news that it ended without one."""

    request_id: str
    client_index: int  # whose request it is; not part of what is packed
    seq_id: int
    sequence_index: int  # which of the request's sequences; 0 unless it was forked
    output_index: int  # position among the sequence's outputs, from 0
    token_id: int
    finished: bool
    finish_reason: FinishReason
    stop_token_id: int  # the end or stop token that ended it, else -1
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens that came from the prefix cache
    first_scheduled_time_ns: int  # of CLOCK_MONOTONIC
    num_draft_tokens: int  # drafts of the sequence so far that were proposed and verified
    num_accepted_draft_tokens: int  # and that became outputs, this one included
    logprob: float  # the model's own log-probability of the token; NaN unless asked for, as are the next two
    rank: int  # of the token among all, 1 is the likeliest; else 0
    top_logprobs: list[tuple[int, float]]  # the likeliest tokens, best first; else none
    @staticmethod
    def clone(handle: int | np.uint64) -> RequestOutput:
        """A copy that outlives the step.

        Raises:
            LookupError: the handle is stale (its step is over) or was never given out.
        """
    @staticmethod
    def unpack(data: bytes) -> list[RequestOutput]:
        """The outputs that `RequestOutputPool.pack` wrote.

        Raises:
            ValueError: `data` is truncated or too long.
        """

@final
class WrittenSequence:
    """A finished text that the scheduler did not see grow: a beam search puts it together from several sequences."""

    def __init__(
        self,
        *,
        sequence_index: int,
        token_ids: list[int],
        logprobs: list[float],  # one per token
        finish_reason: FinishReason,
        stop_token_id: int = -1,
    ) -> None: ...

@final
class RequestOutputPool:
    """Owns the RequestOutputs of a step behind generation-checked handles (uint64, unique in the process)."""

    def __init__(self) -> None: ...
    def clone(self, handles: NDArray[np.uint64]) -> list[RequestOutput]: ...
    def pack(self, handles: NDArray[np.uint64]) -> dict[int, bytes]:
        """By client index: its outputs in one length-checked buffer, for another process."""
    def release(self, handles: NDArray[np.uint64]) -> None:
        """Gives them back; using one afterwards raises LookupError, as does releasing it twice."""
    @property
    def num_in_use(self) -> int: ...

@final
class Scheduler:
    """Queues waiting, prompted and running; who computes what in the next step; who owns which block.

    Block 0 is the dummy block: it is never handed out and pads block tables. `num_free_blocks + num_used_blocks ==
    num_blocks` at all times, where free includes cached blocks that nobody references.
    """

    def __init__(self, config: SchedulerConfig) -> None: ...
    def add_seq(
        self,
        request_id: str,
        prompt_token_ids: NDArray[np.int32],
        options: SamplingOptions,
        *,
        priority: int = 0,
        cache_salt: str = "",
        client_index: int = 0,
        media_spans: list[tuple[int, int]] = ...,
        keeps_media_whole: bool = False,
    ) -> int:
        """Puts a new sequence into `waiting` and returns its id. A lower `priority` value goes first.

        prompt_token_ids: a negative one stands for a place in an image or a video; what it names to the prefix cache
        must be that content alone. cache_salt: only sequences with the same share cached blocks. client_index: whose
        outputs `pack` puts together. media_spans: (begin, end) of parts of the prompt that are costly to compute; of
        them a step has one, while other sequences could decode. keeps_media_whole: no chunk ends within one.

        Raises:
            ValueError: the prompt is empty, exceeds max_model_len - 1 or the cache, or the request id is in use; a span
                exceeds a step, or there is one with `prompt_logprobs`.
        """
    def add_prompted_seq(
        self,
        request_id: str,
        prompt_token_ids: NDArray[np.int32],
        prompted: PromptedSequence,
        options: SamplingOptions,
        *,
        priority: int = 0,
        cache_salt: str = "",
        client_index: int = 0,
    ) -> int:
        """The same for a request whose prompt another engine has computed: its outputs are those after that token.

        When it is admitted it is among what `take_awaited` returns; no step computes it before `blocks_arrived`.

        Raises:
            ValueError: as add_seq; or it has several sequences, or ends with its first token.
        """
    def take_awaited(self) -> list[AwaitedBlocks]:
        """Of the sequences admitted since the last call."""
    def awaits_blocks(self, seq_id: int) -> bool:
        """Whether it still holds the blocks that it was given to await their content."""
    def blocks_arrived(self, seq_id: int, num_blocks: int) -> None:
        """The content of the prompt's first blocks, that many, is there; the others are computed here.

        Raises:
            LookupError: no such sequence.
            ValueError: it awaits none, or the number is not one of its prompt's.
        """
    def prompted_blocks(self, request_id: str) -> NDArray[np.int32]:
        """The blocks of the prompt of a request's sequence that is prompted, in order; none if there is no such one."""
    def fork_seq(self, seq_id: int, *, seed: int) -> int:
        """A copy of a prompted, running or held sequence that shares its blocks until one of them writes.

        It belongs to the same request, with its priority and place in line. When `max_num_seqs` sequences hold blocks
        already it waits without any and recomputes, like a preempted one.

        Raises:
            LookupError: no such sequence.
            ValueError: it has not finished its prefill, or has tokens in flight.
        """
    def append_token(self, seq_id: int, token_id: int) -> None:
        """Gives a held sequence its next token and lets it go on; no output comes of it.

        Raises:
            LookupError: no such sequence.
            ValueError: it is not held, or the token id is negative.
        """
    def is_held(self, seq_id: int) -> bool:
        """Whether an unfinished sequence waits for `append_token`."""
    def abort_seq(self, seq_id: int) -> bool:
        """Ends one sequence; no output of it comes out any more. False if unknown (or ended)."""
    def abort_request(self, request_id: str, sequence_index: int = -1) -> bool:
        """Ends all sequences of the request, or the one with this index; no output of theirs comes out any more.

        Not even of those that the step which is being processed has ended. False if unknown (or ended).

        Blocks are freed once no step in flight refers to them.
        """
    def abort_client(self, client_index: int) -> None:
        """The same for every request that was added with this index."""
    def was_scheduled(self, request_id: str) -> bool:
        """Whether a step has begun to compute an unfinished request; false if unknown (or ended)."""
    def schedule(
        self, pool: SequenceMetadataPool, *, draft_threshold: float = 0.0
    ) -> tuple[SequenceMetadataList, SchedulerOutputs]:
        """Frees finished sequences, then picks the next batch: prefill or decode, or empty when nothing can run.

        draft_threshold: a draft is verified if the probability that it becomes an output, by what became of its
        sequence's drafts before, is above this. 0: all of them; 1: none.

        No drafts have prefills, beams, and sequences whose drafts are not on the device yet: of forks and of those that
        came back. A draft never takes what another sequence's own token needs.

        At most one step may be in flight (scheduled but not given to `process_outputs`) when it is called, and only a
        decode step. An empty batch is never in flight: processing it is allowed and does nothing.

        Raises:
            ValueError: draft_threshold is negative or not a number.
            RuntimeError: more than that is in flight.
        """
    def process_outputs(
        self,
        outputs: SchedulerOutputs,
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        *,
        drafts: NDArray[np.int32] | None = None,
        logprobs: StepLogprobs | None = None,
    ) -> None:
        """Appends what the step sampled and checks the stop conditions.

        token_ids: [num_sampled, width]; row i holds `num_tokens[i]` new tokens of the i-th sequence that samples: the
        drafts that it accepted, then one more. It may have none (the next step samples again), unless a step launched
        after this one builds on it. Tokens past a sequence's end, or of one that ended meanwhile, are dropped. Steps
        must come in order. A beam's row is held.

        drafts: [num_sampled, num_speculative_tokens], what was proposed for the tokens after these, negative behind the
        last. The next step's tokens are compared with them whether it verifies them or not. None: nobody was asked.

        logprobs: the j-th token of a sequence has those of its j-th row of logits.

        Raises:
            ValueError: shapes or counts do not match the step, or the step was processed already; nothing has changed.
        """
    def build_request_outputs(self, outputs: SchedulerOutputs, pool: RequestOutputPool) -> NDArray[np.uint64]:
        """One RequestOutput per token that the last `process_outputs` appended; ends the step's metadata."""
    def fail_step(self, outputs: SchedulerOutputs, pool: RequestOutputPool) -> NDArray[np.uint64]:
        """Ends every sequence of a step that failed, with FinishReason.ERROR and one output each (token_id -1).

        Their blocks do not stay in the prefix cache. Also ends the step's metadata.
        """
    def build_sequence_outputs(
        self, seq_id: int, pool: RequestOutputPool, sequence: WrittenSequence
    ) -> NDArray[np.uint64]:
        """The outputs of a text, one per token, for the request that sequence `seq_id` belongs to.

        Raises:
            LookupError: no such sequence.
            ValueError: there is no token, or not one log-probability for each.
        """
    def free_finished_seqs(self) -> None:
        """Frees the blocks of ended sequences that no step in flight refers to."""
    def take_forks(self) -> list[tuple[int, int]]:
        """(parent, child) of the tracked sequences that were forked for a request's `n` since the last call."""
    def take_freed_seq_ids(self) -> list[int]:
        """The tracked sequences that were freed since the last call."""
    def has_unfinished_seqs(self) -> bool: ...
    @property
    def num_unfinished_requests(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_prompted(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_used_blocks(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def acceptance_rates(self) -> NDArray[np.float64]:
        """Of each sequence that a decode step might compute, how likely its next draft is right."""
    @property
    def num_drafts(self) -> int:
        """How often a step verified drafts of a sequence, one or several."""
    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were proposed and verified."""
    @property
    def num_accepted_draft_tokens(self) -> int:
        """Those of them that became outputs."""
    @property
    def num_accepted_by_position(self) -> NDArray[np.int64]:
        """[num_speculative_tokens]: how many of these were their row's first, second, … draft."""
    def check_invariants(self) -> None:
        """Recounts everything from scratch; raises RuntimeError with the first thing that does not add up."""

def end_process_with(process: int) -> None:
    """Ends this process, with status 1, as soon as another one has ended; `process`: a pidfd of that one.

    Whatever this process does then: no thread of it needs to let go of the interpreter.
    """

@final
class SequenceMetadataList:
    """The batch's sequences, in batch order; a view that copies nothing."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> SequenceMetadata: ...
    def __iter__(self) -> Any: ...
