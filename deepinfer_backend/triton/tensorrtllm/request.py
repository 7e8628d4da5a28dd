"""The interfaces of `tensorrt_llm` and `tensorrt_llm_bls`: Triton's tensors → GenerateRequest or CancelRequest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.chat import Chat
from deepinfer_backend.engine.messages import EngineInfo
from deepinfer_backend.errors import InvalidRequestError, shown
from deepinfer_backend.media.medium import from_object
from deepinfer_backend.triton.generate_request import CancelRequest, GenerateRequest, RequestParser
from deepinfer_backend.triton.request import RequestParameters, read_parameters
from deepinfer_backend.triton.tensorrtllm.inputs import BatchedInputs
from deepinfer_backend.triton.tensorrtllm.responses import TextResponses, TokenResponses, Wanted
from deepinfer_backend.triton.tensorrtllm.sampling import SamplingNames, read_sampling_params
from deepinfer_backend.triton.tensorrtllm.words import Words

_TOKEN_NAMES = SamplingNames(
    max_tokens="request_output_len", top_k="runtime_top_k", top_p="runtime_top_p", length_penalty="len_penalty"
)
_TEXT_NAMES = SamplingNames(max_tokens="max_tokens", top_k="top_k", top_p="top_p", length_penalty="length_penalty")

_CACHE_SALT = "cache_salt"
"""The one sampling field that is a parameter of the request here, since no tensor of this interface could say it."""

_NO_LOGITS = "logits are not given out"
_NO_PROMPT_TUNING = "prompt tuning is not supported"
_NO_LORA_UPLOAD = "an adapter is named when the server starts, in lora_modules"
_NO_ENCODER = "encoder-decoder models are not supported"
_NO_DRAFTS = "drafts from the client are not supported"
_NO_FEATURES = "images come as pixels, in image_bytes_input of tensorrt_llm_bls"
_NO_URL = "nothing is fetched: images come as pixels, in image_bytes_input"
_NO_TOP_P_DECAY = "top_p stays what it is"
_NO_RETENTION = "what the KV cache keeps cannot be chosen"
_NO_LOOKAHEAD = "lookahead decoding is not supported"

_UNSUPPORTED = {
    "return_context_logits": _NO_LOGITS,
    "return_generation_logits": _NO_LOGITS,
    "prompt_embedding_table": _NO_PROMPT_TUNING,
    "prompt_vocab_size": _NO_PROMPT_TUNING,
    "lora_weights": _NO_LORA_UPLOAD,
    "lora_config": _NO_LORA_UPLOAD,
}
_UNSUPPORTED_BESIDE_TOKENS = {
    **_UNSUPPORTED,
    "encoder_input_features": _NO_ENCODER,
    "encoder_output_lengths": _NO_ENCODER,
    "cross_attention_mask": _NO_ENCODER,
    "skip_cross_attn_blocks": _NO_ENCODER,
    "draft_input_ids": _NO_DRAFTS,
    "draft_logits": _NO_DRAFTS,
    "draft_acceptance_threshold": _NO_DRAFTS,
    "beam_search_diversity_rate": "beams are the likeliest ones",
    "prompt_table_extra_ids": _NO_PROMPT_TUNING,
    "mrope_rotary_cos_sin": _NO_FEATURES,
    "mrope_position_deltas": _NO_FEATURES,
    "context_phase_params": "prefill and decode are one engine's",
    "retention_token_range_starts": _NO_RETENTION,
    "retention_token_range_ends": _NO_RETENTION,
    "retention_token_range_priorities": _NO_RETENTION,
    "retention_token_range_durations_ms": _NO_RETENTION,
    "retention_decode_priority": _NO_RETENTION,
    "retention_decode_duration_ms": _NO_RETENTION,
    "lookahead_window_size": _NO_LOOKAHEAD,
    "lookahead_ngram_size": _NO_LOOKAHEAD,
    "lookahead_verification_set_size": _NO_LOOKAHEAD,
}
_UNSUPPORTED_BESIDE_TEXT = {
    **_UNSUPPORTED,
    "decoder_text_input": _NO_ENCODER,
    "prompt_table_extra_id": _NO_PROMPT_TUNING,
    "image_input": _NO_FEATURES,
    "image_url_input": _NO_URL,
    "num_draft_tokens": _NO_DRAFTS,
    "use_draft_logits": _NO_DRAFTS,
}
"""Inputs that must be left out, or be empty, zero or false; and why."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a model's config.pbtxt says about every request to it.

    `is_decoupled`: whether a request may have several responses. `excludes_input`: what a request means that does not
    say `exclude_input_in_output`.
    """

    is_decoupled: bool = True
    excludes_input: bool = False


class TensorrtLlmParser:
    """Reads the requests of `tensorrt_llm`: token ids in, token ids and text out."""

    def __init__(self, tokenizer: Any, info: EngineInfo, config: EngineConfig, options: ModelOptions) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._config = config
        self._options = options
        self._words = Words(tokenizer, config)

    def __call__(self, request: Any, request_id: str, client_request_id: str) -> GenerateRequest | CancelRequest:
        inputs = BatchedInputs(request)
        if inputs.boolean("stop"):
            if not client_request_id:
                raise InvalidRequestError("stop is true: the request must have the id of the request that is to stop")
            return CancelRequest(request_id, client_request_id)
        _refuse_unsupported(inputs, _UNSUPPORTED_BESIDE_TOKENS)
        _refuse_decoder_input(inputs)
        _refuse_top_p_decay(inputs)
        parameters = _read_parameters(request)
        prompt = _read_input_ids(inputs)
        biases = self._words.biases_of_vector("embedding_bias", inputs.vector("embedding_bias"))
        bad_words = self._words.bad_words("bad_words_list", inputs.word_list("bad_words_list"))
        params = read_sampling_params(
            inputs,
            _TOKEN_NAMES,
            stop=self._words.stop_words_of_token_ids("stop_words_list", inputs.word_list("stop_words_list")),
            bad_words=[],
            logit_bias=biases.added,
            eos_token_id=self._words.eos_token_id,
            cache_salt=parameters.sampling_fields.get(_CACHE_SALT),
            info=self._info,
            config=self._config,
        )
        stream = _read_stream(inputs, "streaming", self._options)
        wanted = _read_wanted(inputs, self._info)
        is_echoed = _is_echoed(inputs, stream, self._options)
        return GenerateRequest(
            request_id=request_id,
            client_request_id=client_request_id,
            prompt=prompt,
            sampling_params=params,
            build_tensors=TokenResponses(wanted, prompt if is_echoed else prompt[:0]),
            stream=stream,
            echo=self._text(prompt) if is_echoed else "",
            priority=parameters.priority,
            timeout_s=parameters.timeout_s,
            queue_timeout_s=parameters.queue_timeout_s,
            wants_logprobs=wanted.log_probs and params.beam_width == 1,  # a beam always has them
            wants_cumulative_logprob=wanted.log_probs,
            bad_words_token_ids=[*bad_words, *([token_id] for token_id in biases.banned)],
        )

    def _text(self, prompt: NDArray[np.int32]) -> str:
        if self._tokenizer is None or np.any((prompt < 0) | (prompt >= self._info.vocab_size)):
            return ""  # the input processor will tell what is wrong with the prompt
        return str(self._tokenizer.backend_tokenizer.decode(prompt.tolist(), skip_special_tokens=True))


class TensorrtLlmBlsParser:
    """Reads the requests of `tensorrt_llm_bls`: text in, text out."""

    def __init__(self, tokenizer: Any, info: EngineInfo, config: EngineConfig, options: ModelOptions) -> None:
        self._info = info
        self._config = config
        self._options = options
        self._words = Words(tokenizer, config)

    def __call__(self, request: Any, request_id: str, client_request_id: str) -> GenerateRequest | CancelRequest:
        inputs = BatchedInputs(request)
        _refuse_unsupported(inputs, _UNSUPPORTED_BESIDE_TEXT)
        parameters = _read_parameters(request)
        text = inputs.text("text_input")
        if text is None:
            raise InvalidRequestError("text_input is missing")
        stop_words = [word for word in inputs.texts("stop_words") if word]
        biases = self._words.biases_of_texts(
            "embedding_bias_words", inputs.texts("embedding_bias_words"), inputs.vector("embedding_bias_weights")
        )
        params = read_sampling_params(
            inputs,
            _TEXT_NAMES,
            stop=self._words.stop_words_of_texts("stop_words", stop_words),
            bad_words=[word for word in inputs.texts("bad_words") if word],
            logit_bias=biases.added,
            eos_token_id=self._words.eos_token_id,
            cache_salt=parameters.sampling_fields.get(_CACHE_SALT),
            info=self._info,
            config=self._config,
        )
        stream = _read_stream(inputs, "stream", self._options)
        wanted = _read_wanted(inputs, self._info)
        return GenerateRequest(
            request_id=request_id,
            client_request_id=client_request_id,
            prompt=_with_media(text, inputs),
            sampling_params=params,
            build_tensors=TextResponses(wanted),
            stream=stream,
            echo=text if _is_echoed(inputs, stream, self._options) else "",
            priority=parameters.priority,
            timeout_s=parameters.timeout_s,
            queue_timeout_s=parameters.queue_timeout_s,
            wants_logprobs=wanted.log_probs and params.beam_width == 1,  # a beam always has them
            wants_cumulative_logprob=wanted.log_probs,
            bad_words_token_ids=[[token_id] for token_id in biases.banned],
        )


def tensorrt_llm_interface(
    tokenizer: Any, info: EngineInfo, config: EngineConfig, *, options: ModelOptions
) -> RequestParser:
    """The WireInterface of `tensorrt_llm`."""
    return TensorrtLlmParser(tokenizer, info, config, options)


def tensorrt_llm_bls_interface(
    tokenizer: Any, info: EngineInfo, config: EngineConfig, *, options: ModelOptions
) -> RequestParser:
    """The WireInterface of `tensorrt_llm_bls`."""
    return TensorrtLlmBlsParser(tokenizer, info, config, options)


def _with_media(text: str, inputs: BatchedInputs) -> str | Chat:
    """With pixels: the user's turn of a conversation, as NVIDIA's preprocessing makes one of such a text."""
    images, video = inputs.pixels("image_bytes_input"), inputs.pixels("video_bytes_input")
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": from_object("image", f"image_bytes_input.{index}", image)}
        for index, image in enumerate(images)
    ]
    if len(video):
        parts.append({"type": "video", "video": from_object("video", "video_bytes_input", video)})
    if not parts:
        return text
    return Chat.from_objects([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])


def _read_parameters(request: Any) -> RequestParameters:
    parameters = read_parameters(request)
    for name in parameters.sampling_fields.keys() - {_CACHE_SALT}:
        raise InvalidRequestError(f"{shown(name)} is a parameter of the request: must be an input tensor or left out")
    return parameters


def _refuse_unsupported(inputs: BatchedInputs, unsupported: Mapping[str, str]) -> None:
    for name, reason in unsupported.items():
        if inputs.asks_for(name):
            raise InvalidRequestError(f"{name} is set: must be left out, empty, zero or false ({reason})")


def _refuse_decoder_input(inputs: BatchedInputs) -> None:
    """The preprocessing model sends one padding token where there is no decoder's input."""
    num_tokens = max(inputs.vector("decoder_input_ids").size, inputs.integer("decoder_input_lengths") or 0)
    if num_tokens > 1:
        raise InvalidRequestError(f"decoder_input_ids has {num_tokens} tokens: must be left out ({_NO_ENCODER})")


def _refuse_top_p_decay(inputs: BatchedInputs) -> None:
    """Without decay its floor and the tokens that reset it mean nothing, and may be anything."""
    name = "runtime_top_p_decay"
    decay = inputs.number(name)
    if decay not in (None, 0.0, 1.0):
        raise InvalidRequestError(f"{name} is {decay}: must be left out or 1 ({_NO_TOP_P_DECAY})")


def _read_input_ids(inputs: BatchedInputs) -> NDArray[np.int32]:
    token_ids = inputs.vector("input_ids").astype(np.int32)
    length = inputs.integer("input_lengths")
    if length is None:
        return token_ids
    if not 0 <= length <= len(token_ids):
        raise InvalidRequestError(f"input_lengths is {length}: must be at most {len(token_ids)}, those in input_ids")
    return token_ids[:length]


def _read_stream(inputs: BatchedInputs, name: str, options: ModelOptions) -> bool:
    stream = inputs.boolean(name) or False
    if stream and not options.is_decoupled:
        raise InvalidRequestError(
            f"{name} is true: must be false, since config.pbtxt says model_transaction_policy {{ decoupled: false }}"
        )
    return stream


def _is_echoed(inputs: BatchedInputs, stream: bool, options: ModelOptions) -> bool:
    excluded = inputs.boolean("exclude_input_in_output")
    return not stream and not (options.excludes_input if excluded is None else excluded)


def _read_wanted(inputs: BatchedInputs, info: EngineInfo) -> Wanted:
    return Wanted(
        log_probs=inputs.boolean("return_log_probs") or False,
        perf_metrics=inputs.boolean("return_perf_metrics") or False,
        num_input_tokens=inputs.boolean("return_num_input_tokens") or False,
        num_output_tokens=inputs.boolean("return_num_output_tokens") or False,
        block_size=info.block_size,
    )
