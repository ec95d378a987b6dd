"""Chunk keys: k_i = SHA-256(k_{i-1} ‖ tokens_i), k_{-1} = SHA-256(namespace).

A key stands for everything before it as well: two prompts share their first n keys exactly if they share a namespace
and their first n chunks. Nothing depends on Python's `hash()`, the process or the machine.

The C extension hashes a whole prompt in one call. Inputs that it does not take go through the Python implementation,
which makes the same keys and raises the errors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from lmcache_core.errors import UsageError
from lmcache_core.limits import CHUNK_TOKENS, KEY_BYTES
from lmcache_core.native import native
from lmcache_core.tokens.canonical import TOKEN_BYTES, Tokens, in_memory, token_words

BLOCK_HASH_BYTES_MIN = 32  # 256 bits: with fewer, a collision, which serves another prompt's KV, is within reach
NAMED_HASH_BYTES_MIN = 16  # for an algorithm that the caller has named, and so knows

# These separate keys of block hashes from chunk keys: eight tokens are as long as a hash.
_BLOCK_TAG = b"lmcache-core block hash 1"
_NAMED_BLOCK_TAG = b"lmcache-core named block hash 1"
_EXTRA_TAG = b"lmcache-core chunk extra 1"


class KeyRoot(Protocol):
    """A `Namespace`, or anything else that has the digest of one."""

    @property
    def digest(self) -> bytes:
        """32 bytes, of which every key is made."""
        ...


def chunk_keys(
    tokens: Tokens,
    namespace: KeyRoot,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    previous: bytes | None = None,
    extra: bytes | Mapping[int, bytes] = b"",
) -> list[bytes]:
    """One 32-byte key for each whole chunk of `tokens`; a rest shorter than a chunk has none.

    `tokens`: ints in a list, tuple, range or other iterable; anything with the buffer protocol whose items are
    32- or 64-bit integers (array, memoryview, numpy array); or a torch tensor. One dimension. Equal ids give
    equal keys, whatever holds them. `previous` continues a sequence: the key of the chunk right before
    `tokens`, from the same namespace (the caller's promise; a key does not show where it came from).

    `extra` is what the KV depends on besides the tokens: an adapter's name and version, a salt, the hash of an image.
    As bytes it applies to the whole prompt; as a mapping by chunk number, counted from the first of `tokens`, it
    applies to that chunk and all after it. If `previous` includes it already, do not pass it again.

    Raises `UsageError` for ids that are negative or above 32 bits (with the position), for other item types, for a
    `previous` that is not a key, and for an `extra` for a chunk that does not exist.
    """
    if chunk_tokens < 1:
        raise UsageError(f"chunk_tokens must be 1 or more, got {chunk_tokens}")
    key = namespace.digest if previous is None else _key_of(previous)
    if extra:
        return _keys_with_extra(key, tokens, chunk_tokens, _extra_by_chunk(extra, previous is not None))
    if native is not None:
        held, _kept = in_memory(tokens)
        keys = native.chunk_keys(key, held, chunk_tokens)
        if keys is not None:
            return keys
    return _keys_of_words(key, token_words(tokens), chunk_tokens)


def _key_of(previous: bytes) -> bytes:
    try:
        key = memoryview(previous).tobytes()
    except TypeError:
        raise UsageError(f"previous is a {type(previous).__name__}: pass the key of the previous chunk") from None
    if len(key) != KEY_BYTES:
        raise UsageError(f"previous has {len(key)} bytes: pass the key of the previous chunk, of {KEY_BYTES} bytes")
    return key


def _keys_of_words(key: bytes, words: memoryview, chunk_tokens: int) -> list[bytes]:
    if native is not None and (keys := native.chunk_keys(key, words.cast("I"), chunk_tokens)) is not None:
        return keys
    return _chained(key, words, chunk_tokens * TOKEN_BYTES)


def _extra_by_chunk(extra: bytes | Mapping[int, bytes], continues: bool) -> dict[int, bytes]:
    if isinstance(extra, bytes):
        if continues:
            raise UsageError(
                "extra applies to the whole prompt, so previous includes it: leave it out, or pass it by "
                "chunk, as {0: extra}"
            )
        return {0: extra}
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra is a {type(extra).__name__}: give bytes, or a mapping from chunk numbers to bytes")
    for number, each in extra.items():
        if type(number) is not int or number < 0:
            raise UsageError(f"extra has an entry for chunk {number!r}: chunk numbers are whole and start at 0")
        if not isinstance(each, bytes):
            raise UsageError(f"extra of chunk {number} is a {type(each).__name__}: give bytes")
    return {number: each for number, each in extra.items() if each}


def _keys_with_extra(key: bytes, tokens: Tokens, chunk_tokens: int, extra: Mapping[int, bytes]) -> list[bytes]:
    words, step = token_words(tokens), chunk_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    for first, end in _stretches(sorted(extra), words.nbytes // step):
        if first in extra:
            key = hashlib.sha256(_EXTRA_TAG + key + extra[first]).digest()
        keys += _keys_of_words(key, words[first * step : end * step], chunk_tokens)
        key = keys[-1]
    return keys


def _stretches(starts: Sequence[int], chunks: int) -> Iterator[tuple[int, int]]:
    """From each start to the next; together they cover all chunks."""
    marks = [0, *(start for start in starts if 0 < start < chunks), chunks]
    return ((first, end) for first, end in pairwise(marks) if end > first)


def _chained(key: bytes, words: memoryview, step: int) -> list[bytes]:
    sha256 = hashlib.sha256
    keys = []
    for start in range(0, words.nbytes - step + 1, step):
        state = sha256(key)
        state.update(words[start : start + step])
        key = state.digest()
        keys.append(key)
    return keys


def keys_from_block_hashes(
    hashes: Sequence[bytes], namespace: KeyRoot, *, algorithm: str = "", seed: bytes | str = b""
) -> list[bytes]:
    """One key for each chained block hash of an engine, so that tokens are hashed only once.

    Each hash must cover its block and all before it; the namespace is mixed in here. If one object holds several engine
    blocks, pass the hash of the last block of each: `hashes[n - 1 :: n]`.

    `algorithm` and `seed` are the engine's, and become part of the keys: other settings give other hashes for the same
    blocks, and equal ones need not mean the same. Without a name, hashes must have 32 bytes or more; with one, 16 are
    enough, as for "xxhash": anyone who chooses prompts can make two of those collide, so use it only for trusted
    prompts. Raises `UsageError`, with the position, for a hash that is too short.
    """
    prefix, bytes_min = _BLOCK_TAG + namespace.digest, BLOCK_HASH_BYTES_MIN
    if algorithm or seed:
        prefix = _NAMED_BLOCK_TAG + namespace.digest + _bound(algorithm, seed)
    if algorithm:
        bytes_min = NAMED_HASH_BYTES_MIN
    if native is not None:
        keys = native.block_hash_keys(prefix, hashes, bytes_min)
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
        if memoryview(block_hash).nbytes < bytes_min:
            raise UsageError(
                f"block hash {position} has {memoryview(block_hash).nbytes} bytes and {bytes_min} are "
                "needed: name the algorithm if it has 16, switch the engine to SHA-256, or use chunk_keys"
            )
        state = root.copy()
        state.update(block_hash)
        keys.append(state.digest())
    return keys


def _bound(algorithm: str, seed: bytes | str) -> bytes:
    """Both, each prefixed with its length. A text seed differs from the seed with the same bytes."""
    if not isinstance(algorithm, str) or not isinstance(seed, bytes | str):
        raise UsageError("algorithm must be the name of the engine's hash, and seed bytes or text")
    kind, raw = (b"t", seed.encode()) if isinstance(seed, str) else (b"b", seed)
    parts = [algorithm.encode(), kind + raw]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
