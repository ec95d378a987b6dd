"""The layout of a disk tier's directory.

PATH/objects/3fa/00ab…    one file for each object: shard of the key, then the key in hex
PATH/tmp/TOKEN/lock, 1…   files being written by one adapter, which holds a lock on `lock` while it lives
PATH/damaged/00ab….N      what failed a check, a bounded number of them
PATH/medium               an id, by which another disk at PATH is noticed
PATH/leader               locked by the adapter that keeps headroom, where several share the directory
"""

from __future__ import annotations

import zlib
from pathlib import Path

SHARDS = 4096  # a million objects are 244 files a directory
_HEX = frozenset("0123456789abcdef")


class Paths:
    """Names in one directory. Key to path is injective: hex, and no key is longer than a file name allows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = str(root / "objects")
        self.temporary = root / "tmp"
        self.damaged = str(root / "damaged")

    def shard(self, key: bytes) -> str:
        """The directory of a key. By checksum, so that keys with a common prefix spread too."""
        return f"{self.objects}/{zlib.crc32(key) % SHARDS:03x}"

    def object(self, key: bytes) -> str:
        return f"{self.shard(key)}/{key.hex()}"


def key_of(name: str) -> bytes | None:
    """The key of a file's name; None for a file that is not ours."""
    if not name or len(name) % 2 or not _HEX.issuperset(name):
        return None
    return bytes.fromhex(name)
