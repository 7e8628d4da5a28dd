"""What one request may cost and which names and token ids it may use: limits of the configuration and of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.grammar_spec import check_spec
from deepinfer_backend.engine.messages import EngineInfo
from deepinfer_backend.errors import InvalidRequestError, shown
from deepinfer_backend.media.medium import Medium
from deepinfer_backend.models.vision_families import KINDS
from deepinfer_backend.sampling_params import SamplingParams


def check_limits(params: SamplingParams, info: EngineInfo, config: EngineConfig) -> None:
    """Raises InvalidRequestError with the field, its value, the limit, and the name of the limit where it has one."""
    # First, since a client that asks for beams alone gets all of them: n is as many then.
    _check_number("beam_width", params.beam_width, "max_beam_width", config)
    _check_number("n", params.n, "max_n", config)
    _check_number("logprobs", params.logprobs, "max_logprobs", config)
    _check_number("prompt_logprobs", params.prompt_logprobs, "max_logprobs", config)
    _check_entries("logit_bias", len(params.logit_bias), "max_logit_bias_entries", config)
    _check_entries("stop", len(params.stop), "max_stop_strings", config)
    _check_entries("bad_words", len(params.bad_words), "max_bad_words", config)
    _check_token_ids("logit_bias", params.logit_bias, info)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), info)
    _check_token_ids("stop_token_ids", params.stop_token_ids, info)
    _check_lora_name(params.lora_name, config)
    if params.structured_outputs is not None:
        check_spec(params.structured_outputs, config)


def max_prompt_tokens(info: EngineInfo) -> int:
    """One less than a sequence may have."""
    return min(info.max_model_len, info.num_blocks * info.block_size) - 1


def check_prompt_length(num_tokens: int, info: EngineInfo) -> None:
    """Raises InvalidRequestError: it has no tokens, or more than model or KV cache take."""
    if num_tokens == 0:
        raise InvalidRequestError("the prompt has 0 tokens: must have at least 1")
    if num_tokens >= info.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens: must have at most {info.max_model_len - 1}, "
            f"one less than max_model_len ({info.max_model_len})"
        )
    if num_tokens > max_prompt_tokens(info):
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens: must have at most {max_prompt_tokens(info)}, one less than the "
            f"KV cache holds ({info.num_blocks} blocks of {info.block_size})"
        )


def check_media(media: Sequence[Medium], info: EngineInfo, config: EngineConfig) -> None:
    """Raises InvalidRequestError: the model does not take such media, or they are too many or too large."""
    for kind in KINDS:
        of_kind = [medium for medium in media if medium.kind == kind]
        if of_kind and kind not in info.modalities:
            raise InvalidRequestError(f"{of_kind[0].field} is set: must be left out, since this model takes no {kind}s")
        limit = config.limit_mm_per_prompt[kind]
        if len(of_kind) > limit:
            raise InvalidRequestError(
                f"{of_kind[0].field}: a prompt with {len(of_kind)} {kind}s: must have at most {limit} "
                "(limit_mm_per_prompt)"
            )
    if config.num_prompt_engines:
        raise InvalidRequestError(f"{media[0].field} is set: must be left out with num_prompt_engines over 0")
    num_bytes = sum(len(medium.data) for medium in media)
    if num_bytes > config.max_media_bytes:
        raise InvalidRequestError(
            f"{media[0].field}: media of {num_bytes} bytes: must have at most {config.max_media_bytes} "
            "(max_media_bytes)"
        )


def check_text(name: str, text: str, max_chars: int) -> None:
    """Raises InvalidRequestError: the text is too long, or has half a character, as JSON's \\ud800 is."""
    if len(text) > max_chars:
        raise InvalidRequestError(f"{name} has {len(text)} characters: must have at most {max_chars}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has {shown(text[error.start])} at {error.start}: must be valid Unicode"
        ) from None


def _check_number(name: str, value: int | None, limit_name: str, config: EngineConfig) -> None:
    limit = getattr(config, limit_name)
    if value is not None and value > limit:
        raise InvalidRequestError(f"{name} is {value}: must be at most {limit} ({limit_name})")


def _check_entries(name: str, num_entries: int, limit_name: str, config: EngineConfig) -> None:
    limit = getattr(config, limit_name)
    if num_entries > limit:
        raise InvalidRequestError(f"{name} has {num_entries} entries: must have at most {limit} ({limit_name})")


def _check_token_ids(name: str, token_ids: Iterable[int], info: EngineInfo) -> None:
    outside = next((token_id for token_id in token_ids if token_id >= info.vocab_size), None)
    if outside is not None:
        raise InvalidRequestError(
            f"{name} has {outside}: must be 0 to {info.vocab_size - 1}, the vocabulary's size less 1"
        )


def _check_lora_name(lora_name: str | None, config: EngineConfig) -> None:
    if lora_name is not None and lora_name not in config.lora_modules:
        known = ", ".join(map(repr, config.lora_modules))
        must = f"one of {known}" if known else "left out, since this model has no lora_modules"
        raise InvalidRequestError(f"lora_name is {shown(lora_name)}: must be {must}")
