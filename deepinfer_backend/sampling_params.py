"""SamplingParams: how one request's tokens are chosen and when it ends. Valid once constructed.

What a request may cost (how many sequences, logprobs, biases …) is limited by `EngineConfig`, and checked by
`InputProcessor` together with what depends on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.validation import describe_validation_error, object_from_text

MAX_TOKENS_LIMIT = 1_048_576
MAX_STOP_STRING_CHARS = 1_024
MAX_STOP_TOKEN_IDS = 64

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
# Strings in these lists must be texts that a tokenizer can read.
Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]


class StructuredOutputs(BaseModel):
    """What form the text must have; exactly one of the fields is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: str | dict[str, Any] | bool | None = Field(
        None, alias="json", description="A JSON schema, as an object or as a string."
    )
    json_object: bool = Field(False, description="Any JSON object.")
    regex: str | None = Field(None, min_length=1, description="A regular expression that the whole text matches.")
    choice: list[Text] | None = Field(None, min_length=1, description="One of these texts.")
    grammar: str | None = Field(None, min_length=1, description="An EBNF grammar whose start rule is `root`.")

    @model_validator(mode="after")
    def _check_exactly_one(self) -> StructuredOutputs:
        given = [name for name, value in self.model_dump(by_alias=True).items() if value not in (None, False)]
        # A schema that is `false` allows nothing; it counts as one that was given.
        if self.json_schema is False:
            given.append("json")
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"must set exactly one of json, json_object, regex, choice and grammar, not {found}")
        return self


def _dump_structured_outputs(value: StructuredOutputs | None) -> dict[str, Any] | None:
    return None if value is None else value.model_dump(by_alias=True, exclude_defaults=True)


class SamplingParams(BaseModel):
    """vLLM's sampling parameters, by vLLM's names and meanings.

    Numbers and booleans may also come as strings ("2", "0.7", "false").

    Raises:
        InvalidRequestError: a field is unknown or out of its range; the message names field, value and limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    n: int = Field(1, ge=1, le=2**16, description="How many sequences to generate from the prompt.")
    temperature: float = Field(
        1.0, ge=0.0, le=100.0, description="Divides the logits; 0 is greedy: always the likeliest token."
    )
    top_k: int = Field(0, ge=-1, le=2**31 - 1, description="Sample among the k likeliest tokens; 0 or -1 turns it off.")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Sample among the likeliest tokens that reach this share together."
    )
    min_p: float = Field(
        0.0, ge=0.0, le=1.0, description="Sample among tokens at least this share as likely as the likeliest; 0 is off."
    )
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Taken from the logit of every token that is in the output already."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Taken from a token's logit once for each time that it is in the output."
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0.0,
        le=100.0,
        description="Divides the logit (multiplies a negative one) of every token of prompt and output; 1 is off.",
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**64 - 1,
        description="The same seed gives the same tokens, alone or in any batch. "
        "Sequence i of several counts as one of seed + i.",
    )
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict, description="Token id → what is added to its logit.")
    bad_words: list[Text] = Field(
        default_factory=list, description="Texts that the output must not contain, as tokens: with or without a space."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, description="Sample no other tokens than these."
    )
    max_tokens: int = Field(16, ge=1, le=MAX_TOKENS_LIMIT, description="The most new tokens.")
    min_tokens: int = Field(
        0, ge=0, le=MAX_TOKENS_LIMIT, description="No end token, stop token or stop string ends it sooner."
    )
    stop: list[Text] = Field(
        default_factory=list,
        description="Strings that end the text; they are cut off, also where they span tokens.",
    )
    stop_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=MAX_STOP_TOKEN_IDS, description="Token ids that end the text."
    )
    ignore_eos: bool = Field(False, description="Go on past the model's own end tokens.")
    include_stop_str_in_output: bool = Field(False, description="Leave the stop string in the text.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = Field(
        True, description="Where special tokens are shown, put a space between two of them if the tokenizer would."
    )
    detokenize: bool = Field(True, description="Make text of the tokens; false leaves text_output empty.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep only the prompt's last tokens; -1 keeps as many as fit."
    )
    logprobs: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Report the log-probability of each token and of the k likeliest."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=2**31 - 1, description="The same for each token of the prompt but the first."
    )
    structured_outputs: Annotated[StructuredOutputs | None, PlainSerializer(_dump_structured_outputs)] = Field(
        None, description="What form the text must have: one of json, json_object, regex, choice and grammar."
    )
    beam_width: int = Field(
        1,
        ge=1,
        le=2**16,
        description="Over 1: beam search, the n best of so many beams. Not streaming; nothing is left to chance.",
    )
    length_penalty: float = Field(
        1.0, ge=-100.0, le=100.0, description="A beam's score is its log-probability over its length to this power."
    )
    early_stopping: bool | Literal["never"] = Field(
        False,
        description="Whether beam search ends once beam_width beams have ended; false ends it when a better one is "
        "unlikely, never when it is impossible.",
    )
    lora_name: str | None = Field(None, min_length=1, description="The LoRA adapter to use; none is the base model.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Cached prefixes are shared only by requests of the same salt; those without one share theirs.",
    )

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidRequestError(describe_validation_error(error, type(self).model_fields)) from None

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The same with a model's own defaults for the fields that were not given."""
        missing = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        if not missing:
            return self
        return SamplingParams(**{**self.model_dump(exclude_unset=True), **missing})

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _accept_one_string(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value]
        return [] if value is None else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _accept_none_as_no_tokens(cls, value: Any) -> Any:
        return [] if value is None else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _accept_none_as_no_bias(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("structured_outputs", "logit_bias", mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        return object_from_text(value)

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncation(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be -1 or at least 1")
        return value

    @model_validator(mode="after")
    def _check_min_tokens(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}: must be at most max_tokens ({self.max_tokens})")
        return self

    @model_validator(mode="after")
    def _check_text_is_made(self) -> SamplingParams:
        if self.stop and not self.detokenize:
            raise ValueError("detokenize is false: must be true when stop is set")
        return self

    @model_validator(mode="after")
    def _check_structured_outputs(self) -> SamplingParams:
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError("ignore_eos is true: must be false when structured_outputs is set")
        return self

    @model_validator(mode="after")
    def _check_beam_search(self) -> SamplingParams:
        if self.beam_width == 1:
            return self
        if self.n > self.beam_width:
            raise ValueError(f"n is {self.n}: must be at most beam_width ({self.beam_width})")
        for name in ("stop", "structured_outputs", "logprobs", "prompt_logprobs"):
            if getattr(self, name) not in (None, []):
                raise ValueError(f"{name} is set: must be left out when beam_width is over 1")
        return self
