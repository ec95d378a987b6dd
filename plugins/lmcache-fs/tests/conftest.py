"""Adapters on the real medium."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_core.tiers.contract import AdapterContext, LoadItem, Outcome, StoreItem
from lmcache_fs.adapter import FsAdapter
from lmcache_fs.settings import FsSettings


class Disk:
    """An adapter with short words for one object."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.path = path
        self.adapter = FsAdapter(FsSettings(path=path, **settings), AdapterContext(tier="disk"))  # type: ignore[arg-type]

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

    def files(self, folder: str = "objects") -> list[Path]:
        return sorted(path for path in (self.path / folder).rglob("*") if path.is_file())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Makes adapters on one directory; closes them."""
    made: list[Disk] = []

    def make(path: Path | None = None, **settings: object) -> Disk:
        made.append(Disk(path or tmp_path / "tier", **settings))
        return made[-1]

    yield make
    for one in made:
        one.adapter.close()
