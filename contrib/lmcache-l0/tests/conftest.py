"""Tables in shared memory, removed at the end of each test."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_l0 import SharedCache

Make = Callable[..., SharedCache]


@pytest.fixture
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="l0-test-", dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """Make a small table; `path` attaches to one that is there."""
    made: list[SharedCache] = []
    numbers = itertools.count()

    def build(path: str | os.PathLike[str] | None = None, **sizes: Any) -> SharedCache:
        if path is None:
            path = folder / f"table-{next(numbers)}.l0"
            sizes = {"hash_slots": 64, "max_value_size": 256, **sizes}
        cache = SharedCache(path, **sizes)
        made.append(cache)
        return cache

    yield build
    for cache in made:
        cache.close()
