"""The kit on a tier described by settings: pytest runs this for `lmcache-core plugins certify`.

Only the settings of the medium are known. Each test gets its own name for `{fresh}`; without that, the medium is
emptied after each test.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.registry import Registry
from lmcache_core.tiers.contract import AdapterContext, L2Adapter
from lmcache_testing import material
from lmcache_testing.adapter import L2AdapterContract
from lmcache_testing.proxy import StallingProxy

FRESH = "{fresh}"


class Address(NamedTuple):
    """The address in a setting, and how to write that setting for another port of this machine."""

    host: str
    port: int
    written: Callable[[int], Any]


class Described:
    """A tier given by settings: `values` as in a file's table, `texts` as in flags."""

    def __init__(
        self, registry: Registry, tier: str, values: Mapping[str, Any], texts: Mapping[str, str], through: str | None
    ) -> None:
        self._registry = registry
        self._tier = tier
        self._values = dict(values)
        self._texts = dict(texts)
        self.through = through
        self.has_fresh = any(FRESH in str(each) for each in (*self._values.values(), *self._texts.values()))

    def written(self) -> str:
        """For the process that runs the tests. May contain secrets."""
        description = {"tier": self._tier, "values": self._values, "texts": self._texts, "through": self.through}
        return json.dumps(description, default=str)  # TOML has dates, JSON does not

    def build(self, fresh: str, context: AdapterContext, **changed: Any) -> L2Adapter:
        """An adapter. `changed`: settings to override. Raises SettingsError, PluginError."""
        from lmcache_core.settings.tier import tier_settings

        values = {name: _named(value, fresh) for name, value in self._values.items()} | changed
        texts = {name: str(_named(text, fresh)) for name, text in self._texts.items() if name not in changed}
        chosen = tier_settings(self._registry, self._tier, values, texts)
        made = self._registry.build(Kind.L2_ADAPTER, chosen.type, chosen.settings, context)
        assert isinstance(made, L2Adapter), f"{chosen.type} builds a {type(made).__name__}"
        return made

    def address(self) -> Address:
        """The address in the setting to put a proxy in front of. Raises UsageError if it has none."""
        name = self.through or ""
        value = self._texts.get(name, self._values.get(name))
        if value is None:
            raise UsageError(f"--through {name}: that setting is not given: give it by --set {name}=…")
        text = str(value)
        if text.isdigit():
            host = str(self._texts.get("host", self._values.get("host", "127.0.0.1")))
            return Address(host, int(text), int)
        parts = urlsplit(text if "//" in text else f"//{text}")
        if parts.hostname is None or parts.port is None:
            raise UsageError(f"--through {name}: {text!r} does not contain a host and port")
        before, at, _ = parts.netloc.rpartition("@")

        def written(port: int) -> str:
            moved = parts._replace(netloc=f"{before}{at}127.0.0.1:{port}").geturl()
            return moved if "//" in text else moved.removeprefix("//")

        return Address(parts.hostname, parts.port, written)

    def expect_empty(self, context: AdapterContext) -> None:
        """Raises UsageError if the kit may not empty the medium."""
        if self.has_fresh:
            return
        with self.build("", context) as adapter:
            able = adapter.capabilities
            if not (able.scan and able.delete):
                raise UsageError(
                    f"tier {self._tier!r} cannot be emptied after each test, because its adapter does not claim scan "
                    f"and delete: use {FRESH} in a setting to get another place for each test"
                )
            if material.scan(adapter):
                raise UsageError(
                    f"tier {self._tier!r} holds objects, and the kit deletes what it finds: certify an empty one, "
                    f"or use {FRESH} in a setting to get another place for each test"
                )


def _named(value: Any, fresh: str) -> Any:
    return value.replace(FRESH, fresh) if isinstance(value, str) else value


@pytest.fixture(scope="session")
def described(request: pytest.FixtureRequest) -> Described:
    """The tier, as written by the process that started this one."""
    from lmcache_core.plugins.loader import load_plugins

    path = request.config.getoption("--kit-tier")
    if path is None:
        pytest.fail("run `lmcache-core plugins certify`, which chooses the tier")
    description = json.loads(Path(path).read_text(encoding="utf-8"))
    return Described(load_plugins(), **description)


class TestCertified(L2AdapterContract):
    """With the fixtures that settings and a proxy make possible."""

    by_settings = True

    @pytest.fixture
    def fresh(self) -> str:
        return f"kit{uuid4().hex[:12]}"

    @pytest.fixture
    def proxy(self, described: Described) -> Iterator[StallingProxy | None]:
        if described.through is None:
            yield None
            return
        address = described.address()
        with StallingProxy(address.host, address.port) as proxy:
            yield proxy

    @pytest.fixture
    def reopen(
        self, described: Described, fresh: str, proxy: StallingProxy | None, adapter_context: AdapterContext
    ) -> Callable[[], L2Adapter]:
        changed = {}
        if proxy is not None and described.through is not None:
            changed = {described.through: described.address().written(proxy.port)}
        return lambda: described.build(fresh, adapter_context, **changed)

    @pytest.fixture
    def adapter(self, reopen: Callable[[], L2Adapter]) -> Iterator[L2Adapter]:
        with reopen() as adapter:
            able = adapter.capabilities
            yield adapter
        if able.scan and able.delete:
            with reopen() as cleaner:
                keys = [entry.key for entry in material.scan(cleaner)]
                for some in material.batches(cleaner, len(keys)):
                    cleaner.delete(keys[some.start : some.stop], material.soon())

    @pytest.fixture
    def hang(self, proxy: StallingProxy | None) -> Any:
        return None if proxy is None else proxy.hang()

    @pytest.fixture
    def stall(self, proxy: StallingProxy | None) -> Any:
        return None if proxy is None else proxy.stall()

    @pytest.fixture
    def outage(self, proxy: StallingProxy | None) -> Any:
        return None if proxy is None else proxy.outage()

    @pytest.fixture
    def unreachable(
        self, described: Described, fresh: str, adapter_context: AdapterContext
    ) -> Iterator[L2Adapter | None]:
        """An adapter for a port that is reserved, with no listener."""
        if described.through is None:
            yield None
            return
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            written = described.address().written(taken.getsockname()[1])
            with described.build(fresh, adapter_context, **{described.through: written}) as adapter:
                yield adapter


def described_tier(
    registry: Registry, name: str, table: Mapping[str, Any], texts: Mapping[str, str], through: str | None
) -> Described:
    """The tier with this name in the settings, or a tier of that type. Raises SettingsError if there is neither."""
    if table:
        return Described(registry, name, table, texts, through)
    types = [spec.name for spec in registry.components(Kind.L2_ADAPTER)]
    if name not in types:
        known = ", ".join(sorted(types)) or "none"
        raise SettingsError(f"{name!r} is neither a tier of the settings nor a type of tiers (installed: {known})")
    return Described(registry, "certified", {"type": name}, texts, through)
