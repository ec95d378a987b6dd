"""Drills: a real tier in wrappers that its settings name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.client.client import Client
from lmcache_core.errors import SettingsError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.testing.waiting import until
from lmcache_core.tokens.namespace import Namespace

pytest.importorskip("lmcache_fs")

SPACE = Namespace("drill", Layout("uint8", (4096,)))
KEYS = [bytes([number]) * 32 for number in range(1, 5)]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    made: list[Any] = []

    def start(*wrap: str) -> Client:
        registry = load_plugins()
        disk = {"type": "fs", "path": str(tmp_path / "disk"), "wrap": list(wrap)}
        settings = make_settings(
            registry, name=f"d{uuid4().hex[:10]}", runtime_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"),
            l1={"size_bytes": 1 << 20, "backing": "memfd"}, l2={"disk": disk},
        )  # fmt: skip
        server = Server(settings, registry)
        assert server.populator.wait(60)
        server.start()
        made.extend([server, server.connect()])
        return made[-1]

    yield start
    for each in reversed(made):
        (each.stop if isinstance(each, Server) else each.close)()


def tier(client: Client) -> dict[str, Any]:
    told: dict[str, Any] = client.status()["tiers"]["tiers"][0]
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
    caplog.set_level(logging.INFO, "lmcache_core.tiers.drills")
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
