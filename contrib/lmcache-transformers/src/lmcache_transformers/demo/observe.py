"""What the demo sees of the server from another process: the server's own account of itself."""

from __future__ import annotations

from typing import NamedTuple

from lmcache_core import Client
from lmcache_transformers.demo.server import TIER


class View(NamedTuple):
    """The figures that the demo compares before and after."""

    used_bytes: int  # of the pool: everything that is not free
    writing_bytes: int  # of it, held by writers who have not committed
    disk_objects: int
    disk_loads: int  # objects loaded from disk since the server started


def look(client: Client) -> View:
    """Ask the server now. Raises `DisconnectedError` where there is none."""
    status = client.status()
    usage = status["l1"]
    disk = next(tier for tier in status["tiers"]["tiers"] if tier["name"] == TIER)
    return View(
        used_bytes=usage["used_bytes"],
        writing_bytes=usage["bytes_by_state"].get("writing", 0),
        disk_objects=disk["objects"],
        disk_loads=disk["counts"].get("loaded", 0),
    )
