"""What a request says about sampling, in the tensors of the TensorRT-LLM backend → SamplingParams, with its defaults.

Nothing is left to the model's generation_config but its end tokens: without a word about sampling the answer is greedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer_backend.config import EngineConfig
from deepinfer_backend.engine.messages import EngineInfo
from deepinfer_backend.errors import InvalidRequestError, shown
from deepinfer_backend.sampling_params import MAX_TOKENS_LIMIT, SamplingParams
from deepinfer_backend.triton.tensorrtllm.inputs import BatchedInputs
from deepinfer_backend.triton.tensorrtllm.words import StopWords

_DEFAULT_TEMPERATURE = 1.0
_DEFAULT_SEED = 0
_DEFAULT_LENGTH_PENALTY = 0.0
_NO_END_ID = -1


@dataclass(frozen=True, slots=True)
class SamplingNames:
    """Where the models differ in what they call the same thing."""

    max_tokens: str
    top_k: str
    top_p: str
    length_penalty: str


@dataclass(frozen=True, slots=True)
class _Choice:
    """How one token is chosen; temperature 0 is greedy."""

    temperature: float
    top_k: int
    top_p: float


def read_sampling_params(
    inputs: BatchedInputs,
    names: SamplingNames,
    *,
    stop: StopWords,
    bad_words: list[str],
    logit_bias: dict[int, float],
    eos_token_id: int | None,
    cache_salt: Any,
    info: EngineInfo,
    config: EngineConfig,
) -> SamplingParams:
    """`eos_token_id`: the tokenizer's. Clients that send it as `end_id` mean the model's own end, all of it.

    Raises:
        InvalidRequestError: the message names the field, the value and the limit.
    """
    beam_width = inputs.integer("beam_width") or 1
    choice = _read_choice(inputs, names, beam_width)
    structured_outputs = _read_guide(inputs)
    stop_token_ids = list(stop.token_ids)
    end_id = _read_end_id(inputs, info)
    if end_id is not None:
        stop_token_ids.append(end_id)
    seed = _either(inputs, "seed", "random_seed")
    length_penalty = inputs.number(names.length_penalty)
    early_stopping = inputs.boolean("early_stopping")
    return SamplingParams(
        n=inputs.integer("num_return_sequences") or beam_width,
        beam_width=beam_width,
        length_penalty=_DEFAULT_LENGTH_PENALTY if length_penalty is None else length_penalty,
        early_stopping=True if early_stopping is None else early_stopping,
        temperature=choice.temperature,
        top_k=choice.top_k,
        top_p=choice.top_p,
        min_p=0.0,
        seed=_DEFAULT_SEED if seed is None else seed,
        # 0 is no penalty that could be meant: it is what clients send for none.
        repetition_penalty=inputs.number("repetition_penalty") or 1.0,
        presence_penalty=inputs.number("presence_penalty") or 0.0,
        frequency_penalty=inputs.number("frequency_penalty") or 0.0,
        max_tokens=_read_max_tokens(inputs, names.max_tokens),
        min_tokens=_either(inputs, "min_tokens", "min_length") or 0,
        stop=stop.texts,
        stop_token_ids=stop_token_ids,
        # A grammar lets the text end with the model's own end tokens only; end_id is one more then.
        ignore_eos=end_id not in (None, eos_token_id) and structured_outputs is None,
        bad_words=bad_words,
        logit_bias=logit_bias,
        structured_outputs=structured_outputs,
        lora_name=_read_lora_name(inputs, config),
        cache_salt=cache_salt,
        detokenize=not config.skip_tokenizer_init,
    )


def _read_max_tokens(inputs: BatchedInputs, name: str) -> int:
    max_tokens = inputs.integer(name)
    if max_tokens is None:
        raise InvalidRequestError(f"{name} is missing: must be 1 to {MAX_TOKENS_LIMIT}")
    if not 1 <= max_tokens <= MAX_TOKENS_LIMIT:
        raise InvalidRequestError(f"{name} is {max_tokens}: must be 1 to {MAX_TOKENS_LIMIT}")
    return max_tokens


def _read_choice(inputs: BatchedInputs, names: SamplingNames, beam_width: int) -> _Choice:
    temperature, top_k, top_p = (
        inputs.number("temperature"),
        inputs.integer(names.top_k) or 0,
        inputs.number(names.top_p),
    )
    if temperature is None:
        temperature = _DEFAULT_TEMPERATURE
    if not temperature >= 0.0:
        raise InvalidRequestError(f"temperature is {temperature}: must be at least 0")
    if beam_width > 1 and temperature not in (0.0, _DEFAULT_TEMPERATURE):
        raise InvalidRequestError(
            f"temperature is {temperature}: must be {_DEFAULT_TEMPERATURE} (or left out) when beam_width is over 1"
        )
    if top_k < 0:
        raise InvalidRequestError(f"{names.top_k} is {top_k}: must be at least 0")
    if top_p is None or top_p <= 0.0:
        # Without either of the two it takes the likeliest token, whatever the temperature.
        top_k, top_p = top_k or 1, 1.0
    if top_k == 1:
        return _Choice(temperature=0.0, top_k=0, top_p=1.0)
    return _Choice(temperature, top_k, top_p)


def _read_end_id(inputs: BatchedInputs, info: EngineInfo) -> int | None:
    """The one token that ends the text instead of the model's own end tokens; None leaves it to those."""
    end_id = inputs.integer("end_id")
    if end_id is None or end_id == _NO_END_ID:
        return None
    if not 0 <= end_id < info.vocab_size:
        raise InvalidRequestError(
            f"end_id is {end_id}: must be 0 to {info.vocab_size - 1}, or {_NO_END_ID} for the model's own end tokens"
        )
    return end_id


def _read_guide(inputs: BatchedInputs) -> dict[str, Any] | None:
    """The value of `structured_outputs`."""
    guide_type, guide = inputs.text("guided_decoding_guide_type"), inputs.text("guided_decoding_guide")
    if not guide_type:
        if guide:
            raise InvalidRequestError("guided_decoding_guide is set: must be left out without a guide type")
        return None
    if guide_type == "json":
        return {"json_object": True}
    fields = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
    if guide_type not in fields:
        known = ", ".join(["json", *fields])
        raise InvalidRequestError(f"guided_decoding_guide_type is {shown(guide_type)}: must be one of {known}")
    if not guide:
        raise InvalidRequestError(f"guided_decoding_guide is missing: must be set for the type {guide_type}")
    return {fields[guide_type]: guide}


def _read_lora_name(inputs: BatchedInputs, config: EngineConfig) -> str | None:
    """An adapter with a number for its name is the one of that task."""
    task_id = inputs.integer("lora_task_id")
    if task_id is None:
        return None
    numbered = [name for name in config.lora_modules if name.isdecimal()]
    if str(task_id) not in numbered:
        known = f"one of {', '.join(numbered)}" if numbered else "left out"
        raise InvalidRequestError(
            f"lora_task_id is {task_id}: must be {known} (the names in lora_modules that are a number)"
        )
    return str(task_id)


def _either(inputs: BatchedInputs, name: str, older_name: str) -> int | None:
    value, older = inputs.integer(name), inputs.integer(older_name)
    if value is not None and older is not None and value != older:
        raise InvalidRequestError(f"{older_name} is {older}: must be left out beside {name}, its newer name")
    return older if value is None else value
