"""Memory that is short while the pool is populated: what there is serves, and the rest is tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_core.client.results import Status
from lmcache_core.errors import NotEnoughMemoryError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool import populate
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.room import check_room
from lmcache_core.server.pool import populating
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import NAMELESS, server_settings
from lmcache_testing.waiting import until

from .conftest import MIB, keys

STEP_BYTES = populate.POPULATE_STEP_BYTES
OBJECT_BYTES = STEP_BYTES // 8
SPACE = Namespace("model", Layout("uint8", (OBJECT_BYTES,)))


def test_a_pool_that_got_half_of_its_memory_evicts_and_gets_the_rest_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    short = True

    def room_for_one_step(needed_bytes: int, *given: Any, what: str) -> None:
        asked.append(what)
        if short and len(asked) > 1:
            raise NotEnoughMemoryError("another process has it")
        check_room(needed_bytes, *given, what=what)

    monkeypatch.setattr(populate, "check_room", room_for_one_step)
    monkeypatch.setattr(populating, "POPULATE_AGAIN_S", 0.01)
    monkeypatch.setattr(populating, "POPULATE_AGAIN_S_MAX", 0.01)
    registry = load_plugins()
    settings = server_settings(tmp_path, registry, l1=NAMELESS | {"size_bytes": STEP_BYTES + 16 * MIB})
    with Server(settings, registry).start() as server, server.connect() as client:
        pool = until(lambda: found if (found := client.status()["pool"])["population_error"] else None)
        assert (pool["populated_bytes"], pool["population_error"]) == (STEP_BYTES, "another process has it")
        for first in (0, 100, 200):
            stored = client.store(keys(8, first), [bytes(OBJECT_BYTES)] * 8, namespace=SPACE)
            assert stored.statuses == [Status.STORED] * 8
        until(lambda: len(asked) > 3)
        short = False
        until(lambda: client.status()["pool"]["populated_bytes"] == STEP_BYTES + 16 * MIB)
        assert client.status()["pool"]["population_error"] == ""
