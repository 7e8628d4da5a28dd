"""`1/model.json` and `1/multi_lora.json` of Triton's vLLM backend → the arguments of our engine.

The tables below have the arguments of vLLM's AsyncEngineArgs, those of older versions included; what is in none of
them has the same name and meaning with us.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.errors import ConfigError, nearest_name, shown
from deepinfer_backend.triton.engine_folder import ENGINE_OF
from deepinfer_backend.triton.model_config import read_engine_arguments, read_json_object

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The values of an argument that change nothing here; any other is refused, and `reason` says why."""

    values: tuple[Any, ...]
    reason: str


_ONE_DEVICE = "one engine uses one device"
_NO_REMOTE_CODE = "a model's own code is never run"
_MODELS_OWN = "the model's own configuration counts"
_QUANTIZED_AS_STORED = "the model's files say how its weights are quantized"
_NO_DRAFTS = "speculative_config says what proposes tokens"
_NO_OFFLOADING = "weights and KV cache stay on the device"
_NO_KV_TRANSFER = "engines do not exchange KV cache"
_NO_HOOKS = "code of others is not loaded into the engine"
_ADAPTERS_AS_TRAINED = "adapters are used as they were trained"
_HUB_ENVIRONMENT = "set HF_TOKEN and HF_HOME in the server's environment instead"

ACCEPTED_VALUES: dict[str, Accepted] = {
    # Devices
    "pipeline_parallel_size": Accepted((1,), _ONE_DEVICE),
    "data_parallel_size_local": Accepted((1,), _ONE_DEVICE),
    "prefill_context_parallel_size": Accepted((1,), _ONE_DEVICE),
    "decode_context_parallel_size": Accepted((1,), _ONE_DEVICE),
    "data_parallel_rank": Accepted((0,), _ONE_DEVICE),
    "data_parallel_start_rank": Accepted((0,), _ONE_DEVICE),
    "data_parallel_hybrid_lb": Accepted((False,), _ONE_DEVICE),
    "data_parallel_external_lb": Accepted((False,), _ONE_DEVICE),
    "data_parallel_multi_port_external_lb": Accepted((False,), _ONE_DEVICE),
    "node_rank": Accepted((0,), _ONE_DEVICE),
    "enable_elastic_ep": Accepted((False,), _ONE_DEVICE),
    "enable_eplb": Accepted((False,), _ONE_DEVICE),
    "enable_dbo": Accepted((False,), _ONE_DEVICE),
    # What is loaded, and how
    "trust_remote_code": Accepted((False,), _NO_REMOTE_CODE),
    "code_revision": Accepted((), _NO_REMOTE_CODE),
    "revision": Accepted(("main",), "a hub id stands for its main branch"),
    "tokenizer_revision": Accepted(("main",), "a hub id stands for its main branch"),
    "hf_token": Accepted((False,), _HUB_ENVIRONMENT),
    "download_dir": Accepted((), _HUB_ENVIRONMENT),
    "load_format": Accepted(("auto", "safetensors", "hf", "gguf"), "weights are safetensors or GGUF"),
    "model_weights": Accepted(("",), "the weights lie beside the model's configuration"),
    "model_loader_extra_config": Accepted(({},), "weights are safetensors or GGUF"),
    "config_format": Accepted(("auto", "hf"), "the configuration is Hugging Face's"),
    "hf_config_path": Accepted((), _MODELS_OWN),
    "hf_overrides": Accepted(({},), _MODELS_OWN),
    "rope_scaling": Accepted(({},), _MODELS_OWN),
    "rope_theta": Accepted((), _MODELS_OWN),
    "disable_sliding_window": Accepted((False,), _MODELS_OWN),
    "override_attention_dtype": Accepted((), _MODELS_OWN),
    "generation_config": Accepted(("auto",), "the model's own sampling defaults apply"),
    "override_generation_config": Accepted(({},), "the model's own sampling defaults apply"),
    "model_impl": Accepted(("auto", "vllm", "transformers"), "models are transformers' own"),
    "tokenizer_mode": Accepted(("auto", "hf"), "the tokenizer is Hugging Face's"),
    "task": Accepted(("auto", "generate"), "a model generates and embeds"),
    "runner": Accepted(("auto", "generate"), "a model generates and embeds"),
    "convert": Accepted(("auto", "none"), "a model generates and embeds"),
    "pooler_config": Accepted(({},), "an embedding is that of the last token"),
    "override_pooler_config": Accepted(({},), "an embedding is that of the last token"),
    "is_embedding_model": Accepted((False,), "a model generates and embeds"),
    # Number formats and where the numbers lie
    "quantization": Accepted(("gguf", "gptq", "awq"), _QUANTIZED_AS_STORED),
    "quantization_config": Accepted(({},), _QUANTIZED_AS_STORED),
    "quantization_param_path": Accepted((), _QUANTIZED_AS_STORED),
    "calculate_kv_scales": Accepted((False,), _QUANTIZED_AS_STORED),
    "cpu_offload_gb": Accepted((0,), _NO_OFFLOADING),
    "offload_group_size": Accepted((0,), _NO_OFFLOADING),
    "kv_offloading_size": Accepted((0,), _NO_OFFLOADING),
    "preemption_mode": Accepted(("recompute",), "a preempted sequence is computed again"),
    "kv_transfer_config": Accepted((), _NO_KV_TRANSFER),
    "kv_events_config": Accepted((), _NO_KV_TRANSFER),
    "ec_transfer_config": Accepted((), _NO_KV_TRANSFER),
    "weight_transfer_config": Accepted((), "weights are loaded once, at start"),
    "enable_sleep_mode": Accepted((False,), "an engine does not sleep"),
    # The step
    "enable_chunked_prefill": Accepted((True,), "long prompts are always prefilled in chunks"),
    "scheduling_policy": Accepted(("fcfs", "priority"), "priority first, then the order of arrival"),
    "logprobs_mode": Accepted(("raw_logprobs",), "log-probabilities are those of the unedited logits"),
    "use_fp64_gumbel": Accepted((False,), "sampling computes in float32"),
    "speculative_model": Accepted((), _NO_DRAFTS),
    "num_speculative_tokens": Accepted((0,), _NO_DRAFTS),
    "spec_method": Accepted((), _NO_DRAFTS),
    "spec_model": Accepted((), _NO_DRAFTS),
    "spec_tokens": Accepted((0,), _NO_DRAFTS),
    "num_lookahead_slots": Accepted((0,), _NO_DRAFTS),
    "ngram_prompt_lookup_max": Accepted((0,), _NO_DRAFTS),
    "structured_outputs_config": Accepted(
        ({}, {"backend": "auto"}, {"backend": "xgrammar"}, {"backend": "guidance"}, {"backend": "outlines"}),
        "grammars have a compiler of our own",
    ),
    "guided_decoding_disable_any_whitespace": Accepted((False,), "JSON may have white space"),
    "enable_reasoning": Accepted((False,), "a model's reasoning is text like any other"),
    "reasoning_parser": Accepted(("",), "a model's reasoning is text like any other"),
    "reasoning_parser_plugin": Accepted(("",), _NO_HOOKS),
    "reasoning_config": Accepted(({},), "a model's reasoning is text like any other"),
    "enable_prompt_embeds": Accepted((False,), "a prompt is text or token ids"),
    "enable_prompt_adapter": Accepted((False,), "a prompt is text or token ids"),
    "enable_return_routed_experts": Accepted((False,), "no output tells of a mixture's experts"),
    "tokens_only": Accepted((False,), "see skip_tokenizer_init"),
    "worker_cls": Accepted(("auto",), _NO_HOOKS),
    "worker_extension_cls": Accepted(("",), _NO_HOOKS),
    "scheduler_cls": Accepted((), _NO_HOOKS),
    "logits_processors": Accepted(([],), _NO_HOOKS),
    "logits_processor_pattern": Accepted((), _NO_HOOKS),
    "io_processor_plugin": Accepted((), _NO_HOOKS),
    # Adapters
    "lora_dtype": Accepted(("auto",), _ADAPTERS_AS_TRAINED),
    "lora_target_modules": Accepted((), _ADAPTERS_AS_TRAINED),
    "long_lora_scaling_factors": Accepted((), _ADAPTERS_AS_TRAINED),
    "qlora_adapter_name_or_path": Accepted((), _ADAPTERS_AS_TRAINED),
}
"""What we cannot do: accepted at the values that ask for nothing (null always is one), refused by name otherwise."""

WITHOUT_EFFECT = frozenset(
    {
        # How the work is done: no answer depends on it.
        *("enforce_eager", "max_seq_len_to_capture", "max_context_len_to_capture", "compilation_config"),
        *("cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level", "performance_mode"),
        *("attention_backend", "attention_config", "kernel_config", "ir_op_priority", "moe_backend", "linear_backend"),
        *("enable_flashinfer_autotune", "gdn_prefill_backend", "disable_cascade_attn", "profiler_config"),
        *("num_scheduler_steps", "multi_step_stream_outputs", "async_scheduling", "disable_async_output_proc"),
        *("max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold"),
        *("scheduler_delay_factor", "scheduler_reserve_full_isl", "stream_interval", "kv_sharing_fast_prefill"),
        *("swap_space", "use_v2_block_manager", "prefix_caching_hash_algo", "disable_hybrid_kv_cache_manager"),
        *("enable_cumem_allocator", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "additional_config"),
        *("offload_backend", "offload_num_in_group", "offload_prefetch_step", "offload_params", "cpu_offload_params"),
        *("kv_offloading_backend", "kv_cache_dtype_skip_layers", "allow_deprecated_quantization"),
        *("guided_decoding_backend", "guided_decoding_disable_fallback"),
        *("guided_decoding_disable_additional_properties", "cuda_graph_sizes"),
        *("fault_tolerance_config", "enable_fault_tolerance"),
        # Of drafts, which are refused themselves.
        *("ngram_prompt_lookup_min", "speculative_draft_tensor_parallel_size", "speculative_model_quantization"),
        *("speculative_max_model_len", "speculative_disable_by_batch_size", "speculative_disable_mqa_scorer"),
        *("speculative_disable_logprobs", "disable_logprobs_during_spec_decoding", "spec_decoding_acceptance_method"),
        *("typical_acceptance_sampler_posterior_threshold", "typical_acceptance_sampler_posterior_alpha"),
        # How weights and tokenizers are read.
        *("safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
        *("ignore_patterns", "use_tqdm_on_load", "pt_load_map_location", "max_parallel_loading_workers"),
        *("tokenizer_pool_size", "tokenizer_pool_type", "tokenizer_pool_extra_config", "renderer_num_workers"),
        # Several devices, of which one is used.
        *("distributed_executor_backend", "worker_use_ray", "engine_use_ray", "ray_workers_use_nsight"),
        *("disable_custom_all_reduce", "distributed_timeout_seconds"),
        *("cpu_distributed_timeout_seconds", "data_parallel_address", "data_parallel_rpc_port"),
        *("data_parallel_backend", "disable_nccl_for_dp_synchronization", "enable_ep_weight_filter"),
        *("all2all_backend", "eplb_config", "expert_placement_strategy", "ubatch_size"),
        *("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "dcp_comm_backend"),
        *("dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "fully_sharded_loras"),
        # Images, which a request cannot bring, and models of a kind that is refused when it is loaded.
        *("language_model_only", "enable_mm_embeds", "interleave_mm_strings"),
        *("media_io_kwargs", "mm_processor_kwargs", "mm_processor_cache_gb", "mm_processor_cache_type"),
        *("mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend"),
        *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path"),
        *("mm_encoder_fp8_scale_save_margin", "skip_mm_profiling", "video_pruning_rate", "mm_tensor_ipc"),
        *("disable_mm_preprocessor_cache", "disable_chunked_mm_input", "default_mm_loras"),
        *("allowed_local_media_path", "allowed_media_domains", "enable_tower_connector_lora"),
        *("mamba_config", "mamba_backend", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size"),
        *("mamba_ssu_algorithm", "use_replayssm", "replayssm_buffer_len"),
        *("mamba_cache_mode", "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds"),
        # Adapters: what they need is known when they are loaded.
        *("lora_extra_vocab_size", "specialize_active_lora", "enable_mixed_moe_lora_format"),
        *("max_prompt_adapters", "max_prompt_adapter_token"),
        # Logs and metrics, which are Triton's.
        *("served_model_name", "disable_log_requests", "max_log_len"),
        *("aggregate_engine_logging", "enable_logging_iteration_details", "show_hidden_metrics_for_version"),
        *("collect_detailed_traces", "kv_cache_metrics", "kv_cache_metrics_sample", "cudagraph_metrics"),
        *("enable_layerwise_nvtx_tracing", "enable_mfu_metrics", "enable_mm_processor_stats"),
        *("shutdown_timeout", "fail_on_environ_validation"),
    }
)
"""Accepted whatever they say: they have no meaning here, or only one that no answer depends on."""

_DISABLE_LOG_STATS = "disable_log_stats"
_ENABLE_LORA = "enable_lora"
_MAX_CPU_LORAS = "max_cpu_loras"
_TRANSLATED = (_DISABLE_LOG_STATS, _ENABLE_LORA, _MAX_CPU_LORAS)
_SECRET = "hf_token"

_DTYPES = {"half": "float16", "float": "float32"}
_KV_CACHE_DTYPES = {**_DTYPES, "int8_per_token_head": "int8"}
_LONGEST_THAT_FITS = (-1, "auto")
_WORDS = {"true": True, "false": False, "none": None}


def load_engine_arguments(version_folder: Path) -> dict[str, Any]:
    """The arguments of EngineConfig that the files of a model's version say, in vLLM's words or in ours.

    Raises:
        ConfigError: a file is not what it must be, or asks for something that we cannot do; the message names it.
    """
    arguments = read_engine_arguments(version_folder)
    if ENGINE_OF in arguments:
        return arguments  # of another model, whose model.json says the rest
    adapters: dict[str, str] = {}
    if _is_true(_ENABLE_LORA, arguments):
        adapters = read_adapters(version_folder / "multi_lora.json")
    return translate(arguments, adapters)


def read_adapters(path: Path) -> dict[str, str]:
    """Name → absolute folder; none where the file is missing. Relative ones start at the server's working directory.

    Raises:
        ConfigError: it is not one JSON object of strings.
    """
    if not path.is_file():
        return {}
    adapters = read_json_object(path)
    for name, folder in adapters.items():
        if not isinstance(folder, str):
            raise ConfigError(f"{path}: {shown(name)} is {shown(folder)}: must be a folder")
    return {name: str(Path(folder).expanduser().absolute()) for name, folder in adapters.items()}


def translate(arguments: Mapping[str, Any], adapters: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of EngineConfig that stand for vLLM's; `adapters` are those of multi_lora.json.

    Our own names pass as they are, but for null, which is vLLM's word for the default.

    Raises:
        ConfigError: an argument is unknown (the nearest known name is suggested), or asks for what we cannot do.
    """
    _check_names(arguments)
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in sorted(given.keys() & ACCEPTED_VALUES.keys()):
        _check_value(name, given)
    without_effect = sorted(given.keys() & (ACCEPTED_VALUES.keys() | WITHOUT_EFFECT))
    if without_effect:
        logger.info("model.json: accepted, without effect here: %s", ", ".join(without_effect))
    ours = {name: value for name, value in given.items() if name in EngineConfig.model_fields}
    if "dtype" in ours:
        ours["dtype"] = _dtype(ours["dtype"])
    if "kv_cache_dtype" in ours:
        ours["kv_cache_dtype"] = _kv_cache_dtype(ours["kv_cache_dtype"], ours.get("dtype"))
    if _plain(ours.get("max_model_len")) in _LONGEST_THAT_FITS:
        del ours["max_model_len"]
    if _is_true(_DISABLE_LOG_STATS, given):
        ours.setdefault("stats_interval_s", 0.0)
    if adapters:
        if ours.get("lora_modules"):
            raise ConfigError("lora_modules is set: must be left out where multi_lora.json names the adapters")
        ours["lora_modules"] = dict(adapters)
        ours["max_loras"] = _num_adapters_in_memory(given, len(adapters))
    return ours


def _check_names(arguments: Mapping[str, Any]) -> None:
    known = [*EngineConfig.model_fields, *_TRANSLATED, *ACCEPTED_VALUES, *sorted(WITHOUT_EFFECT)]
    for name in arguments:
        if name not in known:
            raise ConfigError(f"model.json: unknown field {shown(name)}{nearest_name(name, known)}")


def _check_value(name: str, given: Mapping[str, Any]) -> None:
    accepted = ACCEPTED_VALUES[name]
    plain = _plain(given[name])
    if plain is None or any(plain == each and type(plain) is type(each) for each in accepted.values):
        return
    found = "set" if name == _SECRET else shown(given[name])
    values = " or ".join(json.dumps(each) for each in accepted.values)
    raise ConfigError(f"{name} is {found}: must be {values or 'left out'} ({accepted.reason})")


def _is_true(name: str, given: Mapping[str, Any]) -> bool:
    plain = _plain(given.get(name))
    if plain is not None and not isinstance(plain, bool):
        raise ConfigError(f"{name} is {shown(given[name])}: must be true or false")
    return bool(plain)


def _num_adapters_in_memory(given: Mapping[str, Any], num_adapters: int) -> int:
    """Our max_loras for vLLM's, over which a request waits, where with us it is refused: room for all of them."""
    default = EngineConfig.model_fields["max_loras"].default
    room = {"max_loras": default, _MAX_CPU_LORAS: num_adapters, **given}
    return max(_whole_number(name, room[name]) for name in ("max_loras", _MAX_CPU_LORAS))


def _whole_number(name: str, value: Any) -> int:
    plain = _plain(value)
    if type(plain) is not int:
        raise ConfigError(f"{name} is {shown(value)}: must be an integer")
    return plain


def _plain(value: Any) -> Any:
    """Numbers, truth values and objects also come as text, in vLLM's samples; Python's spellings count as well."""
    if isinstance(value, str):
        if value.lower() in _WORDS:
            return _WORDS[value.lower()]
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _kv_cache_dtype(value: Any, dtype: Any) -> Any:
    """The weights' own type, which any device's cache can have, is auto with us."""
    ours = _KV_CACHE_DTYPES.get(value, value) if isinstance(value, str) else value
    return "auto" if ours == dtype else ours


def _dtype(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, str) else value
