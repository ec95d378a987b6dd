"""Chunk keys: k_i = SHA-256(k_{i-1} ‖ tokens_i), k_{-1} = SHA-256(namespace).

A key stands for everything before it as well: two prompts share their first n keys exactly if they share a
namespace and their first n chunks. Nothing depends on Python's `hash()`, on the process or on the machine.

The C extension hashes a whole prompt in one call. What it does not take, it leaves to the way in Python, which gives
the same keys, and raises what there is to raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lmcache_core.errors import UsageError
from lmcache_core.limits import CHUNK_TOKENS, KEY_BYTES
from lmcache_core.native import native
from lmcache_core.tokens.canonical import TOKEN_BYTES, Tokens, in_memory, token_words
from lmcache_core.tokens.namespace import Namespace

BLOCK_HASH_BYTES_MIN = 32  # 256 bits: below that a collision, which serves another prompt's KV, is within reach

# Separates these keys from chunk keys: eight tokens are as long as a hash.
_BLOCK_TAG = b"lmcache-core block hash 1"


def chunk_keys(
    tokens: Tokens,
    namespace: Namespace,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    previous: bytes | None = None,
) -> list[bytes]:
    """One 32-byte key for each whole chunk of `tokens`; what is left after the last whole chunk has none.

    `tokens`: ints in a list, tuple, range or other iterable; anything with the buffer protocol whose items are
    32- or 64-bit integers (array, memoryview, numpy array); or a torch tensor. One dimension. Equal ids give
    equal keys, whatever holds them. `previous` continues a sequence: the key of the chunk right before
    `tokens`, from the same namespace (the caller's promise; a key does not show where it came from).

    Raises `UsageError` for ids that are negative or above 32 bits (with the position), for other item types,
    and for a `previous` that is not a key.
    """
    if chunk_tokens < 1:
        raise UsageError(f"chunk_tokens is {chunk_tokens}: give the tokens of one chunk, 1 or more")
    if previous is None:
        key = namespace.digest
    elif len(previous) == KEY_BYTES:
        key = bytes(previous)
    else:
        raise UsageError(f"previous has {len(previous)} bytes: give the key of the chunk before, of {KEY_BYTES}")
    if native is not None:
        held, _kept = in_memory(tokens)
        keys = native.chunk_keys(key, held, chunk_tokens)
        if keys is not None:
            return keys
    words = token_words(tokens)
    if native is not None and (keys := native.chunk_keys(key, words.cast("I"), chunk_tokens)) is not None:
        return keys
    return _chained(key, words, chunk_tokens * TOKEN_BYTES)


def _chained(key: bytes, words: memoryview, step: int) -> list[bytes]:
    sha256 = hashlib.sha256
    keys = []
    for start in range(0, words.nbytes - step + 1, step):
        state = sha256(key)
        state.update(words[start : start + step])
        key = state.digest()
        keys.append(key)
    return keys


def keys_from_block_hashes(hashes: Sequence[bytes], namespace: Namespace) -> list[bytes]:
    """One key for each hash of an engine that chains its own, so that tokens are hashed once.

    Each hash must cover its block and all before it, cryptographically, in 32 bytes or more; the namespace is
    mixed in here. Where one object holds several of the engine's blocks, pass the hash of the last block of
    each: `hashes[n - 1 :: n]`. Raises `UsageError`, naming the position, for a hash that is shorter.
    """
    prefix = _BLOCK_TAG + namespace.digest
    if native is not None:
        keys = native.block_hash_keys(prefix, hashes, BLOCK_HASH_BYTES_MIN)
        if keys is not None:
            return keys
    root = hashlib.sha256(prefix)
    keys = []
    for position, block_hash in enumerate(hashes):
        if not isinstance(block_hash, bytes | bytearray | memoryview):
            raise UsageError(
                f"block hash {position} is a {type(block_hash).__name__}: give bytes (a 64-bit integer is "
                "too weak to stand for a prompt: switch the engine to SHA-256)"
            )
        if memoryview(block_hash).nbytes < BLOCK_HASH_BYTES_MIN:
            raise UsageError(
                f"block hash {position} has {memoryview(block_hash).nbytes} bytes and {BLOCK_HASH_BYTES_MIN} are "
                "needed: switch the engine to SHA-256, or use chunk_keys"
            )
        state = root.copy()
        state.update(block_hash)
        keys.append(state.digest())
    return keys
