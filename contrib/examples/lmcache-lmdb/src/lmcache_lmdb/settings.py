"""Settings of one LMDB tier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from lmcache_core.settings.paths import AbsolutePath
from lmcache_core.settings.sizes import Size


class LmdbSettings(BaseModel):
    """`[l2.NAME] type = "lmdb"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: AbsolutePath = Field(description="The database file. Created if missing; several servers may share one.")
    map_bytes: Size = Field(
        default=64 << 30, ge=1 << 20, description="The most that the file may grow to; a store beyond it answers FULL."
    )
    sync: bool = Field(default=True, description="false: a power cut may cost the last objects, or the file.")
