"""The serde contract: bytes to bytes, on the way to a tier and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from lmcache_core.pool.layout import Layout

__all__ = [
    "Buffer",
    "Serde",
]

Buffer = bytes | bytearray | memoryview


class Serde(ABC):
    """One transform of a codec chain. Runs in a tier's lanes: do the heavy work in calls that release the GIL.

    Built as `Serde(settings)`, with an instance of the settings model that its ComponentSpec names (None: it has none).

    Attributes:
        name: The component's name. It is recorded in each object's header.
        lossless: Whether decoding restores the same bytes; unless a serde says otherwise, it does. A tier can demand a
            certificate of one that does not.

    One instance serves all threads of a tier at once. Its name and `parameters()` are recorded in each object's header
    and compared when loading, so an object encoded with other settings is a miss with a reason, never wrong bytes.

    `key` identifies the object on its tier: 60 opaque bytes, made of its key, namespace, epoch, and a digest of its
    layout and codec chain. No two objects share one. A serde that authenticates must bind all of it; the object's
    header is protected only against accidents, and anyone who can write to the medium can write a header, too.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True

    def parameters(self) -> Mapping[str, str | int | float]:
        """What a decoder must have in common. Never a secret (a key's id, not the key)."""
        return {}

    @abstractmethod
    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        """The most bytes that `encode` returns for an object of `nbytes`.

        Lengths read from a medium are checked against it before anything is allocated. Raises `UsageError` for a layout
        that this serde cannot encode: it is asked before the first object of a layout is accepted, and objects that a
        tier could never store are refused then.
        """

    def encoded_layout(self, layout: Layout, nbytes: int) -> Layout:
        """The layout of the encoded bytes for the next serde of the chain: opaque bytes by default."""
        return Layout("uint8", (max(1, nbytes),))

    @abstractmethod
    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        """The encoded object, as buffers that the caller sends one after another.

        `src` is read-only, one-dimensional bytes, valid until the buffers have been sent; it must not be kept or
        changed. Raises `UsageError` for a layout that this serde cannot encode.
        """

    @abstractmethod
    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        """Decode the object of `layout` into `into`, all `into.nbytes` of it.

        Raises `DamagedObjectError` if `src` is not what `encode` returned for this key and layout: the object
        counts as damaged. Raises `MismatchedObjectError` if it may be valid with other settings: the object stays.
        """
