"""Makes the model beside these tests importable under pytest's importlib mode, and builds small kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.kernel import Kernel, KernelConfig
from lmcache_core.policies.lru import LruEviction

sys.path.insert(0, str(Path(__file__).parent))

from kernel_words import BIG, LAYOUT, MIB, OTHER, WORKER  # found through the line above


@pytest.fixture
def make_kernel() -> Callable[..., Kernel]:
    """A kernel over `slots` objects of 1 MiB (each a slab of its own), with two attached workers."""

    def make(slots: int = 8, *, policy: Any = None, **config: Any) -> Kernel:
        sizes = {"pool_bytes": slots * MIB, "slab_bytes": MIB}
        times = {"write_ttl_s": 10, "read_ttl_s": 10, "promise_ttl_s": 10}
        caps = dict.fromkeys((f"{sort}_fraction_per_session_max" for sort in ("promised", "read", "pinned")), 1.0)
        caps |= {"promised_fraction_max": 1.0, "read_fraction_max": 1.0, "pinned_fraction_per_holder_max": 1.0}
        kernel = Kernel(KernelConfig(**{**sizes, **times, **caps, **config}), policy or LruEviction(), epoch=1)
        kernel.add_memory(config.get("pool_bytes", slots * MIB))
        kernel.register_layout(LAYOUT, MIB)
        kernel.register_layout(BIG, 2 * MIB)
        for session, row in ((WORKER, 11), (OTHER, 12)):
            kernel.open_session(session, uid=1000 + session, row=row)
            kernel.attach_session(session, row)
        return kernel

    return make


@pytest.fixture
def kernel(make_kernel: Callable[..., Kernel]) -> Kernel:
    return make_kernel()
