"""Settings of the three serdes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

GROUP_TOKENS_MAX = 65536  # more tokens than any chunk has


class QuantSettings(BaseModel):
    """How objects are quantised."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_tokens: int = Field(
        default=64,
        ge=1,
        le=GROUP_TOKENS_MAX,
        description="Tokens over which a channel of keys has one step. Fewer: less error, more bytes.",
    )
