"""EngineConfig: every engine argument, its unit, default and meaning. The only place where a default is written.

Names are vLLM's wherever the meaning is the same, so that a `model.json` of Triton's vLLM backend moves over.
`deepinfer config`, the command line's options and the check of `1/model.json` all come from these fields.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepinfer_backend.errors import ConfigError
from deepinfer_backend.speculative_config import SpeculativeConfig
from deepinfer_backend.validation import describe_validation_error, object_from_text


def _zero_overhead_scheduling_from_environment() -> bool:
    return os.environ.get("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "1") != "0"


_MAX_MEDIA_PER_PROMPT = {"image": 16, "video": 2}


class EngineConfig(BaseModel):
    """The arguments of one engine.

    Raises:
        ConfigError: a field is unknown (the nearest known name is suggested) or out of its range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(
        None,
        description="A folder in Hugging Face format, a hub id, or a .gguf file; none is the bundled model.",
    )
    tokenizer: str | None = Field(None, description="A folder or hub id of a tokenizer; none is the model's own.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights; auto is bfloat16 where the device computes it, else float32, and leaves those "
        "of 4 to 8 bits (GGUF, GPTQ, AWQ) as they are stored.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto",
        description="Type of keys and values in the KV cache; auto is that of the weights (on cpu float32 for float16) "
        "and the only one on cuda; int8 has a scale per token and head.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is cuda where there is one, else cpu.")
    data_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Engines, each with the whole model, that share its requests; on cuda each has its own device.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that compute each engine's model together, each with a share of its heads; on cuda each "
        "has a device of its own.",
    )
    num_prompt_engines: int = Field(
        0,
        ge=0,
        le=63,
        description="Of the data-parallel engines, those that only prefill: the others decode what these hand over, as "
        "KV blocks. 0: every engine does both.",
    )
    nnodes: int = Field(
        1,
        ge=1,
        le=64,
        description="Machines that compute the engine's model together, each with as many of the tensor-parallel "
        "ranks; this one, with Triton, is the first.",
    )
    master_addr: str | None = Field(
        None, description="With nnodes over 1: this machine's address, at which the ranks of the others find it."
    )
    master_port: int = Field(29500, ge=1, le=65_535, description="With nnodes over 1: the port for that.")
    data_parallel_lockstep: bool = Field(
        False,
        description="Let the data-parallel engines make the same number of steps, as one group: when one of them dies, "
        "all of them are started again.",
    )
    enable_expert_parallel: bool = Field(
        False,
        description="Give each of the data-parallel engines an equal share of a mixture-of-experts model's experts, "
        "and send tokens to where theirs are; the engines are in lockstep.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Tokens of prompt and output together; none is what model and KV cache allow."
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Sequences in one step.")
    max_num_batched_tokens: int = Field(
        2048, ge=1, le=1_048_576, description="Tokens in one step; longer prompts are prefilled in chunks."
    )
    block_size: int | None = Field(
        None, ge=1, le=1024, description="Tokens in one KV-cache block; none is 16 on cpu, 256 on cuda."
    )
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, description="KV-cache blocks, on any device; none is as many as the memory allows."
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of KV cache of each process; none is gpu_memory_utilization on cuda, a quarter of free "
        "memory for all on cpu.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0.0,
        le=1.0,
        description="Share of the CUDA device's memory for weights, work space and KV cache.",
    )
    enable_prefix_caching: bool = Field(True, description="Reuse KV blocks of prompts that begin alike.")
    max_consecutive_prefills: int = Field(
        2, ge=1, le=1024, description="Prefill steps in a row while sequences wait to decode."
    )
    prefill_attempt_interval: int = Field(
        1, ge=1, le=1024, description="Decode steps between two attempts to prefill waiting prompts."
    )
    speculative_config: SpeculativeConfig | None = Field(
        None,
        description="What proposes tokens, several of which one step verifies: an object with `method` (ngram, "
        "draft_model or mtp), `num_speculative_tokens`, and `prompt_lookup_min` and `prompt_lookup_max`, or `model`.",
    )
    zero_overhead_scheduling: bool = Field(
        default_factory=_zero_overhead_scheduling_from_environment,
        description="Report a decode step's tokens one step later and hide the host's work behind the device; "
        "DEEPINFER_ZERO_OVERHEAD_SCHEDULING=0 in the environment turns it off.",
    )
    seed: int = Field(0, ge=0, le=2**64 - 1, description="Seed of requests that bring none.")
    skip_tokenizer_init: bool = Field(
        False, description="Load no tokenizer: requests bring input_ids and get token_ids, with detokenize=false."
    )
    lora_modules: dict[str, str] = Field(
        default_factory=dict, description="Name → folder of each LoRA adapter (PEFT) that requests may ask for."
    )
    max_loras: int = Field(
        8, ge=1, le=1024, description="Adapters in memory; the one that was not used for longest is unloaded first."
    )
    max_lora_rank: int = Field(64, ge=1, le=4096, description="The highest rank of an adapter.")
    max_n: int = Field(64, ge=1, le=2**16, description="The most sequences (n) of one request.")
    max_beam_width: int = Field(16, ge=1, le=2**16, description="The most beams of one request.")
    max_logprobs: int = Field(20, ge=0, le=1024, description="The most logprobs and prompt_logprobs per token.")
    max_logit_bias_entries: int = Field(1024, ge=0, description="The most entries of a request's logit_bias.")
    max_stop_strings: int = Field(64, ge=0, le=1024, description="The most stop strings of a request.")
    max_bad_words: int = Field(64, ge=0, le=1024, description="The most bad_words of a request.")
    max_grammar_bytes: int = Field(
        65_536, ge=1, description="The largest schema, expression, list of choices or grammar, in UTF-8."
    )
    grammar_compile_timeout_s: float = Field(
        10.0, gt=0.0, le=3600.0, description="Seconds that compiling one grammar may take."
    )
    max_message_bytes: int = Field(
        1_048_576, ge=1, description="The largest messages, tools or chat_template_kwargs input, in UTF-8."
    )
    limit_mm_per_prompt: dict[str, int] = Field(
        default_factory=lambda: dict(_MAX_MEDIA_PER_PROMPT),
        description="The most images and videos of one request, by kind, such as "
        '`{"image": 16, "video": 2}`; a kind that is left out keeps its default.',
    )
    max_media_bytes: int = Field(
        268_435_456, ge=1, description="The largest images and videos of one request together, as they are sent."
    )
    max_image_pixels: int = Field(
        67_108_864, ge=1, description="The most pixels of an image, or of a video's frame; looked at before decoding."
    )
    max_video_frames: int = Field(36_000, ge=1, description="The most frames of a video.")
    num_video_frames: int = Field(
        32, ge=1, le=4096, description="Frames of a video that the model is shown, at equal distances; all, if fewer."
    )
    media_timeout_s: float = Field(
        30.0, gt=0.0, le=3600.0, description="Seconds that decoding and preprocessing a request's media may take."
    )
    num_media_workers: int = Field(
        2, ge=1, le=256, description="Processes of each engine that decode and preprocess media, at low priority."
    )
    max_queued_media_bytes: int = Field(
        1_073_741_824,
        ge=1,
        description="Bytes of media that may wait for these processes, more are refused at once; and of what they have "
        "made of media that is not computed yet.",
    )
    media_cache_bytes: int = Field(
        268_435_456, ge=0, description="Bytes of embeddings of images and videos that are kept, those used last."
    )
    max_engine_restarts: int = Field(
        5, ge=0, le=1000, description="Engine restarts within ten minutes before the model gives up."
    )
    max_queue_size: int = Field(
        1024,
        ge=0,
        description="Requests of one model that may wait for their first token; more are refused at once; "
        "0 is no limit.",
    )
    queue_timeout_s: float | None = Field(
        None,
        gt=0.0,
        description="Seconds that a request without a `queue_timeout` of its own may wait until a step begins to "
        "compute it; none is no limit.",
    )
    request_timeout_s: float | None = Field(
        None, gt=0.0, description="Seconds that a request without a `timeout` of its own may take; none is no limit."
    )
    default_priority: int = Field(
        0,
        ge=-(2**31) + 1,
        le=2**31 - 1,
        description="Of requests that bring none, or Triton's word for none: 0.",
    )
    priority_aging_s: float = Field(
        30.0,
        ge=0.0,
        description="Seconds of waiting worth one level of priority, so that none waits for ever; 0 is strict.",
    )
    step_timeout_s: float = Field(
        300.0, gt=0.0, description="Seconds that one step may take before the engine counts as stuck and is restarted."
    )
    enable_log_requests: bool = Field(False, description="Log each request's prompt and parameters as well.")
    otlp_traces_endpoint: str | None = Field(
        None,
        description="Where spans of traced requests go: an OpenTelemetry collector's address for OTLP over HTTP, "
        "such as http://localhost:4318/v1/traces.",
    )
    stats_interval_s: float = Field(
        10.0, ge=0.0, description="Seconds between two lines of statistics in the log; 0 turns them off."
    )

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _check_media_limits(cls, value: dict[str, int]) -> dict[str, int]:
        for kind, limit in value.items():
            if kind not in _MAX_MEDIA_PER_PROMPT or limit < 0:
                raise ValueError(f"{kind} is {limit}: must be 0 or more, of image or video")
        return {**_MAX_MEDIA_PER_PROMPT, **value}

    @field_validator("lora_modules", "speculative_config", "limit_mm_per_prompt", mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        return object_from_text(value)

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return value

    @model_validator(mode="before")
    @classmethod
    def _expert_parallel_is_in_lockstep(cls, fields: Any) -> Any:
        if fields.get("enable_expert_parallel") is True:
            return {"data_parallel_lockstep": True, **fields}
        return fields

    @model_validator(mode="after")
    def _check_prompt_engines(self) -> EngineConfig:
        if not self.num_prompt_engines:
            return self
        if self.num_prompt_engines >= self.data_parallel_size:
            raise ValueError(
                f"num_prompt_engines is {self.num_prompt_engines}: must be below data_parallel_size, "
                f"{self.data_parallel_size}"
            )
        if self.data_parallel_lockstep or self.tensor_parallel_size > 1:
            raise ValueError(
                f"num_prompt_engines is {self.num_prompt_engines}: must be 0 with data_parallel_lockstep or "
                "tensor_parallel_size over 1"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_experts(self) -> EngineConfig:
        if self.enable_expert_parallel:
            if self.data_parallel_size == 1:
                raise ValueError("enable_expert_parallel is true: data_parallel_size must be over 1")
            if not self.data_parallel_lockstep:
                raise ValueError("enable_expert_parallel is true: data_parallel_lockstep must be true, or left out")
            if self.tensor_parallel_size > 1 or self.lora_modules:
                raise ValueError(
                    "enable_expert_parallel is true: tensor_parallel_size must be 1 and lora_modules empty"
                )
        return self

    @model_validator(mode="after")
    def _check_machines(self) -> EngineConfig:
        if self.nnodes > 1:
            what = f"nnodes is {self.nnodes}"
            if self.tensor_parallel_size % self.nnodes:
                raise ValueError(f"{what}: tensor_parallel_size, {self.tensor_parallel_size}, must be a multiple of it")
            if self.data_parallel_size > 1:
                raise ValueError(f"{what}: data_parallel_size must be 1")
            if self.master_addr is None:
                raise ValueError(f"{what}: master_addr must say where the others find this machine")
        return self

    @model_validator(mode="after")
    def _check_shared_model(self) -> EngineConfig:
        if self.tensor_parallel_size > 1:
            size = f"tensor_parallel_size is {self.tensor_parallel_size}: must be 1"
            if self.lora_modules:
                raise ValueError(f"{size} with lora_modules")
            if self.speculative_config is not None and self.speculative_config.method == "mtp":
                raise ValueError(f'{size} with speculative_config.method "mtp"')
        return self

    @property
    def num_processes(self) -> int:
        """That compute on this machine."""
        return self.data_parallel_size * self.num_local_ranks

    @property
    def num_local_ranks(self) -> int:
        """Of each engine, on each machine."""
        return self.tensor_parallel_size // self.nnodes

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error, type(self).model_fields)) from None
