"""Multi-token-prediction modules: drafts of their own layer, which change how fast tokens come, and none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.errors import UnsupportedModelError
from tests.engine.test_same_tokens import random_cases, run
from tests.speculation.greedy import WAYS, GreedyCases
from tests.support.models import VOCAB_SIZE, make_random_model
from tests.support.mtp_modules import add_module, forget_context, random_module, single_token_module, write_module
from tests.support.oracle import TransformersOracle

HIDDEN_SIZE = 64
NUM_LAYERS = 3


def make_deepseek(folder: Path) -> Path:
    """A random DeepSeek-V3 of three layers; the fourth in its checkpoint is that of a module which it has not yet."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=NUM_LAYERS + 1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    model = DeepseekV3ForCausalLM(config)
    model.save_pretrained(folder)
    config.num_hidden_layers = NUM_LAYERS
    config.save_pretrained(folder)
    return folder


def mtp(num_speculative_tokens: int, folder: Path | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}
    return {"speculative_config": config if folder is None else {**config, "model": str(folder)}}


@pytest.fixture(scope="module")
def module(random_model: GreedyCases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    return write_module(random_model.path, folder, random_module(HIDDEN_SIZE, NUM_LAYERS), NUM_LAYERS)


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
@pytest.mark.parametrize(("batching", "num_speculative_tokens", "num_seqs"), WAYS)
def test_greedy_tokens_of_a_native_model_equal_transformers(
    random_model: GreedyCases,
    module: Path,
    batching: str,
    num_speculative_tokens: int,
    num_seqs: int,
    zero_overhead_scheduling: bool,
) -> None:
    drafter = mtp(num_speculative_tokens, module)
    random_model.check(batching, num_seqs, zero_overhead_scheduling=zero_overhead_scheduling, **drafter)


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("num_speculative_tokens", [1, 3])
def test_greedy_tokens_of_a_deepseek_equal_transformers(tmp_path: Path, num_speculative_tokens: int) -> None:
    path = make_deepseek(tmp_path)
    add_module(path, random_module(HIDDEN_SIZE, NUM_LAYERS))
    cases = random_cases(12, 200, 60, seed=4)
    oracle = TransformersOracle(path)
    expected = [oracle.greedy(prompt, limit) for prompt, limit in cases]
    assert run(path, cases, **mtp(num_speculative_tokens))[0] == expected


def counts(model: Path, max_tokens: int, **engine_args: Any) -> tuple[list[int], int, int]:
    """Tokens after a prompt, how many were drafted and how many of these were right; no block stays taken."""
    with LLM(str(model), decode_sequence=False, dtype="float32", **engine_args) as llm:
        (completion,) = llm.complete(
            prompt_token_ids=[[5, 6, 7]],
            sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            use_tqdm=False,
        )
        assert llm.llm_engine.scheduler.num_used_blocks == 0
    sequence = completion.sequences[0]
    return sequence.token_ids, sequence.num_draft_tokens, sequence.num_accepted_draft_tokens


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize(("sign", "share_right"), [(1.0, 1), (-1.0, 0)], ids=["right", "wrong"])
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 5])
@pytest.mark.parametrize("zero_overhead_scheduling", [True, False], ids=["zos", "no zos"])
def test_a_deepseeks_module_that_is_always_right_or_always_wrong_is_counted_so(
    tmp_path: Path, num_speculative_tokens: int, sign: float, share_right: int, zero_overhead_scheduling: bool
) -> None:
    path = forget_context(make_deepseek(tmp_path))
    add_module(path, single_token_module(path, NUM_LAYERS, sign=sign))
    expected = TransformersOracle(path).greedy([5, 6, 7], 61, ignore_eos=True)
    tokens, num_drafted, num_accepted = counts(
        path, 61, zero_overhead_scheduling=zero_overhead_scheduling, **mtp(num_speculative_tokens)
    )
    assert tokens == expected
    assert num_accepted == share_right * num_drafted
    if share_right and not zero_overhead_scheduling:
        # The prompt's step brings the first token; each of the others all its drafts and one more.
        assert num_drafted == 60 // (num_speculative_tokens + 1) * num_speculative_tokens


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("num_speculative_tokens", [1, 3])
def test_a_module_that_may_not_propose_some_tokens_is_right_until_one_of_them_comes(
    tmp_path: Path, num_speculative_tokens: int
) -> None:
    path = forget_context(make_random_model("llama", tmp_path))
    max_tokens = 80
    expected = TransformersOracle(path).greedy([5, 6, 7], max_tokens, ignore_eos=True)
    forbidden = set(sorted(set(expected))[::2])
    module = write_module(
        path,
        tmp_path / "module",
        single_token_module(path, NUM_LAYERS),
        NUM_LAYERS,
        [token for token in range(VOCAB_SIZE) if token not in forbidden],
    )
    tokens, num_drafted, num_accepted = counts(
        path, max_tokens, zero_overhead_scheduling=False, **mtp(num_speculative_tokens, module)
    )
    assert tokens == expected
    num_known, wanted_drafted, wanted_accepted = 1, 0, 0
    while num_known < max_tokens:
        drafted = expected[num_known : num_known + min(num_speculative_tokens, max_tokens - num_known - 1)]
        num_right = next((index for index, token in enumerate(drafted) if token in forbidden), len(drafted))
        wanted_drafted += len(drafted)
        wanted_accepted += num_right
        num_known += num_right + 1
    assert (num_drafted, num_accepted) == (wanted_drafted, wanted_accepted)
    assert 0 < num_accepted < num_drafted


def test_a_model_without_a_module_is_refused(
    random_model: GreedyCases,
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no multi-token-prediction module: no weight model.layers.3"):
        LLM(str(random_model.path), decode_sequence=False, **mtp(1))


@pytest.mark.usefixtures("every_draft_is_verified")
def test_the_module_that_comes_with_the_bundled_model_is_often_right_and_changes_nothing() -> None:
    questions = ["Why does bread rise?", "Tell me about whales.", "How do I learn chess?", "What is a glacier?"]
    params = SamplingParams(temperature=0, max_tokens=100)
    with LLM() as plain, LLM(**mtp(1)) as drafting:
        answers = [
            llm.chat([[{"role": "user", "content": each}] for each in questions], params, use_tqdm=False)
            for llm in (plain, drafting)
        ]
        scheduler = drafting.llm_engine.scheduler
        assert answers[0] == answers[1]
        assert scheduler.num_accepted_draft_tokens > 0.35 * scheduler.num_draft_tokens
