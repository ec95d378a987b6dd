"""An S3 adapter by itself, on a service of the matrix."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmcache_core.plugins.components import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, StoreItem
from lmcache_core.tiers.tier.parallel import adapter_context

if TYPE_CHECKING:
    from services.moto import S3Service


def build(service: S3Service, **more: object) -> L2Adapter:
    settings = {**service.adapter_settings(), **more}
    adapter = load_plugins().build(Kind.L2_ADAPTER, "s3", settings, adapter_context("cold", 4))
    assert isinstance(adapter, L2Adapter)
    return adapter


def store(adapter: L2Adapter, key: bytes, content: bytes = b"content" * 1000) -> Outcome:
    return adapter.store([StoreItem(key, [memoryview(content)])], time.monotonic() + 30)[0]


def load(adapter: L2Adapter, key: bytes, nbytes: int) -> tuple[Outcome, bytes]:
    into = bytearray(nbytes)
    (outcome,) = adapter.load([LoadItem(key, [memoryview(into)])], time.monotonic() + 30)
    return outcome, bytes(into)
