"""Settings of the two serdes. None of them affects decoding, so all may change between two runs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

SHUFFLE = "Put the bytes of equal weight together first (sign and exponent compress, mantissas do not)."


class ZstdSettings(BaseModel):
    """How zstd compresses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: int = Field(
        default=0,
        ge=0,
        le=19,
        description="0: made for KV, entropy coding with hardly a search for repetitions; 1 to 19: zstd's own levels.",
    )
    shuffle: bool = Field(default=True, description=SHUFFLE)


class Lz4Settings(BaseModel):
    """How lz4 compresses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: int = Field(
        default=0, ge=0, le=12, description="0: fast; 1 to 12: high compression, slower to encode, as quick to decode."
    )
    shuffle: bool = Field(default=True, description=SHUFFLE)
