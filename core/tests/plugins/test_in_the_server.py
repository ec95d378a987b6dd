"""Plugins in a real server: what they raise is theirs, and nobody comes in late."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_core.errors import PluginError
from lmcache_core.plugins.hookspecs import hookimpl
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.server import Server
from lmcache_core.settings.model import Settings
from lmcache_testing.embedded import server_settings


class Thrower:
    """Raises in every hook that a server calls."""

    @hookimpl
    def lmcache_started(self) -> None:
        raise ValueError("in started")

    @hookimpl
    def lmcache_stopping(self) -> None:
        raise ValueError("in stopping")


class Listener:
    def __init__(self) -> None:
        self.heard: list[object] = []

    @hookimpl
    def lmcache_started(self, settings: Settings, address: str) -> None:
        self.heard.append((settings.name, address))

    @hookimpl
    def lmcache_stopping(self) -> None:
        self.heard.append("stopping")


def test_a_plugin_that_raises_in_every_hook_leaves_the_server_working(tmp_path: Path) -> None:
    registry = load_plugins({"LMCACHE_CORE_PLUGINS": ""})
    listener = Listener()
    registry.register(Thrower(), "a_thrower", distribution="lmcache-thrower", version="0.9")
    registry.register(listener, "listener")
    settings = server_settings(tmp_path, registry, name="throws", l1={"size_bytes": "4MiB", "backing": "memfd"})
    with Server(settings, registry) as server:
        client = server.connect()
        assert client.ping(b"still here") == b"still here"
        with pytest.raises(PluginError, match="too late"):
            registry.register(Listener(), "late")
        client.close()
        address = server.address
    assert listener.heard == [("throws", address), "stopping"]
    assert [fault.hook for fault in registry.faults] == ["lmcache_started", "lmcache_stopping"]
