"""Token ids to chunk keys, and namespaces, which separate what must not be shared."""

from lmcache_core.tokens.keys import chunk_keys, keys_from_block_hashes
from lmcache_core.tokens.namespace import Namespace

__all__ = ["Namespace", "chunk_keys", "keys_from_block_hashes"]
