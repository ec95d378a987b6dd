"""Keys and the names of objects in the bucket: PREFIX/hex of the key. Injective both ways."""

from __future__ import annotations

_HEX = frozenset("0123456789abcdef")


class Names:
    """Names under one prefix. Keys begin with a hash, so that a store that partitions by name spreads them."""

    def __init__(self, prefix: str) -> None:
        self.prefix = f"{prefix}/" if prefix else ""

    def of(self, key: bytes) -> str:
        return self.prefix + key.hex()

    def key(self, name: str) -> bytes | None:
        """The key of a name; None for an object that is not ours."""
        text = name[len(self.prefix) :]
        if not name.startswith(self.prefix) or not text or len(text) % 2 or not _HEX.issuperset(text):
            return None
        return bytes.fromhex(text)
