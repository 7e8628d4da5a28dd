"""Quantized models run as they are stored, close to what they are dequantized; dtype says which of the two."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_backend import LLM, SamplingParams
from deepinfer_backend.errors import UnsupportedModelError
from deepinfer_backend.models.loader import resolve_model
from tests.models.test_packed_weights import pack_columns, pack_rows
from tests.support.models import VOCAB_SIZE, make_random_model
from tests.support.oracle import TransformersOracle
from tests.support.tiny_gguf import ARCHITECTURES, write_tiny_gguf

PROMPTS = [[5, 17, 200, 33, 90, 4, 121], [99], list(range(40, 90))]
NUM_NEW_TOKENS = 12
# Mean Kullback-Leibler divergence of the next token's probabilities from those of the dequantized model in float32.
MAX_DIVERGENCE = 0.01
MAX_DIVERGENCE_OF_BUNDLED = 0.01
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    results: Any = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False)
    return [[output.token_id for output in result] for result in results]


def divergences(llm: LLM, oracle: TransformersOracle, prompts: list[list[int]], num_logprobs: int) -> list[float]:
    """Of each token's distribution in the prompts. What lies beyond our likeliest tokens counts as one token."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=num_logprobs)
    completions = llm.complete(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        for entry, row in zip((completion.prompt_logprobs or [])[1:], oracle.logprobs(prompt)[:-1], strict=True):
            assert entry is not None
            ours = {token.token_id: math.exp(token.logprob) for token in entry}
            theirs = {token_id: math.exp(float(row[token_id])) for token_id in ours}
            rest, rest_of_ours = (max(1e-12, 1 - sum(probabilities.values())) for probabilities in (theirs, ours))
            divergence = rest * math.log(rest / rest_of_ours)
            divergence += sum(p * math.log(p / ours[token_id]) for token_id, p in theirs.items() if p > 0)
            found.append(divergence)
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [
        *((architecture, "Q4_1") for architecture in ARCHITECTURES),
        *(("llama", quantization) for quantization in ("Q4_0", "Q8_0", "Q4_K", "Q6_K")),
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_gguf_file_runs_as_it_is_stored_close_to_itself_in_float32(
    tmp_path: Path, architecture: str, quantization: str, caplog: pytest.LogCaptureFixture
) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture, quantization=quantization)
    caplog.set_level(logging.INFO)
    with LLM(str(gguf), device="cpu", decode_sequence=False, max_logprobs=300) as llm:
        assert f" on cpu in {quantization}: " in caplog.text
        assert not list(llm.model_path.glob("*.safetensors"))
        oracle = TransformersOracle(llm.model_path)
        assert mean(divergences(llm, oracle, PROMPTS, 250)) < MAX_DIVERGENCE
    with LLM(str(gguf), device="cpu", dtype="float32", decode_sequence=False) as llm:
        assert " on cpu in float32: " in caplog.text
        assert greedy(llm) == [oracle.greedy(prompt, NUM_NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]


@pytest.mark.usefixtures("cache")
def test_types_that_are_not_run_are_dequantized(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", quantization="TQ2_0")
    with LLM(str(gguf), device="cpu", dtype="float32", decode_sequence=False) as llm:
        oracle = TransformersOracle(llm.model_path)
        assert greedy(llm) == [oracle.greedy(prompt, NUM_NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]


def test_the_bundled_model_runs_as_it_is_stored_close_to_itself_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LLM(device="cpu", max_model_len=512, max_logprobs=1024) as llm:
        assert " on cpu in Q4_1: " in caplog.text
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        prompt = llm.tokenizer(text[:600])["input_ids"]  # type: ignore[misc]
        found = divergences(llm, TransformersOracle(resolve_model(None)), [prompt], 1000)
        assert len(found) > 100
        assert mean(found) < MAX_DIVERGENCE_OF_BUNDLED


def pack_folder(folder: Path, method: str) -> Path:
    """Packs the layers' matrices of a random model with 4 bits in groups of 32, and writes what they mean beside it."""
    tensors = load_file(folder / "model.safetensors")
    packed, meant = {}, {}
    generator = torch.Generator().manual_seed(5)
    for name, weight in tensors.items():
        if "_proj" not in name:
            packed[name] = meant[name] = weight
            continue
        groups = weight.T.reshape(-1, 32, weight.shape[0])
        scales = ((groups.amax(1) - groups.amin(1)) / 15).half()
        zeros = torch.randint(5, 11, scales.shape, generator=generator)
        codes = (groups / scales[:, None].float()).round().add(zeros[:, None]).clamp(0, 15).long().flatten(0, 1)
        module = name.removesuffix(".weight")
        packed[f"{module}.scales"] = scales
        order = [0, 2, 4, 6, 1, 3, 5, 7] if method == "awq" else list(range(8))
        packed[f"{module}.qweight"] = pack_columns(codes, 4, order) if method == "awq" else pack_rows(codes, 4)
        packed[f"{module}.qzeros"] = pack_columns(zeros if method == "awq" else zeros - 1, 4, order)
        values = (codes.unflatten(0, (-1, 32)) - zeros[:, None]) * scales[:, None].float()  # type: ignore[no-untyped-call]
        meant[name] = values.flatten(0, 1).T.contiguous()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dequantized = folder.with_name("dequantized")
    dequantized.mkdir()
    save_file(meant, dequantized / "model.safetensors", metadata={"format": "pt"})
    (dequantized / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {"desc_act": False, "sym": False} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32, **fields}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return dequantized


@pytest.mark.parametrize(("method", "dtype_name"), [("gptq", "GPTQ-4bit"), ("awq", "AWQ-4bit")])
def test_packed_folders_run_as_they_are_stored_close_to_themselves_in_float32(
    tmp_path: Path, method: str, dtype_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = make_random_model("llama", tmp_path)
    oracle = TransformersOracle(pack_folder(folder, method))
    with LLM(str(folder), device="cpu", decode_sequence=False, max_logprobs=VOCAB_SIZE) as llm:
        assert f" on cpu in {dtype_name}: " in caplog.text
        assert mean(divergences(llm, oracle, PROMPTS, VOCAB_SIZE)) < MAX_DIVERGENCE
    with LLM(str(folder), device="cpu", dtype="float32", decode_sequence=False) as llm:
        assert greedy(llm) == [oracle.greedy(prompt, NUM_NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]


def test_packed_folders_of_other_families_are_refused(tmp_path: Path) -> None:
    folder = make_random_model("gemma3", tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="by gptq, which only native models read: model_type gemma3"):
        LLM(str(folder), device="cpu", decode_sequence=False)
