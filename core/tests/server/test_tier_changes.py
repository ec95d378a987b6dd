"""Changes of tiers: whatever building one does, who asked is told, and the next change can be made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.errors import CacheError, LimitError, PluginError
from lmcache_core.server.server import Server
from lmcache_core.server.tiers import changes as tier_changes
from lmcache_core.tiers.contract import AdapterContext
from lmcache_testing.embedded import server_settings

pytest.importorskip("lmcache_mock")


class Panic(BaseException):
    """What an extension in another language may raise: no `Exception`."""


@pytest.fixture
def add(server: Server) -> Any:
    with server.connect() as client:
        yield lambda: client.tiers_add("mem", {"type": "mock"})
    assert server.parts.loop.faults == 0


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The tiers whose adapters were made, and those whose adapters were closed, in order."""
    from lmcache_mock.adapter import MockAdapter

    told: dict[str, list[str]] = {"made": [], "closed": []}
    make, close = MockAdapter.__init__, MockAdapter.close

    def made(self: Any, settings: Any, context: AdapterContext) -> None:
        make(self, settings, context)
        self.tier = context.tier
        told["made"].append(self.tier)

    def closed(self: Any) -> None:
        close(self)
        told["closed"].append(self.tier)

    monkeypatch.setattr(MockAdapter, "__init__", made)
    monkeypatch.setattr(MockAdapter, "close", closed)
    return told


def fails_once(
    add: Callable[[], object], monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: BaseException
) -> CacheError:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    with monkeypatch.context() as once:
        once.setattr(where, name, fail)
        with pytest.raises(CacheError) as told:
            add()
    add()
    return told.value


def test_an_adapter_that_panics_when_it_is_built_is_told_and_another_can_be_added(
    add: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = fails_once(add, monkeypatch, tier_changes, "build_tier", Panic("in Rust"))
    assert isinstance(told, PluginError)
    assert "Panic" in str(told)


def test_a_change_for_which_there_is_no_thread_is_refused_and_can_be_asked_for_again(
    add: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = fails_once(add, monkeypatch, threading.Thread, "start", RuntimeError("can't start new thread"))
    assert isinstance(told, LimitError)


def test_a_tier_whose_serde_cannot_be_built_leaves_no_adapter_open(
    server: Server, adapters: dict[str, list[str]]
) -> None:
    pytest.importorskip("lmcache_crypto")
    with server.connect() as client, pytest.raises(CacheError, match="openssl rand"):
        client.tiers_add("mem", {"type": "mock", "serde": [{"type": "aesgcm", "keys": "zz"}]})
    assert adapters == {"made": ["mem"], "closed": ["mem"]}


def test_a_start_that_fails_once_its_tiers_are_built_leaves_none_open(
    tmp_path: Path, adapters: dict[str, list[str]]
) -> None:
    quota = {"namespaces": ["0000000000000001"], "stores": {"hot": {"limit_bytes": 1}}}
    settings = server_settings(
        tmp_path, l2={"warm": {"type": "mock"}, "cold": {"type": "mock"}}, quotas={"team": quota}
    )
    with pytest.raises(CacheError, match=r"quotas\.team: no store is named 'hot'"):
        Server(settings)
    assert {name: sorted(each) for name, each in adapters.items()} == {
        "made": ["cold", "warm"],
        "closed": ["cold", "warm"],
    }
