"""Changes of tiers: whatever building one does, who asked is told, and the next change can be made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_core.errors import CacheError, LimitError, PluginError
from lmcache_core.server import tier_changes
from lmcache_core.server.server import Server

pytest.importorskip("lmcache_mock")


class Panic(BaseException):
    """What an extension in another language may raise: no `Exception`."""


@pytest.fixture
def add(server: Server) -> Any:
    with server.connect() as client:
        yield lambda: client.tiers_add("mem", {"type": "mock"})
    assert server.loop.faults == 0


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
