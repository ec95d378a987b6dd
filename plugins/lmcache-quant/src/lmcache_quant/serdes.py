"""The serdes `int8`, `k8v4` and `int4`.

An encoded object is a head of four bytes, then the grids and codes that native/module.c describes. An object with a
value that is not finite, or so large that its step is beyond a half float, is stored as it is: the head says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lmcache_core.errors import DamagedObjectError, PluginError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Buffer, Serde
from lmcache_quant.settings import QuantSettings
from lmcache_quant.walk import DTYPES, Walk, walk_of

FORMAT = 1  # incremented when the meaning of the encoded bytes changes
CODED, UNCHANGED = b"qkv\x01", b"qkv\x00"
CURE = "reinstall lmcache-quant where a C compiler is found"


class QuantSerde(Serde):
    """Lossy: see the package's README for the bounds. Subclasses choose the bits."""

    lossless: ClassVar[bool] = False
    key_bits: ClassVar[int]
    value_bits: ClassVar[int]

    def __init__(self, settings: QuantSettings, isa: str = "auto") -> None:
        try:
            from lmcache_quant import _native
        except ImportError as error:
            raise PluginError(f"lmcache-quant was installed without its C kernels ({error}): {CURE}") from error
        self._native = _native
        self._isa = isa
        self._group_tokens = settings.group_tokens

    def parameters(self) -> Mapping[str, str | int | float]:
        return {"format": FORMAT, "group_tokens": self._group_tokens}

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        """An object has the size of its layout, so `nbytes` adds nothing."""
        coded = self._walk(layout).encoded_bytes(self.key_bits, self.value_bits)
        return len(CODED) + max(coded, layout.nbytes)

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        walk = self._walk(layout)
        if src.nbytes != layout.nbytes:
            raise UsageError(
                f"object {key.hex()[:16]}… has {src.nbytes:,} bytes and its layout {layout} {layout.nbytes:,}: "
                f"{self.name} needs every element of the layout"
            )
        coded = self._native.encode(src, *self._how(layout, walk))
        return [UNCHANGED, src] if coded is None else [CODED, coded]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        walk = self._walk(layout)
        if into.nbytes != layout.nbytes:
            raise UsageError(
                f"object {key.hex()[:16]}…: the target has {into.nbytes:,} bytes and its layout {layout} "
                f"{layout.nbytes:,}: {self.name} restores every element of the layout"
            )
        head, body = bytes(src[: len(CODED)]), src[len(CODED) :]
        expected = {CODED: walk.encoded_bytes(self.key_bits, self.value_bits), UNCHANGED: layout.nbytes}
        if body.nbytes != expected.get(head):
            raise self._damaged(key, f"{src.nbytes:,} bytes that begin with {head!r} are no object of {layout}")
        if head == UNCHANGED:
            into[:] = body
        elif (bad := self._native.decode(body, into, *self._how(layout, walk))) >= 0:
            raise self._damaged(key, f"number {bad} of its steps is one that no encoder writes")

    def _how(self, layout: Layout, walk: Walk) -> tuple[int, bool, bool, bytes, str]:
        nibbles = self.key_bits == 4, self.value_bits == 4
        return DTYPES.index(layout.dtype), *nibbles, walk.packed, self._isa

    def _walk(self, layout: Layout) -> Walk:
        return walk_of(layout, self._group_tokens, self.name)

    def _damaged(self, key: bytes, what: str) -> DamagedObjectError:
        return DamagedObjectError(
            f"{self.name} object {key.hex()[:16]}…: {what}: it is dropped, and stored again by its next writer"
        )


class Int8Serde(QuantSerde):
    """Keys and values in eight bits."""

    name: ClassVar[str] = "int8"
    key_bits: ClassVar[int] = 8
    value_bits: ClassVar[int] = 8


class K8v4Serde(QuantSerde):
    """Keys in eight bits, values in four."""

    name: ClassVar[str] = "k8v4"
    key_bits: ClassVar[int] = 8
    value_bits: ClassVar[int] = 4


class Int4Serde(QuantSerde):
    """Keys and values in four bits."""

    name: ClassVar[str] = "int4"
    key_bits: ClassVar[int] = 4
    value_bits: ClassVar[int] = 4
