"""An index that is too small: the log and `status` say so with the figure to set, `check` before anything is stored."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.cli.check import header_of, index_of
from lmcache_core.client.client import Client
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings

from .conftest import MIB, keys_of

pytestmark = pytest.mark.skipif(native is None, reason="there is no index without the C extension")

Start = Callable[..., Server]
PAGE = Namespace("page", Layout("uint8", (4096,)))
OBJECTS, BATCH = 9000, 500
FEW = 4096


def fill(client: Client) -> None:
    source = bytes(PAGE.layout.nbytes)
    for first in range(0, OBJECTS, BATCH):
        stored = client.store(keys_of(*range(first, first + BATCH)), [source] * BATCH, namespace=PAGE)
        assert stored.stored == BATCH


def said(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The figures to set, as the log has them."""
    found = [re.search(r"set l1\.index_entries = (\d+)", record.getMessage()) for record in caplog.records]
    return [int(each[1]) for each in found if each is not None]


def test_the_log_and_status_say_when_entries_run_out_and_the_figure_they_say_is_enough(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lmcache_core")
    server = start(l1={"size_bytes": 64 * MIB, "index_entries": FEW})
    with server.connect() as client:
        fill(client)
        index = client.status()["index"]
    assert index["ready"] + index["unindexed"] == OBJECTS
    assert index["unindexed"] >= OBJECTS - FEW
    assert said(caplog) == [8192, 16384, 32768], "once for each figure, while the pool fills"
    assert index["entries_wanted"] == said(caplog)[-1]
    server.stop()

    caplog.clear()
    server = start(l1={"size_bytes": 64 * MIB, "index_entries": index["entries_wanted"]})
    with server.connect() as client:
        fill(client)
        index = client.status()["index"]
    assert (index["ready"], index["unindexed"]) == (OBJECTS, 0)
    assert index["entries_wanted"] == index["entries"]
    assert said(caplog) == []


def test_check_says_for_which_objects_entries_will_run_out_and_the_figure_to_set(tmp_path: Path, start: Start) -> None:
    few = index_of(header_of(server_settings(tmp_path, l1={"size_bytes": 64 * MIB, "index_entries": FEW})))
    assert "4,096 entries" in few.message
    assert "of 20,480 bytes or more" in few.message
    assert few.cure == "set l1.index_entries = 16384, or 0 for the same"
    usual = index_of(header_of(server_settings(tmp_path, l1={"size_bytes": 64 * MIB})))
    assert "16,384 entries" in usual.message
    assert "it would be l1.index_entries = 32768" in usual.message
    assert usual.cure == ""
    ample = index_of(header_of(server_settings(tmp_path, l1={"size_bytes": 64 * MIB, "index_entries": 32768})))
    assert ample.message.endswith("of 2,560 bytes or more")

    server = start(l1={"size_bytes": 64 * MIB, "index_entries": 32768})  # the figure for whole pages
    with server.connect() as client:
        fill(client)
        assert client.status()["index"]["unindexed"] == 0
