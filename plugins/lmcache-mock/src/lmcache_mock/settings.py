"""Settings of one mock tier."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lmcache_core.limits import SECONDS_MAX
from lmcache_core.settings.paths import OptionalPath
from lmcache_core.settings.sizes import Size
from lmcache_mock.drills.faults import FaultRule


class MockSettings(BaseModel):
    """`[l2.NAME] type = "mock"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    medium_bytes: Size | None = Field(default=None, description="A store beyond it answers FULL. none: no limit.")
    latency_s: float = Field(default=0.0, ge=0, le=SECONDS_MAX, description="Latency of every call, without its bytes.")
    bandwidth_bytes_s: Size | None = Field(
        default=None, gt=0, description="Bytes a second, all calls together. none: as fast as memory."
    )
    faults: tuple[str, ...] = Field(
        default=(),
        description="What goes wrong from the start, one rule each: OPERATION FAULT [rate=R] [skip=N] [count=N] "
        "[s=SECONDS], as in `load flipped_bits rate=0.1`.",
    )
    seed: int = Field(default=0, description="Seed of the rates: the same seed hits the same objects.")
    control: OptionalPath = Field(
        default=None,
        description="A file of rules, one a line, that replaces faults while it exists, and is read again when it "
        "changes: `lmcache-core mock FILE …` writes it.",
    )

    @field_validator("faults")
    @classmethod
    def _understood(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            FaultRule.parse(text)
        return value
