"""What is sampled with drafts is distributed as the model says: three tokens together, 20,000 times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from deepinfer_backend import LLM, SamplingParams
from tests.support.models import make_similar_model
from tests.support.mtp_modules import single_token_module, write_module
from tests.support.oracle import TransformersOracle

NUM_SAMPLES = 20_000
NUM_TOKENS = 3
LETTERS = "abcdefghijklm"
FIRST_LETTER = 3  # token ids before it are special
VOCAB_SIZE = FIRST_LETTER + len(LETTERS)
NUM_LAYERS = 2
PROMPT = [FIRST_LETTER + (index * index + index // 3) % len(LETTERS) for index in range(60)]

DRAFTERS: dict[str, dict[str, Any]] = {
    # Every token stands in the prompt, so that there always is a draft.
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 2},  # a similar model
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},  # that of a model without context
}
ALLOWED = ["abc", "abcdef", "de"]  # by the grammar
REQUESTS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7, "ignore_eos": True},
    "temperature 1.5": {"temperature": 1.5, "ignore_eos": True},
    "top-p": {"temperature": 1.0, "top_p": 0.7, "ignore_eos": True},
    "grammar": {"temperature": 1.0, "structured_outputs": {"regex": "".join(f"[{each}]" for each in ALLOWED)}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of few tokens: some letters, one each."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("letters")
    LlamaForCausalLM(config).save_pretrained(path)
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    return path


def next_token_probabilities(oracle: TransformersOracle, tokens: torch.Tensor, request: str) -> torch.Tensor:
    """Of what follows the prompt and each row of tokens; [num_rows, VOCAB_SIZE]."""
    rows = torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], dim=1)
    scores = oracle.next_token_logprobs(rows.tolist()).double()
    fields = REQUESTS[request]
    if "structured_outputs" in fields:
        allowed = [FIRST_LETTER + LETTERS.index(letter) for letter in ALLOWED[tokens.shape[1]]]
        mask = torch.full((VOCAB_SIZE,), -torch.inf, dtype=torch.float64)
        mask[allowed] = 0
        scores = scores + mask
    scores = TemperatureLogitsWarper(fields["temperature"])(rows, scores)
    if "top_p" in fields:
        scores = TopPLogitsWarper(fields["top_p"])(rows, scores)
    probabilities: torch.Tensor = scores.softmax(dim=-1)
    return probabilities


def expected_shares(model: Path, request: str) -> NDArray[np.float64]:
    """Of every combination of NUM_TOKENS tokens; [VOCAB_SIZE ** NUM_TOKENS]."""
    oracle = TransformersOracle(model)
    shares, tokens = torch.ones(1, dtype=torch.float64), torch.empty(1, 0, dtype=torch.long)
    for _ in range(NUM_TOKENS):
        probabilities = next_token_probabilities(oracle, tokens, request)
        shares = (shares[:, None] * probabilities).flatten()
        following = torch.arange(VOCAB_SIZE).repeat(len(tokens))[:, None]
        tokens = torch.cat([tokens.repeat_interleave(VOCAB_SIZE, dim=0), following], dim=1)
    return shares.numpy()


@pytest.mark.usefixtures("every_draft_is_verified")
@pytest.mark.parametrize("request_kind", REQUESTS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_three_tokens_are_distributed_as_transformers_says(
    model: Path, drafter: str, request_kind: str, tmp_path: Path
) -> None:
    speculative_config = dict(DRAFTERS[drafter])
    if drafter == "draft_model":
        speculative_config["model"] = str(make_similar_model(model, tmp_path, noise=0.2))
    elif drafter == "mtp":
        module = single_token_module(model, NUM_LAYERS)
        speculative_config["model"] = str(write_module(model, tmp_path / "module", module, NUM_LAYERS))
    params = [SamplingParams(max_tokens=NUM_TOKENS, seed=seed, **REQUESTS[request_kind]) for seed in range(NUM_SAMPLES)]
    with LLM(str(model), dtype="float32", speculative_config=speculative_config) as llm:
        completions = llm.complete(prompt_token_ids=[PROMPT] * NUM_SAMPLES, sampling_params=params, use_tqdm=False)
        scheduler = llm.llm_engine.scheduler
        assert NUM_SAMPLES / 100 < scheduler.num_accepted_draft_tokens < scheduler.num_draft_tokens
    tokens = np.array([completion.sequences[0].token_ids for completion in completions])
    cells = tokens @ VOCAB_SIZE ** np.arange(NUM_TOKENS - 1, -1, -1)
    observed, expected = np.bincount(cells, minlength=VOCAB_SIZE**NUM_TOKENS), expected_shares(model, request_kind)
    assert not observed[expected == 0.0].any()
    # The test wants at least five expected in each cell: the rare ones make one together.
    is_rare = expected * NUM_SAMPLES < 5
    observed = np.append(observed[~is_rare], observed[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum()) * NUM_SAMPLES
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert scipy.stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4
