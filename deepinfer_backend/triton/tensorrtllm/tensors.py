"""The tensors of the five models that a repository of Triton's TensorRT-LLM backend has, as its clients know them.

Every model has a batch dimension in front of these dims, which is 1: one prompt in a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer_backend.triton.model_config import TensorSpec


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """All that one model takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def _scalars(data_type: str, names: Iterable[str]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, data_type, [1]) for name in names)


_RETURN_INPUTS = _scalars(
    "TYPE_BOOL",
    (
        "return_log_probs",
        "return_context_logits",
        "return_generation_logits",
        "return_perf_metrics",
        "return_num_input_tokens",
        "return_num_output_tokens",
    ),
)

# What all three models that generate take under the same names; min_length and random_seed are older names.
_GENERATION_INPUTS = (
    *_scalars("TYPE_INT32", ("num_return_sequences", "beam_width", "end_id", "pad_id", "min_tokens", "min_length")),
    *_scalars("TYPE_FP32", ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")),
    *_scalars("TYPE_UINT64", ("seed", "random_seed")),
    *_scalars("TYPE_BOOL", ("exclude_input_in_output",)),
    *_RETURN_INPUTS,
    TensorSpec("prompt_embedding_table", "TYPE_FP16", [-1, -1]),
    TensorSpec("prompt_vocab_size", "TYPE_INT32", [1]),
    TensorSpec("lora_task_id", "TYPE_UINT64", [1]),
    TensorSpec("lora_weights", "TYPE_FP16", [-1, -1]),
    TensorSpec("lora_config", "TYPE_INT32", [-1, 3]),
    TensorSpec("guided_decoding_guide_type", "TYPE_STRING", [1]),
    TensorSpec("guided_decoding_guide", "TYPE_STRING", [1]),
)

_TEXT_INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", [1], is_optional=False),
    TensorSpec("decoder_text_input", "TYPE_STRING", [1]),
    TensorSpec("max_tokens", "TYPE_INT32", [1], is_optional=False),
    TensorSpec("bad_words", "TYPE_STRING", [-1]),
    TensorSpec("stop_words", "TYPE_STRING", [-1]),
    TensorSpec("top_k", "TYPE_INT32", [1]),
    TensorSpec("top_p", "TYPE_FP32", [1]),
    TensorSpec("length_penalty", "TYPE_FP32", [1]),
    TensorSpec("stream", "TYPE_BOOL", [1]),
    TensorSpec("prompt_table_extra_id", "TYPE_UINT64", [1]),
    TensorSpec("embedding_bias_words", "TYPE_STRING", [-1]),
    TensorSpec("embedding_bias_weights", "TYPE_FP32", [-1]),
    *_GENERATION_INPUTS,
)

# What all three models that generate give; context_logits and generation_logits are never sent.
_GENERATION_OUTPUTS = (
    TensorSpec("cum_log_probs", "TYPE_FP32", [-1]),
    TensorSpec("output_log_probs", "TYPE_FP32", [-1, -1]),
    TensorSpec("context_logits", "TYPE_FP32", [-1, -1]),
    TensorSpec("generation_logits", "TYPE_FP32", [-1, -1, -1]),
    *_scalars(
        "TYPE_INT32",
        (
            "batch_index",
            "sequence_index",
            "kv_cache_alloc_new_blocks",
            "kv_cache_reused_blocks",
            "kv_cache_alloc_total_blocks",
        ),
    ),
    *_scalars(
        "TYPE_INT64",
        ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    ),
    *_scalars("TYPE_FP32", ("acceptance_rate",)),
    *_scalars(
        "TYPE_INT32",
        ("total_accepted_draft_tokens", "total_draft_tokens", "num_input_tokens", "num_output_tokens"),
    ),
)

_TEXT_OUTPUTS = (TensorSpec("text_output", "TYPE_STRING", [-1]), *_GENERATION_OUTPUTS)

PREPROCESSING = ModelTensors(
    inputs=(
        TensorSpec("QUERY", "TYPE_STRING", [1], is_optional=False),
        TensorSpec("DECODER_QUERY", "TYPE_STRING", [1]),
        TensorSpec("IMAGE_BYTES", "TYPE_UINT8", [-1, -1, -1, -1]),
        TensorSpec("IMAGE_URL", "TYPE_STRING", [1]),
        TensorSpec("IMAGES", "TYPE_STRING", [-1]),
        TensorSpec("VIDEO_BYTES", "TYPE_UINT8", [-1, -1, -1, -1]),
        TensorSpec("REQUEST_OUTPUT_LEN", "TYPE_INT32", [1], is_optional=False),
        TensorSpec("BAD_WORDS_DICT", "TYPE_STRING", [-1]),
        TensorSpec("STOP_WORDS_DICT", "TYPE_STRING", [-1]),
        TensorSpec("EMBEDDING_BIAS_WORDS", "TYPE_STRING", [-1]),
        TensorSpec("EMBEDDING_BIAS_WEIGHTS", "TYPE_FP32", [-1]),
        TensorSpec("END_ID", "TYPE_INT32", [1]),
        TensorSpec("PAD_ID", "TYPE_INT32", [1]),
        TensorSpec("PROMPT_TABLE_EXTRA_ID", "TYPE_UINT64", [1]),
    ),
    outputs=(
        TensorSpec("INPUT_ID", "TYPE_INT32", [-1]),
        TensorSpec("REQUEST_INPUT_LEN", "TYPE_INT32", [1]),
        TensorSpec("DECODER_INPUT_ID", "TYPE_INT32", [-1]),
        TensorSpec("REQUEST_DECODER_INPUT_LEN", "TYPE_INT32", [1]),
        TensorSpec("BAD_WORDS_IDS", "TYPE_INT32", [2, -1]),
        TensorSpec("STOP_WORDS_IDS", "TYPE_INT32", [2, -1]),
        TensorSpec("EMBEDDING_BIAS", "TYPE_FP32", [-1]),
        TensorSpec("REQUEST_OUTPUT_LEN", "TYPE_INT32", [-1]),
        TensorSpec("OUT_END_ID", "TYPE_INT32", [1]),
        TensorSpec("OUT_PAD_ID", "TYPE_INT32", [1]),
        TensorSpec("OUT_PROMPT_TABLE_EXTRA_IDS", "TYPE_UINT64", [-1]),
        TensorSpec("PIXEL_VALUES", "TYPE_FP16", [-1, -1, -1, -1]),
        TensorSpec("ASPECT_RATIO_IDS", "TYPE_INT64", [-1]),
        TensorSpec("ASPECT_RATIO_MASK", "TYPE_INT64", [-1, -1]),
        TensorSpec("CROSS_ATTENTION_MASK", "TYPE_INT64", [-1, -1, -1]),
        TensorSpec("IMAGE_SIZES", "TYPE_INT64", [-1, 2]),
        TensorSpec("IS_VIDEO_INPUT", "TYPE_BOOL", [1]),
        TensorSpec("ATTENTION_MASK", "TYPE_INT64", [-1]),
        TensorSpec("IMAGE_GRID_THW", "TYPE_INT64", [3]),
        TensorSpec("VISION_INPUT_ID", "TYPE_INT32", [-1]),
    ),
)

# No input has to be there: a request with `stop` needs no other.
TENSORRT_LLM = ModelTensors(
    inputs=(
        TensorSpec("input_ids", "TYPE_INT32", [-1]),
        TensorSpec("input_lengths", "TYPE_INT32", [1]),
        TensorSpec("request_output_len", "TYPE_INT32", [1]),
        TensorSpec("encoder_input_features", "TYPE_FP16", [-1, -1]),
        TensorSpec("encoder_output_lengths", "TYPE_INT32", [1]),
        TensorSpec("draft_input_ids", "TYPE_INT32", [-1]),
        TensorSpec("decoder_input_ids", "TYPE_INT32", [-1]),
        TensorSpec("decoder_input_lengths", "TYPE_INT32", [1]),
        TensorSpec("draft_logits", "TYPE_FP32", [-1, -1]),
        TensorSpec("draft_acceptance_threshold", "TYPE_FP32", [1]),
        TensorSpec("stop_words_list", "TYPE_INT32", [2, -1]),
        TensorSpec("bad_words_list", "TYPE_INT32", [2, -1]),
        TensorSpec("embedding_bias", "TYPE_FP32", [-1]),
        TensorSpec("runtime_top_k", "TYPE_INT32", [1]),
        *_scalars("TYPE_FP32", ("runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay")),
        TensorSpec("runtime_top_p_reset_ids", "TYPE_INT32", [1]),
        TensorSpec("len_penalty", "TYPE_FP32", [1]),
        TensorSpec("early_stopping", "TYPE_BOOL", [1]),
        TensorSpec("beam_search_diversity_rate", "TYPE_FP32", [1]),
        TensorSpec("stop", "TYPE_BOOL", [1]),
        TensorSpec("streaming", "TYPE_BOOL", [1]),
        TensorSpec("prompt_table_extra_ids", "TYPE_UINT64", [-1]),
        TensorSpec("cross_attention_mask", "TYPE_BOOL", [-1, -1]),
        TensorSpec("mrope_rotary_cos_sin", "TYPE_FP32", [-1]),
        TensorSpec("mrope_position_deltas", "TYPE_INT64", [1]),
        TensorSpec("context_phase_params", "TYPE_UINT8", [-1]),
        TensorSpec("skip_cross_attn_blocks", "TYPE_BOOL", [1]),
        TensorSpec("retention_token_range_starts", "TYPE_INT32", [-1]),
        TensorSpec("retention_token_range_ends", "TYPE_INT32", [-1]),
        TensorSpec("retention_token_range_priorities", "TYPE_INT32", [-1]),
        TensorSpec("retention_token_range_durations_ms", "TYPE_INT32", [-1]),
        *_scalars(
            "TYPE_INT32",
            (
                "retention_decode_priority",
                "retention_decode_duration_ms",
                "lookahead_window_size",
                "lookahead_ngram_size",
                "lookahead_verification_set_size",
            ),
        ),
        *_GENERATION_INPUTS,
    ),
    outputs=(
        TensorSpec("output_ids", "TYPE_INT32", [-1, -1]),
        TensorSpec("sequence_length", "TYPE_INT32", [-1]),
        TensorSpec("context_phase_params", "TYPE_UINT8", [-1]),
        # Ours: the exact text of what is new. Tokens alone, a few at a time, cannot be turned into it.
        *_TEXT_OUTPUTS,
    ),
)

POSTPROCESSING = ModelTensors(
    inputs=(
        TensorSpec("TOKENS_BATCH", "TYPE_INT32", [-1, -1], is_optional=False),
        TensorSpec("SEQUENCE_LENGTH", "TYPE_INT32", [-1], is_optional=False),
    ),
    outputs=(TensorSpec("OUTPUT", "TYPE_STRING", [-1]),),
)

ENSEMBLE = ModelTensors(inputs=_TEXT_INPUTS, outputs=_TEXT_OUTPUTS)

TENSORRT_LLM_BLS = ModelTensors(
    inputs=(
        *_TEXT_INPUTS,
        TensorSpec("image_input", "TYPE_FP16", [-1, 3, -1, -1]),
        TensorSpec("image_bytes_input", "TYPE_UINT8", [-1, -1, -1, -1]),
        TensorSpec("image_url_input", "TYPE_STRING", [1]),
        TensorSpec("video_bytes_input", "TYPE_UINT8", [-1, -1, -1, -1]),
        TensorSpec("num_draft_tokens", "TYPE_INT32", [1]),
        TensorSpec("use_draft_logits", "TYPE_BOOL", [1]),
    ),
    outputs=_TEXT_OUTPUTS,
)
