"""The serde `aesgcm`: AES-256-GCM, one object at a time, in segments.

    head      magic, format, segments, bytes of the object, key id
    segment   nonce (12 bytes, fresh from the system), ciphertext, tag (16 bytes)
    …

Authenticated with every segment, beside its own bytes: the head, the layout of what is sealed, the segment's number,
and the key that the chain gives, which holds the object's key, namespace, epoch, and a digest of its layout and codec
chain. So a segment is accepted only in its own place of its own object: nothing can be substituted, restored after a
clear, truncated, reordered or mixed from two writes of different length.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from cryptography.exceptions import InvalidTag

from lmcache_core.errors import DamagedObjectError, MismatchedObjectError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Buffer, Serde
from lmcache_crypto.keyring import KEY_ID_BYTES, keyring_of
from lmcache_crypto.settings import AesGcmSettings

MAGIC = b"LMGC"
FORMAT = 2  # incremented when the meaning of the encoded bytes changes
HEAD = struct.Struct(f"<4sHHQ{KEY_ID_BYTES}s")
BOUND = struct.Struct("<QI")  # layout fingerprint, segment number; then the key
NONCE_BYTES = 12
TAG_BYTES = 16
SEGMENT_BYTES = 1 << 30  # the library takes less than 2 GiB in a call; objects of usual size are one segment


class AesGcmSerde(Serde):
    """Encrypts with the current key; decrypts with whichever of its keys an object names."""

    name: ClassVar[str] = "aesgcm"
    lossless: ClassVar[bool] = True

    def __init__(self, settings: AesGcmSettings) -> None:
        self._keyring = keyring_of(settings)

    def parameters(self) -> Mapping[str, str | int | float]:
        """Without the key's id, which is in each object: after a rotation, older objects can still be read."""
        return {"format": FORMAT}

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        """Exact."""
        return HEAD.size + nbytes + _segments(nbytes) * (NONCE_BYTES + TAG_BYTES)

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        nbytes = src.nbytes
        head = HEAD.pack(MAGIC, FORMAT, _segments(nbytes), nbytes, self._keyring.current_id)
        cipher = self._keyring.current
        out = memoryview(bytearray(self.encoded_bytes_max(nbytes, layout)))
        out[: HEAD.size] = head
        for number, start, at, size in _places(nbytes):
            nonce = os.urandom(NONCE_BYTES)
            out[at : at + NONCE_BYTES] = nonce
            sealed = out[at + NONCE_BYTES : at + NONCE_BYTES + size + TAG_BYTES]
            cipher.encrypt_into(nonce, src[start : start + size], _bound(head, layout, number, key), sealed)
        return [out]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        nbytes = into.nbytes
        wanted = self.encoded_bytes_max(nbytes, layout)
        if src.nbytes != wanted:
            raise _damaged(key, f"{src.nbytes:,} bytes came back and {layout} needs {wanted:,}")
        head = bytes(src[: HEAD.size])
        magic, version, segments, recorded, key_id = HEAD.unpack(head)
        if (magic, version, segments, recorded) != (MAGIC, FORMAT, _segments(nbytes), nbytes):
            raise _damaged(key, "its header is not one that this version writes for this layout")
        cipher = self._keyring.cipher(key_id)
        if cipher is None:
            known = ", ".join(each.hex() for each in self._keyring.ids)
            raise MismatchedObjectError(
                f"aesgcm object {key.hex()[:16]}… was encrypted with key {key_id.hex()}; the configured keys are "
                f"{known}: add that key to read it; it is left where it is"
            )
        for number, start, at, size in _places(nbytes):
            nonce = bytes(src[at : at + NONCE_BYTES])
            sealed = src[at + NONCE_BYTES : at + NONCE_BYTES + size + TAG_BYTES]
            try:
                cipher.decrypt_into(nonce, sealed, _bound(head, layout, number, key), into[start : start + size])
            except InvalidTag:
                # By now GCM has written plain text that is not authenticated.
                raise _damaged(
                    key, "it fails authentication: changed, or written for another object or layout"
                ) from None

    def __repr__(self) -> str:
        return f"<AesGcmSerde with {self._keyring!r}>"


def _segments(nbytes: int) -> int:
    """An empty object has one too: its tag authenticates it."""
    return max(1, -(-nbytes // SEGMENT_BYTES))


def _places(nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, where its bytes start in the object, where it starts when encoded, bytes) of each segment."""
    at = HEAD.size
    for number in range(_segments(nbytes)):
        start = number * SEGMENT_BYTES
        size = min(SEGMENT_BYTES, nbytes - start)
        yield number, start, at, size
        at += NONCE_BYTES + size + TAG_BYTES


def _bound(head: bytes, layout: Layout, number: int, key: bytes) -> bytes:
    return head + BOUND.pack(layout.fingerprint, number) + key


def _damaged(key: bytes, what: str) -> DamagedObjectError:
    return DamagedObjectError(
        f"aesgcm object {key.hex()[:16]}…: {what}; it is dropped, and stored again by its next writer"
    )
