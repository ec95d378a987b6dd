"""Servers in this process, on the real carriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.client.client import Client
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace

MIB = 1 << 20


def settings_for(tmp_path: Path, **values: Any) -> Any:
    """Settings of a small server of its own."""
    values.setdefault("name", f"t{uuid4().hex[:10]}")
    values.setdefault("l1", {})
    values["l1"] = {"size_bytes": 32 * MIB, **values["l1"]}
    return make_settings(runtime_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"), **values)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start an embedded server with these settings; its pool is populated when this returns."""
    with ExitStack() as stack:

        def make(**values: Any) -> Server:
            server = Server(settings_for(tmp_path, **values), load_plugins())
            assert server.populator.wait(60)
            return stack.enter_context(server)

        yield make


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.connect() as client:
        yield client


@pytest.fixture
def namespace() -> Namespace:
    return Namespace("model", Layout("uint8", (2 * 2 * 4 * 256 * 8,)))


def keys_of(*names: object) -> list[bytes]:
    """Opaque keys, 32 bytes each."""
    return [str(name).encode().rjust(32, b"\0") for name in names]


def payload(namespace: Namespace, number: int) -> bytes:
    """Bytes of one object, each different from the next object's."""
    return bytes([number % 251 + 1]) * namespace.layout.nbytes


def buffers(namespace: Namespace, count: int) -> list[bytearray]:
    return [bytearray(namespace.layout.nbytes) for _ in range(count)]
