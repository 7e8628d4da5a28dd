"""Random lives of random requests: whatever happens, every read is right, nobody starves, nothing leaks."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.fake_model import STOP, VOCAB_SIZE
from tests.core.scheduler_driver import SchedulerDriver

# Prompts are prefixes of these and tails of their own, so that many share blocks.
SHARED_TEXTS = [[2, 3, 4, 5, 6, 7, 2, 4, 6, 3, 5, 7], [2, 3, 4, 5, 7, 7, 7, 7, 7, 7, 7, 7]]
# What sets requests apart that the scheduler treats alike otherwise: one choice, since choices take time.
WISHES: list[tuple[dict[str, int], int, bool, int]] = list(
    itertools.product(
        [{"n": 1}, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 5}, {"is_beam": True}],
        [-1, -1, 0, 2],  # num_logprobs
        [False, False, True],  # prompt_logprobs
        [0, 2],  # lora_id
    )
)


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what a server does to a scheduler; `SchedulerDriver` checks every step against its plain model."""

    driver: SchedulerDriver

    @initialize(
        zero_overhead_scheduling=st.booleans(),
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(2, 12),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        max_num_extra_logits=st.integers(1, 12),
        num_speculative_tokens=st.sampled_from([0, 0, 1, 2, 3, 5]),
        max_consecutive_prefills=st.integers(1, 3),
        prefill_attempt_interval=st.integers(1, 3),
    )
    def start(self, zero_overhead_scheduling: bool, **limits: int) -> None:
        limits["num_speculative_tokens"] = min(limits["num_speculative_tokens"], limits["max_num_batched_tokens"] - 1)
        self.driver = SchedulerDriver(
            zero_overhead_scheduling=zero_overhead_scheduling, max_model_len=24, hash_seed=5, **limits
        )
        self.num_requests = 0

    @rule(
        text=st.sampled_from(SHARED_TEXTS),
        num_shared=st.sampled_from([12, 11, 9, 8, 6, 4, 3, 2, 0]),
        tail=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        max_tokens=st.integers(1, 14),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.sampled_from([True, True, False]),
        stop_token_ids=st.sampled_from([(), (STOP,)]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from(["", "", "", "tenant"]),
        draft_quality=st.sampled_from([None, 0, 2, 3, 4]),
        wishes=st.sampled_from(WISHES),
        span=st.sampled_from([(0, 0), (0, 0), (0, 3), (2, 6), (1, 12)]),
    )
    def add(
        self,
        text: list[int],
        num_shared: int,
        tail: list[int],
        max_tokens: int,
        min_tokens: int,
        wishes: tuple[dict[str, int], int, bool, int],
        span: tuple[int, int],
        **params: object,
    ) -> None:
        prompt = (text[:num_shared] + tail)[: self.driver.max_seq_len - 1]
        assume(prompt)
        self.num_requests += 1
        request_id = f"request {self.num_requests}"
        min_tokens = min(min_tokens, max_tokens)
        seed = 100 * self.num_requests
        sequences, num_logprobs, prompt_logprobs, lora_id = wishes
        begin = span[0]
        end = min(span[1], len(prompt), begin + self.driver.limits["max_num_batched_tokens"])
        self.driver.add(
            request_id,
            prompt,
            max_tokens,
            min_tokens=min_tokens,
            seed=seed,
            num_logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
            lora_id=lora_id,
            media_spans=((begin, end),) if begin < end else (),
            keeps_media_whole=not prompt_logprobs and self.num_requests % 2 == 0,
            is_tracked=self.num_requests % 3 > 0,
            **sequences,
            **params,
        )

    @rule(
        text=st.sampled_from(SHARED_TEXTS),
        num_shared=st.sampled_from([12, 11, 9, 6, 4, 3, 1]),
        max_tokens=st.integers(2, 10),
        priority=st.sampled_from([0, 0, 1, -1]),
        draft_quality=st.sampled_from([None, 0, 2, 4]),
        is_tracked=st.booleans(),
    )
    def add_prompted(self, text: list[int], num_shared: int, max_tokens: int, **params: Any) -> None:
        """One whose prompt another engine has computed."""
        assume(num_shared + 1 < self.driver.max_seq_len)
        self.num_requests += 1
        self.driver.add_prompted(
            f"r{self.num_requests}", text[:num_shared], max_tokens, seed=100 * self.num_requests, **params
        )

    @precondition(lambda self: self.driver.awaiting())
    @rule(choice=st.integers(0, 100), num_missing=st.sampled_from([0, 0, 0, 1, 2, 100]))
    def blocks_arrive(self, choice: int, num_missing: int) -> None:
        awaiting = self.driver.awaiting()
        awaited = awaiting[choice % len(awaiting)]
        self.driver.receive(awaited, max(0, len(awaited.blocks) - num_missing))

    @precondition(lambda self: self.driver.live_seq_ids())
    @rule(
        num_steps=st.integers(1, 6),
        advances_beams=st.booleans(),
        draft_threshold=st.sampled_from([0.0, 0.0, 0.2, 0.5, 1.0]),
    )
    def steps(self, num_steps: int, advances_beams: bool, draft_threshold: float) -> None:
        for _ in range(num_steps):
            if advances_beams:
                self.driver.advance_beams()
            self.driver.step(draft_threshold=draft_threshold)

    @precondition(lambda self: self.driver.live_seq_ids())
    @rule(choices=st.lists(st.booleans(), min_size=1, max_size=8))
    def step_without_tokens(self, choices: list[bool]) -> None:
        self.driver.step(without_token=lambda seq_id: choices[seq_id % len(choices)])

    @precondition(lambda self: self.driver.live_seq_ids())
    @rule(is_flushed=st.booleans())
    def failing_step(self, is_flushed: bool) -> None:
        self.driver.step(fails=True)
        if is_flushed:
            self.driver.flush()

    @rule()
    def flush(self) -> None:
        self.driver.flush()

    @precondition(lambda self: self.driver.live_seq_ids())
    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int) -> None:
        live = self.driver.live_seq_ids()
        self.driver.abort(self.driver.lines[live[choice % len(live)]].request_id)

    @precondition(lambda self: self.driver.live_seq_ids())
    @rule(choice=st.integers(0, 100), sequence_index=st.integers(-1, 3))
    def abort_one_sequence(self, choice: int, sequence_index: int) -> None:
        """By its id, or by its request's; of those that ended, or are not there yet, nothing comes."""
        seq_id = choice % len(self.driver.lines)
        if sequence_index < 0:
            self.driver.abort_seq(seq_id)
        else:
            self.driver.abort(self.driver.lines[seq_id].request_id, sequence_index)

    @precondition(lambda self: self.driver.held_seq_ids())
    @rule(
        choice=st.integers(0, 100),
        tokens=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    )
    def branch_a_beam(self, choice: int, tokens: list[int]) -> None:
        """Goes on with each of the tokens: the first in the sequence itself, the others in forks. None: it ends."""
        held = self.driver.held_seq_ids()
        seq_id = held[choice % len(held)]
        forks = [self.driver.fork(seq_id, 1000 + choice) for _ in tokens[1:]]
        for branch, token in zip([seq_id, *forks], tokens, strict=False):
            self.driver.append_token(branch, token)
        if not tokens:
            self.driver.abort_seq(seq_id)

    @precondition(lambda self: self.driver.live_seq_ids())
    @rule(choice=st.integers(0, 100), num_forks=st.integers(1, 3))
    def fork(self, choice: int, num_forks: int) -> None:
        self.driver.flush()
        live = self.driver.live_seq_ids()
        for i in range(len(live)):
            seq_id = live[(choice + i) % len(live)]
            try:
                for seed in range(num_forks):
                    self.driver.fork(seq_id, 1000 + choice + seed)
            except ValueError:
                assert self.driver.scheduler.num_waiting > 0  # it has not finished its prefill
            else:
                break

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        scheduler.check_invariants()
        assert scheduler.num_free_blocks + scheduler.num_used_blocks == scheduler.num_blocks
        live = self.driver.live_seq_ids()
        assert scheduler.num_waiting + scheduler.num_prompted + scheduler.num_running == len(live)
        assert scheduler.num_unfinished_requests == len({self.driver.lines[seq_id].request_id for seq_id in live})
        assert scheduler.has_unfinished_seqs() == bool(live)
        assert [seq_id for seq_id in self.driver.lines if scheduler.is_held(seq_id)] == self.driver.held_seq_ids()
        awaiting = [seq_id for seq_id in self.driver.lines if scheduler.awaits_blocks(seq_id)]
        assert awaiting == sorted(awaited.seq_id for awaited in self.driver.awaiting())

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            lines = [self.driver.lines[seq_id] for seq_id in self.driver.live_seq_ids()]
            # Alone, each needs a step per chunk and token; each may be preempted once per step of all others. A beam
            # that has no place beside the others is computed anew for each token.
            num_steps = sum(
                (1 + line.num_forks_due)
                * (len(line.prompt) + line.max_tokens)
                * (self.driver.max_seq_len if line.is_beam else 1)
                for line in lines
            )
            self.driver.drain(max_steps=10 + 4 * num_steps)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=300,
    stateful_step_count=70,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
