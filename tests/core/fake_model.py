"""The plain model: what the tests know of each sequence, which tokens it has, how likely they are and how it ends."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer_backend._core import RequestOutput, SamplingOptions

VOCAB_SIZE = 8
NO_TOKEN = -1
EOS = 0
STOP = 1

Finish = tuple[str, int]  # reason, stop token


class Histories:
    """Gives every distinct (salt, token, token, …) a number: the content of the KV slot of its last token."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int | str], int] = {}

    def extend(self, parent: int, token: int | str) -> int:
        return self._numbers.setdefault((parent, token), len(self._numbers) + 1)

    def of(self, salt: str, tokens: Iterable[int]) -> list[int]:
        parent, numbers = self.extend(0, salt), []
        for token in tokens:
            parent = self.extend(parent, token)
            numbers.append(parent)
        return numbers


def _state(tokens: list[int], seed: int) -> int:
    state = seed * 7919 + 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1000003
    return state


def next_token(tokens: list[int], seed: int) -> int:
    """The fake model: depends on the whole history, ends in EOS about once in eight tokens."""
    return _state(tokens, seed) % VOCAB_SIZE


def draft_tokens(tokens: list[int], line: Line, num_drafts: int) -> list[int]:
    """What a drafter proposes after `tokens`: `line.draft_quality` of four tokens are right, given those before them.

    Without a quality, the drafts end before the first that would be wrong.
    """
    drafts: list[int] = []
    for _ in range(num_drafts):
        token = next_token(tokens + drafts, line.seed)
        is_right = _state(tokens + drafts, line.seed + 1) % 4 < (
            2 if line.draft_quality is None else line.draft_quality
        )
        if not is_right and line.draft_quality is None:
            break
        drafts.append(token if is_right else (token + 1) % VOCAB_SIZE)
    return drafts + [NO_TOKEN] * (num_drafts - len(drafts))


@dataclass(frozen=True)
class TokenLogprobs:
    """What a step tells of one sampled token; numbers without meaning that a float32 holds exactly."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


def logprobs_of(tokens: list[int], seed: int, num_top: int) -> TokenLogprobs:
    """Of the token that comes after `tokens`."""
    state = _state(tokens, seed)
    top = [((state + i) % VOCAB_SIZE, -(state % 97) / 8 - i) for i in range(num_top)]
    return TokenLogprobs(-(state % 1021) / 16, 1 + state % VOCAB_SIZE, top)


@dataclass
class Line:
    """What the tests know of one sequence."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    salt: str = ""
    n: int = 1
    num_logprobs: int = -1
    prompt_logprobs: bool = False
    is_tracked: bool = False
    is_beam: bool = False
    lora_id: int = 0
    media_spans: tuple[tuple[int, int], ...] = ()
    keeps_media_whole: bool = False
    draft_quality: int | None = 2
    sequence_index: int = 0
    num_forks_due: int = 0  # children that come into being when the prompt is computed
    first_output: int = 0  # output index of the first token that comes out: not 0 for a fork on the way
    history: list[int] = field(default_factory=list)  # prompt and all that the device sampled
    outputs: list[RequestOutput] = field(default_factory=list)
    output_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by output index, if a step told them
    prompt_positions: set[int] = field(default_factory=set)  # those that a step gave logits for
    has_drafts: bool = False  # on the device, in the slot that it has now
    acceptance_rate: float = 0.5
    num_proposed: int = 0  # at most, by the last step that sampled for it
    num_tokens_behind: int = 0  # its last ones that the drafter has not computed, at most
    proposed: list[int] = field(default_factory=list)  # drafts for what comes next, as the host knows them
    num_rows_with_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    is_held: bool = False  # a beam that waits for its next token
    is_poisoned: bool = False  # a step of it failed
    ended: str = ""  # the finish reason that came out; "abort"; "silent" if a token from outside ended it

    def options(self) -> SamplingOptions:
        return SamplingOptions(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            eos_token_ids=[EOS],
            stop_token_ids=list(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            temperature=1.0,
            seed=self.seed,
            n=self.n,
            num_logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            is_tracked=self.is_tracked,
            is_beam=self.is_beam,
            lora_id=self.lora_id,
        )

    def fork(self, history: list[int], *, seed: int, sequence_index: int) -> Line:
        """A sequence of the same request that has the same past and a future of its own."""
        return Line(
            **{
                **self.__dict__,
                "seed": seed,
                "prompt_logprobs": False,
                "sequence_index": sequence_index,
                "num_forks_due": 0,
                "first_output": len(history) - len(self.prompt),
                "history": list(history),
                "outputs": [],
                "output_logprobs": {},
                "prompt_positions": set(),
                "has_drafts": False,
                "num_rows_with_drafts": 0,
                "num_draft_tokens": 0,
                "num_accepted_draft_tokens": 0,
            }
        )

    @property
    def num_outputs(self) -> int:
        """Those that the device sampled, or that came from outside."""
        return len(self.history) - len(self.prompt)

    def num_drafts(self, threshold: float, max_num_drafts: int) -> int:
        """How many are worth verifying."""
        if threshold == 0:
            return max_num_drafts
        probabilities = itertools.accumulate([self.acceptance_rate] * max_num_drafts, operator.mul)
        return sum(probability > threshold for probability in probabilities)

    def compare(self, tokens: list[int], num_awaited: int, weight: float = 0.125) -> None:
        """Learns from what was proposed for `tokens`: as long as it was right, and the first that was not.

        num_awaited: how many of them the step was to verify. Others that are not there say nothing.
        """
        if self.proposed and not num_awaited and self.proposed[0] == NO_TOKEN:
            self.acceptance_rate += (0.5 - self.acceptance_rate) / 1024
        for index, (draft, token) in enumerate(zip(self.proposed, tokens, strict=False)):
            if draft == NO_TOKEN and index >= num_awaited:
                break
            self.acceptance_rate += weight * ((draft == token) - self.acceptance_rate)
            if draft != token:
                break

    def end_tokens(self) -> set[int]:
        return set(self.stop_token_ids) | (set() if self.ignore_eos else {EOS})

    def finish(self, outputs: list[int], max_seq_len: int) -> Finish:
        """How the last of `outputs` ends the sequence."""
        if len(outputs) > self.min_tokens and outputs[-1] in self.end_tokens():
            return "STOP", outputs[-1]
        if len(outputs) == self.max_tokens or len(self.prompt) + len(outputs) == max_seq_len:
            return "LENGTH", -1
        return "NONE", -1

    def expected(self, known: list[int], max_seq_len: int) -> tuple[list[int], Finish]:
        """All outputs after `known` outputs, token by token, and how it ends: the plain model of generation."""
        outputs = list(known)
        while True:
            outputs.append(next_token(self.prompt + outputs, self.seed))
            finish = self.finish(outputs, max_seq_len)
            if finish[0] != "NONE":
                return outputs, finish
