"""What the copier's process is told of `[copier]`: without pydantic, which would take half of its time to start."""

from __future__ import annotations

import msgspec


class CopierOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """As `CopierSettings`, which has checked them."""

    threads: int
    uids: tuple[int, ...]
    gids: tuple[int, ...]
