"""From a host's keys to ours: a namespace of what must agree before bytes are reused, and a key of 32 bytes.

Hosts name blocks by a hash of the tokens before and in them. Two hosts that hash alike, and whose blocks have the same
bytes, find each other's objects; anything that differs (model, weights, shard, salt, format, size) is another
namespace, so that their objects never meet.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from lmcache_core import Layout, Namespace
from lmcache_core.errors import UsageError

__all__ = ["BlockFormat", "object_key"]

_TAG = b"lmcache-hosts object 1"
HASH_BYTES_MIN = 16  # with less, two prompts meet by chance: a host's 64-bit hashes are refused


@dataclass(frozen=True)
class BlockFormat:
    """What all blocks of one model in one host share. `meaning` says what the bytes of a block are: the host's own
    description, or a text that the operator gives to several hosts whose blocks are alike."""

    model: str
    meaning: str
    weights_version: str = ""

    def namespace(self, nbytes: int, shard: tuple[int, int] = (0, 1), salt: str = "") -> Namespace:
        """The namespace of blocks of so many bytes; `shard` is the i-th of n parts of the KV."""
        return _namespace(self, nbytes, shard, salt)


@lru_cache(maxsize=1024)
def _namespace(of: BlockFormat, nbytes: int, shard: tuple[int, int], salt: str) -> Namespace:
    return Namespace(
        of.model,
        Layout("uint8", (nbytes,)),
        weights_version=of.weights_version,
        kv_shard=shard,
        tenant_salt=salt,
        format=of.meaning,
    )


def object_key(namespace: Namespace, block_hash: bytes, part: str = "") -> bytes:
    """Our key of the block with this hash: it includes the namespace, and so its salt. `part` tells apart what a host
    keeps under one hash (groups of layers, pools). Raises `UsageError` for a hash of less than 16 bytes."""
    if len(block_hash) < HASH_BYTES_MIN:
        raise UsageError(
            f"a block hash of {len(block_hash)} bytes is too short to be told from others: configure the host to "
            "use SHA-256, or another hash of 128 bits or more"
        )
    digest = hashlib.sha256(_TAG + namespace.digest + len(block_hash).to_bytes(2, "little") + block_hash)
    digest.update(part.encode())
    return digest.digest()
