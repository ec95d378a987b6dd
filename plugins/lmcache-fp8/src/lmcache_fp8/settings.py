"""Settings of the fp8 serde."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

GROUP_TOKENS_MAX = 65536  # more tokens than any chunk has: one scale for each head


class Fp8Settings(BaseModel):
    """How objects are quantised."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_tokens: int = Field(
        default=8,
        ge=1,
        le=GROUP_TOKENS_MAX,
        description="Tokens of one head that share a scale. Fewer: less error beside outlier tokens, more scales.",
    )
    kernel: Literal["auto", "native", "torch"] = Field(
        default="auto",
        description="Who computes: C or torch. Both give the same bytes; auto takes C where it was built.",
    )
