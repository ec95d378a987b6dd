"""Attaches to each file named and calls everything. A process of its own: what it proves is that it lives."""

from __future__ import annotations

import contextlib
import sys
import warnings

from lmcache_l0 import SharedCache

from lmcache_core.errors import CacheError

warnings.simplefilter("ignore")


def exercise(path: str) -> None:
    with SharedCache(path, wait_s=0.002) as cache:
        calls = [
            lambda: list(cache),
            lambda: cache.stats,
            lambda: cache.get_many([f"{i}" for i in range(30)]),
            lambda: cache.cool(),
            lambda: cache.enabled,
            lambda: len(cache),
        ]
        for i in range(30):
            key = f"{i}"
            calls += [
                lambda key=key: cache.get(key),
                lambda key=key: cache.view(key) and bytes(cache.view(key)),
                lambda key=key: cache.get_numpy(key, 20, "u1"),
                lambda key=key: cache.set(key, b"y" * 200),
                lambda key=key: cache.insert(key, b"z", cache.ticket(key)),
            ]
            if i % 4 == 0:
                calls.append(lambda key=key: cache.delete(key))
        for call in calls:
            with contextlib.suppress(CacheError):  # refused with words: all that is asked
                call()


used = refused = 0
for name in sys.argv[1:]:
    try:
        exercise(name)
        used += 1
    except CacheError:
        refused += 1
print(used, refused)
