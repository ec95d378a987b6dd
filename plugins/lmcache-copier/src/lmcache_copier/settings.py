"""The settings of the copier, `[copier]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_Id = Annotated[int, Field(ge=0, lt=2**32)]


class CopierSettings(BaseModel):
    """Who may have the copier copy, and with how many threads."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)

    threads: int = Field(default=2, ge=1, le=64, description="threads that copy, shared by all engines")
    uids: tuple[_Id, ...] = Field(
        default=(),
        description="users, besides the server's own, whose engines may register memory: they can read and write what "
        "a worker of the server's user can",
    )
    gids: tuple[_Id, ...] = Field(
        default=(), description="groups that may open the copier's socket: as `l1.gids`, for engines of other users"
    )
