"""Components that live beside the L1: what they hear, when, and what becomes of one that fails."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lmcache_core import ComponentSpec, Kind, hookimpl
from lmcache_core.client.results import Status
from lmcache_core.errors import PluginError, SettingsError, UsageError
from lmcache_core.observe.troubles import with_troubles
from lmcache_core.plugins.discovery import ALLOW_LIST
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server import build as build_module
from lmcache_core.server.companion import Companion, CompanionContext
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import compose, make_settings
from lmcache_core.settings.model import Section
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json, embedded_server, server_settings
from lmcache_testing.waiting import until

NAMESPACE = Namespace("model", Layout("uint8", (4096,)))
KEYS = [bytes([n]) * 32 for n in range(4)]


class ShadowSettings(Section):
    """Of the companion below."""

    size: int = 3


class Shadow(Companion):
    """Keeps what is in L1, by name, and writes down what it hears."""

    def __init__(self, settings: ShadowSettings, context: CompanionContext) -> None:
        self.settings, self.context = settings, context
        self.there: dict[tuple[int, bytes], int] = {}
        self.heard: list[str] = []
        self.fails = ""
        self.steps = 0
        self.due: float | None = None
        self.seen: list[bytes] = []
        self.stepped = threading.Event()
        made.append(self)

    def offers(self) -> dict[str, object]:
        return {"path": "/somewhere", "size": self.settings.size}

    def committed(self, objects: Sequence[Any]) -> None:
        self._hear("committed")
        self.there.update({(item.namespace, item.key): item.generation for item in objects})

    def left(self, objects: Sequence[Any]) -> None:
        self._hear("left")
        for item in objects:
            if self.there.get((item.namespace, item.key)) == item.generation:
                del self.there[item.namespace, item.key]

    def read(self, objects: Sequence[Any]) -> None:
        self._hear("read")
        self.due = self.context.now

    def next_step(self) -> float | None:
        return self.due

    def step(self, now: float) -> None:
        self._hear("step")
        self.due = None
        wanted = [(key, generation) for (_, key), generation in self.there.items()]
        for item in self.context.ready(NAMESPACE.id, wanted):
            if item is not None and self.context.layout(item.layout_id) == NAMESPACE.layout:
                with self.context.view(item, 4) as view:
                    self.seen.append(bytes(view))
        self.stepped.set()

    def operate(self, operation: str, arguments: Mapping[str, object]) -> dict[str, object]:
        if operation == "echo":
            return dict(arguments)
        return super().operate(operation, arguments)

    def status(self) -> Json:
        return {"kept": len(self.there)}

    def abandon(self) -> None:
        self.heard.append("abandon")

    def close(self) -> None:
        self.heard.append("close")

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if self.fails == what:
            raise RuntimeError(f"{what} failed")


made: list[Shadow] = []


class Plugin:
    @hookimpl
    def lmcache_components(self) -> Sequence[ComponentSpec]:
        here = __name__
        return [ComponentSpec(Kind.COMPANION, "shadow", f"{here}:Shadow", f"{here}:ShadowSettings", "for tests")]


@pytest.fixture
def registry():
    registry = load_plugins({ALLOW_LIST: ""})
    registry.register(Plugin(), "shadow")
    return registry


@pytest.fixture
def server(registry, tmp_path):
    made.clear()
    with embedded_server(tmp_path, registry, l1={"size_bytes": 8 << 20}, shadow={"size": 5}) as server:
        yield server
    assert made[0].heard[-2:] == ["abandon", "close"]


@pytest.fixture
def client(server):
    with server.connect(use_index=False) as client:
        yield client


def store(client, keys=KEYS) -> list[Status]:
    return list(client.store(keys, [key[:1] * 4096 for key in keys], namespace=NAMESPACE).statuses)


def test_a_companion_is_informed_before_the_client_is_answered(client):
    assert client.companions() is None
    assert store(client) == [Status.STORED] * 4
    (shadow,) = made
    assert len(shadow.there) == 4
    assert client.companions() == {"shadow": {"path": "/somewhere", "size": 5}}
    assert client.status()["companions"] == {"shadow": {"kept": 4}}
    assert client.retrieve(KEYS, [bytearray(4096) for _ in KEYS], namespace=NAMESPACE).hits == 4
    assert shadow.stepped.wait(60)
    assert sorted(shadow.seen) == [key[:4] for key in KEYS]
    client.clear(NAMESPACE)
    assert shadow.there == {}


def test_what_is_evicted_has_left_before_its_room_is_given_away(client):
    store(client)
    (shadow,) = made
    number = 0
    while len(shadow.there) == 4 + number:
        key = b"\xff" + number.to_bytes(31, "big")
        assert client.store([key], [bytes(4096)], namespace=NAMESPACE).statuses[0] is Status.STORED
        number += 1
        assert number < 10_000
    assert client.status()["counters"]["evicted"] >= 1
    # What makes room goes on in steps between the calls.
    until(lambda: client.status()["l1"]["objects_by_state"]["ready"] == len(shadow.there), "the end of the eviction")


@pytest.mark.parametrize("what", ["committed", "left", "read", "step"])
def test_one_that_fails_is_abandoned_and_the_server_goes_on(client, what):
    assert store(client, KEYS[:1]) == [Status.STORED]
    (shadow,) = made
    shadow.fails = what
    assert store(client, KEYS[1:2]) == [Status.STORED]
    into = bytearray(4096)
    assert client.retrieve(KEYS[:1], [into], namespace=NAMESPACE).hits == 1
    client.clear()
    assert f"{what} failed" in client.status()["companions"]["shadow"]["disabled"]
    troubles = with_troubles(client.status())["troubles"]
    assert [text for text in troubles if "companion shadow failed" in text and f"{what} failed" in text]
    heard = list(shadow.heard)
    assert heard[-1] == "abandon"
    assert store(client) == [Status.STORED] * 4
    assert shadow.heard == heard
    with pytest.raises(UsageError, match=f"no companion 'shadow'.*{what} failed"):
        client.operate("shadow", "echo")


def test_its_operations_are_the_server_s_own_user_s(client, server, monkeypatch):
    assert client.operate("shadow", "echo", a=1, b="x") == {"a": 1, "b": "x"}
    with pytest.raises(UsageError, match="no operation 'nothing'"):
        client.operate("shadow", "nothing")
    with pytest.raises(UsageError, match=r"no companion 'else'.*it has shadow"):
        client.operate("else", "echo")
    for session in server.parts.sessions:
        monkeypatch.setattr(session, "uid", 12345)
    with pytest.raises(UsageError, match="only the server's own user"):
        client.operate("shadow", "echo")


def test_a_server_that_cannot_be_built_leaves_no_companion_open(registry, tmp_path, monkeypatch):
    made.clear()
    settings = server_settings(tmp_path, registry, l1={"backing": "memfd"}, shadow={})

    def fail(*_: object) -> None:
        raise OSError("no socket today")

    monkeypatch.setattr(build_module, "LifelineListener", fail)
    with pytest.raises(OSError, match="no socket today"):
        Server(settings, registry)
    assert made[0].heard == ["abandon", "close"]


def test_a_table_of_its_name_is_its_settings(registry):
    assert make_settings(registry).companions() == {}
    composed = compose(registry, ["--shadow.size", "7"], {})
    assert composed.settings.companions() == {"shadow": ShadowSettings(size=7)}
    assert (Kind.COMPANION, "shadow") in set(composed.settings.components())
    assert compose(registry, [], {"LMCACHE_CORE_SHADOW__SIZE": "9"}).settings.companions()["shadow"].size == 9
    with pytest.raises(SettingsError, match=r"did you mean 'shadow\.size'"):
        make_settings(registry, shadow={"sise": 1})
    with pytest.raises(SettingsError, match="is a table"):
        make_settings(registry, shadow=3)


def test_settings_for_one_that_is_not_installed_say_what_to_install():
    registry = load_plugins({ALLOW_LIST: ""})
    registry.refused.clear()  # as if it were not there at all
    for sources in ({"l0": {"enabled": False}}, {"l0": {}}):
        with pytest.raises(PluginError, match="pip install lmcache-l0"):
            make_settings(registry, **sources)
    with pytest.raises(PluginError, match="pip install lmcache-l0"):
        compose(registry, [], {"LMCACHE_CORE_L0__ENABLED": "true"})
