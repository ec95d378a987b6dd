"""Drills: a real tier in wrappers that its settings name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.errors import SettingsError
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

pytest.importorskip("lmcache_fs")
pytest.importorskip("lmcache_mock")

SPACE = Namespace("drill", Layout("uint8", (4096,)))
KEYS = [bytes([number]) * 32 for number in range(1, 5)]


@pytest.fixture
def serve(start: Callable[..., Server], tmp_path: Path) -> Iterator[Callable[..., Client]]:
    with ExitStack() as stack:

        def serve(*wrap: str) -> Client:
            disk = {"type": "fs", "path": str(tmp_path / "disk"), "wrap": list(wrap)}
            server = start(l1={"size_bytes": 1 << 20, "backing": "memfd"}, l2={"disk": disk})
            return stack.enter_context(server.connect())

        yield serve


def tier(client: Client) -> Json:
    told: Json = client.status()["tiers"]["tiers"][0]
    return told


def test_faults_and_latency_come_from_a_tiers_settings(serve: Callable[..., Client], tmp_path: Path) -> None:
    client = serve("latency:0.05", "faults:store full count=3")
    assert tier(client)["wrap"] == ["latency:0.05", "faults:store full count=3"]
    client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE)
    until(lambda: tier(client)["counts"].get("store_full") == 3)
    until(lambda: tier(client)["objects"] == 1)
    assert tier(client)["latencies"]["store"]["seconds"] >= 0.05
    client.tiers_reconfigure("disk", {"wrap": []})
    until(lambda: tier(client)["wrap"] == [])
    client.clear(SPACE)
    client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE)
    until(lambda: tier(client)["objects"] == 4)


def test_a_recorded_tier_says_what_it_was_asked(serve: Callable[..., Client], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lmcache_mock.drills")
    client = serve("record")
    assert "wrapped for a drill: record" in caplog.text
    client.store(KEYS, [bytes(4096)] * 4, namespace=SPACE)
    until(lambda: "tier disk: store of 4 keys, 4 answers" in caplog.text)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        ("latency:soon", "latency:0.02"),
        ("latency:1.2.3", "latency:0.02"),
        ("faults:", "has no rule"),
        ("faults:load burn", "is not a fault rule"),
        ("record:all", "is not known"),
        ("slow", "is not known"),
    ],
)
def test_what_is_no_wrapper_is_refused_with_the_cure(serve: Callable[..., Client], wrap: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        serve(wrap)
