"""Adapters on a real file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_block.adapter import BlockAdapter
from lmcache_block.settings import BlockSettings
from lmcache_core.tiers.contract import AdapterContext, LoadItem, Outcome, StoreItem


class Tier:
    """An adapter with short words for one object."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.path = path
        given = {"size_bytes": 16 << 20, "extent_bytes": 1 << 20, **settings}
        self.settings = BlockSettings(path=path, **given)  # type: ignore[arg-type]
        self.adapter = BlockAdapter(self.settings, AdapterContext(tier="nvme"))

    @property
    def deadline(self) -> float:
        return time.monotonic() + 60

    def store(self, key: bytes, *parts: bytes) -> Outcome:
        return self.adapter.store([StoreItem(key, [memoryview(part) for part in parts])], self.deadline)[0]

    def load(self, key: bytes, *sizes: int) -> tuple[Outcome, list[bytearray]]:
        parts = [bytearray(size) for size in sizes]
        outcome = self.adapter.load([LoadItem(key, [memoryview(part) for part in parts])], self.deadline)[0]
        return outcome, parts

    def exists(self, *keys: bytes) -> Sequence[bool]:
        return self.adapter.exists(keys, self.deadline)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Callable[..., Tier]]:
    """Makes adapters on one file; closes them."""
    made: list[Tier] = []

    def make(path: Path | None = None, **settings: object) -> Tier:
        made.append(Tier(path or tmp_path / "medium", **settings))
        return made[-1]

    yield make
    for one in made:
        one.adapter.close()
