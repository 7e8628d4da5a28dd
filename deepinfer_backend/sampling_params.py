"""SamplingParams: how one request's tokens are chosen and when it ends. Valid once constructed."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepinfer_backend.errors import InvalidRequestError
from deepinfer_backend.validation import describe_validation_error

MAX_TOKENS_LIMIT = 1_048_576
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_024
MAX_STOP_TOKEN_IDS = 64

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SamplingParams(BaseModel):
    """vLLM's sampling parameters, by vLLM's names and meanings.

    Numbers and booleans may also come as strings ("2", "0.7", "false").

    Raises:
        InvalidRequestError: a field is unknown or out of its range; the message names field, value and limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    temperature: float = Field(
        1.0, ge=0.0, le=100.0, description="Divides the logits; 0 is greedy: always the likeliest token."
    )
    top_k: int = Field(0, ge=-1, le=2**31 - 1, description="Sample among the k likeliest tokens; 0 or -1 turns it off.")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Sample among the likeliest tokens that reach this share together."
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**64 - 1,
        description="The same seed gives the same tokens, alone or in any batch.",
    )
    max_tokens: int = Field(16, ge=1, le=MAX_TOKENS_LIMIT, description="The most new tokens.")
    min_tokens: int = Field(
        0, ge=0, le=MAX_TOKENS_LIMIT, description="No end token, stop token or stop string ends it sooner."
    )
    stop: list[str] = Field(
        default_factory=list,
        max_length=MAX_STOP_STRINGS,
        description="Strings that end the text; they are cut off, also where they span tokens.",
    )
    stop_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=MAX_STOP_TOKEN_IDS, description="Token ids that end the text."
    )
    ignore_eos: bool = Field(False, description="Go on past the model's own end tokens.")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidRequestError(describe_validation_error(error, type(self).model_fields)) from None

    @field_validator("stop", mode="before")
    @classmethod
    def _accept_one_string(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value]
        return [] if value is None else value

    @field_validator("stop")
    @classmethod
    def _check_stop_strings(cls, value: list[str]) -> list[str]:
        for text in value:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise ValueError(f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters")
            # JSON's \ud800 is one half of a character; no text ever contains it.
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise ValueError("each stop string must be valid Unicode")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _accept_none(cls, value: Any) -> Any:
        return [] if value is None else value

    @model_validator(mode="after")
    def _check_min_tokens(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}: must be at most max_tokens ({self.max_tokens})")
        return self
