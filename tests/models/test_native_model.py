"""The native decoder computes what transformers does, for each family and each field that changes the computation."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.loader import load_tokenizer, resolve_model
from deepinfer_backend.ops.kernels import ISAS, kernels
from tests.support.lora import TARGET_MODULES, make_random_adapter
from tests.support.models import make_random_model
from tests.support.oracle import TransformersOracle

VOCAB_SIZE = 509
MAX_NEW_TOKENS = 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, llama3 rope": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama, yarn": lambda: LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "llama, linear rope": lambda: LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
    ),
    "llama, one kv head, odd head_dim": lambda: LlamaConfig(
        **SIZES | {"num_key_value_heads": 1, "head_dim": 20, "rms_norm_eps": 0.1}
    ),
    "llama, as many kv heads": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=7),
    "mistral, no window": lambda: MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2, windows": lambda: Qwen2Config(**SIZES, **WINDOWS),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "qwen3, biases and windows": lambda: Qwen3Config(**SIZES, **WINDOWS, head_dim=16, attention_bias=True),
    "phi3": lambda: Phi3Config(**SIZES),
    "phi3, partial rotary and window": lambda: Phi3Config(
        **SIZES, sliding_window=7, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
}
BATCHING: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small chunks": {"max_num_batched_tokens": 24, "block_size": 5},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 3},
}


def random_prompts() -> list[list[int]]:
    """Of lengths from 1 to beyond the windows; the last two begin alike, by more than a block."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 17, 60)]
    return [*prompts, [*prompts[-1][:40], 3, 4]]


def save_random_model(config: Any, path: Path) -> Path:
    """With random biases and norms as well, which transformers begins with zeros and ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return path


class Reference:
    """A random model's folder, and what transformers makes of the prompts in float32."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prompts = random_prompts()
        oracle = TransformersOracle(path)
        self.tokens = [oracle.greedy(prompt, MAX_NEW_TOKENS, ignore_eos=True) for prompt in self.prompts]
        self.logprobs = [oracle.logprobs(prompt) for prompt in self.prompts]
        self.hidden_states = [oracle.last_hidden_state(prompt) for prompt in self.prompts]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @cache
    def make(name: str) -> Reference:
        return Reference(save_random_model(CONFIGS[name](), tmp_path_factory.mktemp("models")))

    return make


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    chosen = kernels.isa()
    if not kernels.set_isa(request.param):
        pytest.skip(f"this machine does not run {request.param}")
    yield request.param
    kernels.set_isa(chosen)


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS, ignore_eos=True)
    results: Any = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [[output.token_id for output in result] for result in results]


def logprob_errors(llm: LLM, reference: Reference) -> list[float]:
    """How far each prompt token's log-probability, and the best token's in its place, are from transformers'."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    completions = llm.complete(prompt_token_ids=reference.prompts, sampling_params=params, use_tqdm=False)
    errors = []
    for completion, expected in zip(completions, reference.logprobs, strict=True):
        for entry, row in zip((completion.prompt_logprobs or [])[1:], expected[:-1], strict=True):
            assert entry is not None
            errors += [abs(token.logprob - float(row[token.token_id])) for token in entry]
    return errors


def runs_through_transformers(caplog: pytest.LogCaptureFixture) -> str | None:
    """The reason that the log has for it."""
    reasons = [text.split("runs through transformers: ")[1] for text in caplog.messages if "through transf" in text]
    return reasons[0] if reasons else None


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_logits_and_hidden_states_equal_transformers(
    reference: Callable[[str], Reference], name: str, batching: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = reference(name)
    with (
        caplog.at_level(logging.INFO),
        LLM(str(expected.path), decode_sequence=False, dtype="float32", device="cpu", **BATCHING[batching]) as llm,
    ):
        assert runs_through_transformers(caplog) is None
        for _ in range(2):  # the second time from the prefix cache
            assert greedy(llm, expected.prompts) == expected.tokens
        assert max(logprob_errors(llm, expected)) < 1e-4
        for embedding, state in zip(llm.embed(expected.prompts, use_tqdm=False), expected.hidden_states, strict=True):
            assert embedding == pytest.approx(torch.nn.functional.normalize(state, dim=0).tolist(), abs=1e-5)


@pytest.mark.parametrize("isa", ISAS, indirect=True)
def test_every_instruction_set_gives_the_same_tokens(reference: Callable[[str], Reference], isa: str) -> None:
    expected = reference("qwen3, biases and windows")
    with LLM(str(expected.path), decode_sequence=False, dtype="float32", device="cpu") as llm:
        assert greedy(llm, expected.prompts) == expected.tokens
        assert max(logprob_errors(llm, expected)) < 1e-4


@pytest.mark.parametrize("name", ["llama, biases", "qwen3", "phi3, partial rotary and window"])
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(
    reference: Callable[[str], Reference], name: str
) -> None:
    expected = reference(name)
    oracle = TransformersOracle(expected.path, dtype=torch.bfloat16)
    theirs = [
        (oracle.logprobs(prompt) - logprobs).abs().mean()
        for prompt, logprobs in zip(expected.prompts, expected.logprobs, strict=True)
    ]
    with LLM(str(expected.path), decode_sequence=False, dtype="bfloat16", device="cpu") as llm:
        ours = logprob_errors(llm, expected)
    assert sum(ours) / len(ours) < 1.25 * float(torch.stack(theirs).mean())


def test_the_bundled_model_is_native(caplog: pytest.LogCaptureFixture) -> None:
    path = resolve_model(None)
    tokenizer: Any = load_tokenizer(path)
    prompt = list(tokenizer("The history of the Roman Empire began when")["input_ids"])
    with caplog.at_level(logging.INFO), LLM(str(path), decode_sequence=False, dtype="float32", device="cpu") as llm:
        assert runs_through_transformers(caplog) is None
        assert greedy(llm, [prompt]) == [TransformersOracle(path).greedy(prompt, MAX_NEW_TOKENS, ignore_eos=True)]


def test_a_model_whose_files_hold_both_ends_ties_them_only_if_they_are_equal(tmp_path: Path) -> None:
    path = save_random_model(CONFIGS["llama, tied"](), tmp_path / "model")
    stored = load_file(path / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    for output_layer in (embedding.clone(), embedding.flip(0)):
        save_file(stored | {"lm_head.weight": output_layer}, path / "model.safetensors", metadata={"format": "pt"})
        prompts = random_prompts()
        oracle = TransformersOracle(path)
        with LLM(str(path), decode_sequence=False, dtype="float32", device="cpu") as llm:
            assert greedy(llm, prompts) == [
                oracle.greedy(prompt, MAX_NEW_TOKENS, ignore_eos=True) for prompt in prompts
            ]


REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
        "rope_type is 'dynamic'",
    ),
    (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            }
        },
        {},
        "rope_type is 'longrope'",
    ),
    ("llama", {"head_dim": 18}, {}, "head_dim is 18, not a multiple of 4"),
    ("llama", {}, {"dtype": "float16"}, "dtype is float16"),
]


@pytest.mark.parametrize(("name", "fields", "engine_args", "reason"), REFUSALS, ids=[reason for *_, reason in REFUSALS])
def test_what_the_decoder_does_not_compute_runs_through_transformers(
    name: str,
    fields: dict[str, Any],
    engine_args: dict[str, Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = CONFIGS[name]()
    path = save_random_model(type(config)(**config.to_dict() | fields), tmp_path / "model")
    with (
        caplog.at_level(logging.INFO),
        LLM(str(path), decode_sequence=False, **{"dtype": "float32", "device": "cpu"} | engine_args) as llm,
    ):
        tokens = greedy(llm, [[1, 2, 3]])
    assert runs_through_transformers(caplog) == reason
    if not engine_args:
        assert tokens == [TransformersOracle(path).greedy([1, 2, 3], MAX_NEW_TOKENS, ignore_eos=True)]


def test_other_families_run_through_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_random_model("gpt_neox", tmp_path)
    with caplog.at_level(logging.INFO), LLM(str(path), decode_sequence=False, dtype="float32", device="cpu"):
        assert runs_through_transformers(caplog) == (
            "model_type gpt_neox is none of llama, mistral, qwen2, qwen3, phi3"
        )


def test_a_model_with_adapters_runs_through_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_random_model("llama", tmp_path)
    adapter = make_random_adapter(path, tmp_path / "adapter", seed=1, r=4, target_modules=TARGET_MODULES["llama"])
    with (
        caplog.at_level(logging.INFO),
        LLM(str(path), decode_sequence=False, dtype="float32", device="cpu", lora_modules={"adapter": str(adapter)}),
    ):
        assert runs_through_transformers(caplog) == "its adapters change single projections (lora_modules)"


def test_weights_that_are_not_read_are_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_random_model(CONFIGS["llama"](), tmp_path / "model")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "hqq"}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with caplog.at_level(logging.INFO), pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        LLM(str(path), decode_sequence=False, dtype="float32", device="cpu")
    assert "quant_method" in str(runs_through_transformers(caplog))


def remove_weight(stored: dict[str, torch.Tensor]) -> None:
    del stored["model.layers.1.mlp.up_proj.weight"]


def shorten_weight(stored: dict[str, torch.Tensor]) -> None:
    stored["model.layers.1.self_attn.k_proj.weight"] = stored["model.layers.1.self_attn.k_proj.weight"][:31].clone()


def widen_norm(stored: dict[str, torch.Tensor]) -> None:
    stored["model.norm.weight"] = torch.ones(65)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_weight, r"lacks the weight model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            shorten_weight,
            r"weight model\.layers\.1\.self_attn\.k_proj\.weight has shape \[31, 64\]: must be \[32, 64\]",
        ),
        (widen_norm, r"weight model\.norm\.weight has shape \[65\]: must be \[64\]"),
    ],
)
def test_a_weight_that_is_missing_or_misshapen_is_named(
    damage: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    path = save_random_model(CONFIGS["llama"](), tmp_path / "model")
    stored = load_file(path / "model.safetensors")
    damage(stored)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(str(path), decode_sequence=False, dtype="float32", device="cpu")
