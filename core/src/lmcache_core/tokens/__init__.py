"""Token ids to chunk keys; namespaces, which separate what must not be shared; what weights there are."""

from lmcache_core.tokens.keys import chunk_keys, keys_from_block_hashes
from lmcache_core.tokens.namespace import Namespace
from lmcache_core.tokens.weights import weights_fingerprint

__all__ = ["Namespace", "chunk_keys", "keys_from_block_hashes", "weights_fingerprint"]
