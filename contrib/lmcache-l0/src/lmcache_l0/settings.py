"""The settings of a server's own table: `[l0]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lmcache_core.settings.paths import AbsolutePath
from lmcache_core.settings.sizes import Size

FOLDER = Path("/dev/shm")
LOAD_MAX = 0.7  # beyond it probes grow long


class L0Settings(BaseModel):
    """The server's table, into which it promotes what its workers read most."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    enabled: bool = Field(
        default=False, description="whether the table is used from the start; it can be switched later"
    )
    size_gb: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="size of the table's file in GiB; none: 1, or what hash_slots needs"
    )
    max_value_size: Size | None = Field(
        default=None, gt=0, description="the largest value to promote; none: 4096, or what fits"
    )
    hash_slots: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="slots; none: as many as fit. Plan for the hot keys divided by 0.6"
    )
    folder: AbsolutePath = Field(default=FOLDER, description="the folder of the file, which is named after the server")
    promote_after: int = Field(default=3, ge=1, le=1000, description="uses within a minute or so that make a key hot")
    demote_at: Annotated[float, Field(gt=0, le=LOAD_MAX)] = Field(
        default=0.65, description="fill at which demotion starts"
    )
    demote_to: Annotated[float, Field(gt=0, le=LOAD_MAX)] = Field(
        default=0.5, description="fill at which demotion ends"
    )
    huge_pages: bool = Field(default=False, description="collapse the table's memory into huge pages, at the start")

    @model_validator(mode="after")
    def _gap(self) -> Self:
        if self.demote_to >= self.demote_at:
            raise ValueError(f"demote_to = {self.demote_to} must be below demote_at = {self.demote_at}")
        return self

    @property
    def sizes(self) -> dict[str, float | int]:
        """The settings of the table's size, as `plan_table` takes them."""
        given = {"size_gb": self.size_gb, "max_value_size": self.max_value_size, "hash_slots": self.hash_slots}
        return {name: figure for name, figure in given.items() if figure is not None}
