"""Settings of one SQLite tier."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from lmcache_core.settings.sizes import Size


class SqliteSettings(BaseModel):
    """`[l2.NAME] type = "sqlite"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path = Field(description="The database file. Made when it is missing; several servers may share one.")
    file_bytes_max: Size | None = Field(
        default=None, description="A store that would make the file larger answers FULL. none: as large as it gets."
    )
