"""Chunk keys: k_i = SHA-256(k_{i-1} ‖ tokens_i), k_{-1} = SHA-256(namespace).

A key stands for everything before it as well: two prompts share their first n keys exactly if they share a
namespace and their first n chunks. Nothing depends on Python's `hash()`, on the process or on the machine.

The C extension hashes a whole prompt in one call. What it does not take, it leaves to the way in Python, which gives
the same keys, and raises what there is to raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from lmcache_core.errors import UsageError
from lmcache_core.limits import CHUNK_TOKENS, KEY_BYTES
from lmcache_core.native import native
from lmcache_core.tokens.canonical import TOKEN_BYTES, Tokens, in_memory, token_words
from lmcache_core.tokens.namespace import Namespace

BLOCK_HASH_BYTES_MIN = 32  # 256 bits: below that a collision, which serves another prompt's KV, is within reach
NAMED_HASH_BYTES_MIN = 16  # of an algorithm that the caller has named, and so knows

# Separate these keys from chunk keys: eight tokens are as long as a hash.
_BLOCK_TAG = b"lmcache-core block hash 1"
_NAMED_BLOCK_TAG = b"lmcache-core named block hash 1"
_EXTRA_TAG = b"lmcache-core chunk extra 1"


def chunk_keys(
    tokens: Tokens,
    namespace: Namespace,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    previous: bytes | None = None,
    extra: bytes | Mapping[int, bytes] = b"",
) -> list[bytes]:
    """One 32-byte key for each whole chunk of `tokens`; what is left after the last whole chunk has none.

    `tokens`: ints in a list, tuple, range or other iterable; anything with the buffer protocol whose items are
    32- or 64-bit integers (array, memoryview, numpy array); or a torch tensor. One dimension. Equal ids give
    equal keys, whatever holds them. `previous` continues a sequence: the key of the chunk right before
    `tokens`, from the same namespace (the caller's promise; a key does not show where it came from).

    `extra` is what the KV depends on beside the tokens: an adapter's name and version, a salt, the hash of an image. As
    bytes it stands for the whole prompt; by number of a chunk, counted from the first of `tokens`, for that chunk and
    all behind it. Where `previous` has it already, do not give it again.

    Raises `UsageError` for ids that are negative or above 32 bits (with the position), for other item types,
    for a `previous` that is not a key, and for an `extra` that is of no chunk.
    """
    if chunk_tokens < 1:
        raise UsageError(f"chunk_tokens is {chunk_tokens}: give the tokens of one chunk, 1 or more")
    if previous is None:
        key = namespace.digest
    elif len(previous) == KEY_BYTES:
        key = bytes(previous)
    else:
        raise UsageError(f"previous has {len(previous)} bytes: give the key of the chunk before, of {KEY_BYTES}")
    if extra:
        return _keys_with_extra(key, tokens, chunk_tokens, _extra_by_chunk(extra, previous is not None))
    if native is not None:
        held, _kept = in_memory(tokens)
        keys = native.chunk_keys(key, held, chunk_tokens)
        if keys is not None:
            return keys
    return _keys_of_words(key, token_words(tokens), chunk_tokens)


def _keys_of_words(key: bytes, words: memoryview, chunk_tokens: int) -> list[bytes]:
    if native is not None and (keys := native.chunk_keys(key, words.cast("I"), chunk_tokens)) is not None:
        return keys
    return _chained(key, words, chunk_tokens * TOKEN_BYTES)


def _extra_by_chunk(extra: bytes | Mapping[int, bytes], continues: bool) -> dict[int, bytes]:
    if isinstance(extra, bytes):
        if continues:
            raise UsageError(
                "extra is of the whole prompt, and previous has it: leave it out, or give it by chunk, as {0: extra}"
            )
        return {0: extra}
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra is a {type(extra).__name__}: give bytes, or a mapping from chunk numbers to bytes")
    for number, each in extra.items():
        if type(number) is not int or number < 0:
            raise UsageError(f"extra has something for chunk {number!r}: give chunk numbers, from 0 on")
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
    """From each start to the next; together all chunks."""
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
    hashes: Sequence[bytes], namespace: Namespace, *, algorithm: str = "", seed: bytes | str = b""
) -> list[bytes]:
    """One key for each hash of an engine that chains its own, so that tokens are hashed once.

    Each hash must cover its block and all before it; the namespace is mixed in here. Where one object holds several of
    the engine's blocks, pass the hash of the last block of each: `hashes[n - 1 :: n]`.

    `algorithm` and `seed` are the engine's, and become part of the keys: other settings give other hashes for the same
    blocks, and equal ones need not mean the same. Without a name hashes have 32 bytes or more; with one 16 will do, as
    those of "xxhash": whoever chooses prompts can make two of these collide, so that is for prompts that you trust.
    Raises `UsageError`, naming the position, for a hash that is shorter.
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
    """Both, each behind its length. A seed that is text is another than its bytes."""
    if not isinstance(algorithm, str) or not isinstance(seed, bytes | str):
        raise UsageError("algorithm is the name of the engine's hash, and seed its bytes or text")
    kind, raw = (b"t", seed.encode()) if isinstance(seed, str) else (b"b", seed)
    parts = [algorithm.encode(), kind + raw]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
