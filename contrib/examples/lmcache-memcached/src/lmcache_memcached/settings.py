"""Settings of one memcached tier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class MemcachedSettings(BaseModel):
    """`[l2.NAME] type = "memcached"`. Capacity and eviction are memcached's own: set `eviction = "none"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", min_length=1, description="Where memcached listens.")
    port: int = Field(default=11211, ge=1, le=65535, description="Its TCP port.")
    prefix: str = Field(
        default="lmcache:",
        pattern=r"[!-~]{0,100}",
        description="What our keys begin with, so that others can use the same memcached.",
    )
