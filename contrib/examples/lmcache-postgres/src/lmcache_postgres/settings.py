"""Settings of one PostgreSQL tier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class PostgresSettings(BaseModel):
    """`[l2.NAME] type = "postgres"`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    dsn: SecretStr = Field(description="The database, as in postgresql://user:password@host/database.")
    table: str = Field(
        default="lmcache",
        pattern=r"[a-z_][a-z0-9_]{0,50}",
        description="The table. Created if it is missing; several servers may share one.",
    )
