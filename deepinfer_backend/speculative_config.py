"""SpeculativeConfig: what proposes tokens for a step to verify. Names are those of vLLM's `speculative_config`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_SPECULATIVE_TOKENS = 16


class SpeculativeConfig(BaseModel):
    """One drafter and its limits; as in vLLM, of prompt_lookup_min and prompt_lookup_max one alone stands for both."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["ngram", "draft_model", "mtp"] = Field(
        description="ngram: what followed when the last tokens stood there before; draft_model: what `model` says; "
        "mtp: what a multi-token-prediction module of the model says."
    )
    num_speculative_tokens: int = Field(
        ge=1, le=MAX_SPECULATIVE_TOKENS, description="Drafts that one step verifies for a sequence, at most."
    )
    prompt_lookup_min: int | None = Field(None, ge=1, le=1024, description="Last tokens that must occur earlier; 5.")
    prompt_lookup_max: int | None = Field(None, ge=1, le=1024, description="Last tokens that are compared; 5.")
    model: str | None = Field(
        None,
        description="Of draft_model: a folder, file or hub id, of the same vocabulary. Of mtp: a folder with the "
        "module, if it is neither in the model's own nor comes with this package, as the bundled model's does.",
    )

    @property
    def min_ngram(self) -> int:
        return self.prompt_lookup_min or self.prompt_lookup_max or _DEFAULT_NGRAM

    @property
    def max_ngram(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or _DEFAULT_NGRAM

    @property
    def has_own_mtp_layer(self) -> bool:
        """Whether the model's own checkpoint has the module."""
        return self.method == "mtp" and self.model is None

    @model_validator(mode="after")
    def _check_order(self) -> SpeculativeConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"prompt_lookup_min is {self.min_ngram}: must be at most prompt_lookup_max, which is {self.max_ngram}"
            )
        return self

    @model_validator(mode="after")
    def _check_fields_of_the_method(self) -> SpeculativeConfig:
        if self.method == "draft_model" and self.model is None:
            raise ValueError("model: must name the smaller model when method is draft_model")
        if self.method == "ngram" and self.model is not None:
            raise ValueError(f"model is {self.model!r}: must be left out when method is ngram")
        given = self.prompt_lookup_min or self.prompt_lookup_max
        if self.method != "ngram" and given:
            raise ValueError(f"prompt_lookup_min and prompt_lookup_max: must be left out when method is {self.method}")
        return self


_DEFAULT_NGRAM = 5
