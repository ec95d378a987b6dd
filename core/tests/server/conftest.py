"""Servers in this process, on the real carriers."""

from __future__ import annotations

import pytest

from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace

MIB = 1 << 20


@pytest.fixture
def namespace() -> Namespace:
    return Namespace("model", Layout("uint8", (2 * 2 * 4 * 256 * 8,)))


def keys_of(*names: object) -> list[bytes]:
    """Opaque keys, 32 bytes each."""
    return [str(name).encode().rjust(32, b"\0") for name in names]


def keys(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


def payload(namespace: Namespace, number: int) -> bytes:
    """Bytes of one object, each different from the next object's."""
    return bytes([number % 251 + 1]) * namespace.layout.nbytes


def buffers(namespace: Namespace, count: int) -> list[bytearray]:
    return [bytearray(namespace.layout.nbytes) for _ in range(count)]
