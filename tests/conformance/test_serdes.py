"""The kit against every serde of ours, built through the registry as a server builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Serde
from lmcache_core.testing import SerdeContract

REGISTRY = load_plugins()


class Built(SerdeContract):
    settings: ClassVar[dict[str, Any] | None] = None

    @pytest.fixture
    def make_serde(self) -> Callable[[], Serde]:
        def make() -> Serde:
            serde: Serde = REGISTRY.build(Kind.SERDE, self.component, self.settings)
            return serde

        return make


class TestIdentity(Built):
    component = "identity"


class TestZstd(Built):
    component = "zstd"


class TestZstdSlow(Built):
    component = "zstd"
    settings: ClassVar[dict[str, Any] | None] = {"level": 5, "shuffle": False}


class TestLz4(Built):
    component = "lz4"


class TestAesGcm(Built):
    component = "aesgcm"
    authenticates = True
    settings: ClassVar[dict[str, Any] | None] = {"keys": "ab" * 32}


class TestFp8(Built):
    component = "fp8"
    layouts = (
        Layout("bfloat16", (2, 2, 64, 4, 16), "KLTHD"),
        Layout("float16", (2, 100, 3, 8), "KTHD"),
        Layout("float32", (1001,)),
    )

    def assert_close(self, before: bytes, after: bytes, layout: Layout) -> None:
        torch = pytest.importorskip("torch")
        was, now = (
            torch.frombuffer(bytearray(one), dtype=getattr(torch, layout.dtype)).double() for one in (before, after)
        )
        # e4m3 keeps three bits of mantissa: half a step is 1/16 of the value, or of the smallest normal one below.
        scale = was.abs().max() / 448
        bound = torch.maximum(was.abs() / 16, scale * 2**-7) * 1.02 + 1e-12
        assert bool(((now - was).abs() <= bound).all())


class TestFp8OnTorch(TestFp8):
    settings: ClassVar[dict[str, Any] | None] = {"kernel": "torch"}
