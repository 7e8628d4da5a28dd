"""A native model takes the memory that its weights take in their files, and no more while it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from deepinfer_backend.models.loader import resolve_model
from deepinfer_backend.models.model_files import referenced_gguf

MIB = 1 << 20
OVERHEAD_BYTES = 8 * MIB
"""Norms, Python's objects, what malloc does not give back, and the last large page of each range of packed weights."""
LAYER_BYTES = 36 * MIB
"""What a layer of the random models is before it is packed (two bytes for each of its weights, or a copy of the largest
matrices in float32) beside the overhead."""

# Private memory of the process in bytes (pages of mapped files are not in it): how much more there is once the model
# of a folder is loaded, and the most there was meanwhile.
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from deepinfer_backend.models.loader import load_config
from deepinfer_backend.models.runnable_model import load_runnable_model

def resident_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

def watch():
    global most
    while not loaded:
        most = max(most, resident_bytes())
        time.sleep(0.0005)

path = Path(sys.argv[1])
torch.set_num_threads(2)
torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # starts torch's threads
load_config(path)  # imports what the loader needs
loaded, most, before = False, 0, resident_bytes()
watcher = threading.Thread(target=watch)
watcher.start()
model = load_runnable_model(
    path, getattr(torch, sys.argv[2]), torch.device("cpu"), dequantize=sys.argv[3] == "True", has_adapters=False
)
loaded, after = True, resident_bytes()
watcher.join()
print(model.weight_format, after - before, most - before)
"""


class Loaded(NamedTuple):
    weight_format: str
    grown_bytes: int
    peak_bytes: int


def load_in_a_fresh_process(folder: Path, dtype: str, *, dequantize: bool = False) -> Loaded:
    command = [sys.executable, "-c", MEASURE, str(folder), dtype, str(dequantize)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    weight_format, grown, peak = done.stdout.split()
    return Loaded(weight_format, int(grown), int(peak))


def write_llama(folder: Path, dtype: torch.dtype, *, gptq_bits: int | None) -> int:
    """A random model with tied ends, written without being computed; returns the bytes of its matrices."""
    config = LlamaConfig(
        vocab_size=16_384,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    fields: dict[str, Any] = config.to_dict()
    if gptq_bits is not None:
        fields["quantization_config"] = {
            "quant_method": "gptq",
            "bits": gptq_bits,
            "group_size": 128,
            "desc_act": False,
        }
    tensors = {"model.embed_tokens.weight": torch.randn(config.vocab_size, config.hidden_size).to(dtype)}
    hidden, intermediate = config.hidden_size, config.intermediate_size
    key_value = hidden * config.num_key_value_heads // config.num_attention_heads
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    for layer in range(config.num_hidden_layers):
        for name, (num_outputs, num_inputs) in sizes.items():
            module = f"model.layers.{layer}.{name}"
            if gptq_bits is None:
                tensors[f"{module}.weight"] = torch.randn(num_outputs, num_inputs).to(dtype)
                continue
            codes_of_int32, num_groups = 32 // gptq_bits, num_inputs // 128
            tensors[f"{module}.qweight"] = random_int32(num_inputs // codes_of_int32, num_outputs)
            tensors[f"{module}.qzeros"] = random_int32(num_groups, num_outputs // codes_of_int32)
            tensors[f"{module}.scales"] = torch.rand(num_groups, num_outputs).half()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors |= {f"model.layers.{layer}.{name}.weight": torch.ones(hidden) for layer in range(4)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return num_bytes


def random_int32(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def assert_takes(loaded: Loaded, stored_bytes: float) -> None:
    assert 0.95 * stored_bytes < loaded.grown_bytes < stored_bytes + OVERHEAD_BYTES
    assert loaded.peak_bytes < stored_bytes + LAYER_BYTES


def test_the_bundled_model_takes_what_its_file_does() -> None:
    folder = resolve_model(None)
    gguf = referenced_gguf(folder)
    assert gguf is not None
    loaded = load_in_a_fresh_process(folder, "float32")
    assert loaded.weight_format == "Q4_1"
    assert_takes(loaded, gguf.stat().st_size)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_gptq_folder_takes_what_its_matrices_do(tmp_path: Path, bits: int) -> None:
    stored_bytes = write_llama(tmp_path / "model", torch.float32, gptq_bits=bits)
    loaded = load_in_a_fresh_process(tmp_path / "model", "float32")
    assert loaded.weight_format == f"GPTQ-{bits}bit"
    # A zero point, of as many bits as a code, becomes one of 16: less than 0.1 bits more for each of 128 inputs.
    assert_takes(loaded, stored_bytes * (1 + 0.1 / bits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_take_what_their_matrices_do_and_tied_ones_once(tmp_path: Path, dtype: str) -> None:
    stored_bytes = write_llama(tmp_path / "model", getattr(torch, dtype), gptq_bits=None)
    loaded = load_in_a_fresh_process(tmp_path / "model", dtype)
    assert loaded.weight_format == dtype
    assert_takes(loaded, stored_bytes)


def test_what_is_dequantized_takes_what_floats_do(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", torch.float32, gptq_bits=4)
    as_floats = write_llama(tmp_path / "floats", torch.float32, gptq_bits=None)
    loaded = load_in_a_fresh_process(tmp_path / "model", "float32", dequantize=True)
    assert loaded.weight_format == "float32"
    assert loaded.grown_bytes < as_floats + OVERHEAD_BYTES
