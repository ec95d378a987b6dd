"""The kit against every serde of ours, built through the registry as a server builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest

from lmcache_core import Kind
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Serde
from lmcache_testing import SerdeContract

REGISTRY = load_plugins()


class Built(SerdeContract):
    settings: ClassVar[dict[str, object] | None] = None

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
    settings: ClassVar[dict[str, object] | None] = {"level": 5, "shuffle": False}


class TestLz4(Built):
    component = "lz4"


class TestPlanes(Built):
    component = "planes"


class TestAesGcm(Built):
    component = "aesgcm"
    authenticates = True
    settings: ClassVar[dict[str, object] | None] = {"keys": "ab" * 32}


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


class TestInt8(Built):
    component = "int8"
    layouts = (
        Layout("bfloat16", (2, 2, 64, 4, 16), "KLTHD"),
        Layout("float16", (100, 3, 2, 7), "THKD"),
        Layout("float32", (3, 2, 2, 70, 16), "LKHTD"),
    )
    levels = (254, 254)  # of keys and values: steps from the least to the greatest

    def assert_close(self, before: bytes, after: bytes, layout: Layout) -> None:
        torch = pytest.importorskip("torch")
        axes = [layout.memory_format.index(axis) for axis in "KT"]
        was, now = (
            torch.frombuffer(bytearray(one), dtype=getattr(torch, layout.dtype)).double().view(layout.shape)
            for one in (before, after)
        )
        for half, (levels, shared) in enumerate(zip(self.levels, (axes[1], len(layout.shape) - 1), strict=True)):
            part, back = was.select(axes[0], half), now.select(axes[0], half)
            along = shared - (shared > axes[0])
            reach = 2 * part.abs().amax(dim=along, keepdim=True)  # no less than greatest minus least
            bound = reach / levels / 2 * 1.01 + part.abs() * 2**-8 + 2**-23
            assert bool(((back - part).abs() <= bound).all())


class TestK8v4(TestInt8):
    component = "k8v4"
    levels = (254, 15)


class TestInt4(TestInt8):
    component = "int4"
    levels = (15, 15)


class TestFp8OnTorch(TestFp8):
    settings: ClassVar[dict[str, object] | None] = {"kernel": "torch"}
