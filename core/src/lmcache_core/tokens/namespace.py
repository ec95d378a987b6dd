"""The namespace: everything that must match before one run may reuse the bytes of another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout

# First in the canonical bytes. A new way to serialize a namespace gets a new tag, so that keys of the two ways never
# collide.
_TAG = b"lmcache-core namespace 1"

KV_SHARDS_MAX = 1 << 16  # far above any tensor parallel × pipeline parallel; more is a mistake


@dataclass(frozen=True)
class Namespace:
    """What chunk keys are derived from, besides the tokens.

    `model` names the model as the operator chooses: two names are two namespaces. `layout` is that of one chunk.
    `weights_version` separates two states of the weights under one name. `kv_shard` is (i, n): the i-th of n parts of
    the KV; KV that is equal on all ranks is one shard, (0, 1), and is stored once. `tenant_salt` separates tenants:
    without the salt nobody can compute a key, so it is a secret and never part of the repr. `format` says what the
    bytes of an opaque layout mean: the backend, its instruction set, block size and memory layout, the cache's dtype;
    anything that makes the bytes of one engine useless to another.

    Raises `UsageError` if a field cannot be part of a namespace.
    """

    model: str
    layout: Layout
    weights_version: str = ""
    kv_shard: tuple[int, int] = (0, 1)
    tenant_salt: str = field(default="", repr=False)
    format: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise UsageError(f"namespace layout is a {type(self.layout).__name__}: give a Layout")
        for name in ("model", "weights_version", "tenant_salt", "format"):
            _text_bytes(name, getattr(self, name))
        if not self.model:
            raise UsageError("namespace model is empty: name the model whose KV is cached")
        shard = self.kv_shard
        if (
            not isinstance(shard, tuple)
            or len(shard) != 2
            or not all(type(n) is int for n in shard)
            or not 0 <= shard[0] < shard[1] <= KV_SHARDS_MAX
        ):
            raise UsageError(f"namespace kv_shard {shard!r} must be (i, n) with 0 <= i < n <= {KV_SHARDS_MAX}")

    @cached_property
    def canonical(self) -> bytes:
        """The namespace as bytes: every field prefixed with its length (u64, little-endian), in a fixed order.

        No two different namespaces have equal bytes, whatever their fields contain. The bytes include the salt: hash
        them, never log or send them.
        """
        layout = self.layout
        parts = [
            _TAG,
            _text_bytes("model", self.model),
            _text_bytes("weights_version", self.weights_version),
            layout.dtype.encode(),
            _numbers_bytes(layout.shape),
            layout.memory_format.encode(),
            _numbers_bytes(self.kv_shard),
            _text_bytes("tenant_salt", self.tenant_salt),
        ]
        if self.format:  # one more field changes the length: no namespace without a format has these bytes
            parts.append(_text_bytes("format", self.format))
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes, 32 bytes: the predecessor of the first chunk's key."""
        return hashlib.sha256(self.canonical).digest()

    @cached_property
    def id(self) -> int:
        """The first 8 bytes of the digest as a little-endian u64: the only part of a namespace that the kernel sees."""
        return int.from_bytes(self.digest[:8], "little")


def _text_bytes(name: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise UsageError(f"namespace {name} is a {type(text).__name__}: give a string")
    try:
        return text.encode()
    except UnicodeEncodeError:
        # The text stays out of the message, and the cause out of the chain, because it may be the salt.
        raise UsageError(f"namespace {name} is not valid Unicode (lone surrogates): decode it properly") from None


def _numbers_bytes(numbers: tuple[int, ...]) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers)
