"""The serde `planes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lmcache_compress.frame import BLOCK_BYTES, STORED, frame_bytes, opened, seal
from lmcache_compress.settings import ZstdSettings
from lmcache_compress.shuffle import Bytes, join_planes, plane_of
from lmcache_compress.zstd_serde import ZstdSerde
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Buffer

SAMPLE_BYTES = 2048  # of a plane, from all over it
SAMPLE_SHARE = 0.9  # what a sample has to shrink to, or its plane is stored as it is


class PlanesSerde(ZstdSerde):
    """Each block as planes of bytes of equal weight, the heaviest first: it has sign and exponent, and is entropy
    coded. A lighter one is coded only if a sample of it shrinks; mantissas do not, and are stored as they are.

    Bytes after the last whole element belong to the lightest plane. Opaque bytes are one plane.
    """

    name: ClassVar[str] = "planes"
    codec: ClassVar[bytes] = b"plns"

    def __init__(self, settings: None = None) -> None:
        super().__init__(ZstdSettings(shuffle=False))

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return frame_bytes(nbytes, layout.itemsize) + nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        nbytes, itemsize = src.nbytes, layout.itemsize
        source: Bytes = np.frombuffer(src, dtype=np.uint8)
        out: Bytes = np.empty(self.encoded_bytes_max(nbytes, layout), dtype=np.uint8)  # untouched pages cost nothing
        at, lengths = frame_bytes(nbytes, itemsize), []
        for start in range(0, nbytes, BLOCK_BYTES):
            block = source[start : start + BLOCK_BYTES]
            for plane in range(itemsize - 1, -1, -1):
                length = self._put(block, itemsize, plane, out[at:])
                lengths.append(length)
                at += length & ~STORED
        seal(out[:at], self.codec, itemsize, lengths, nbytes, layout, key)
        return [out[:at].data]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        itemsize = layout.itemsize
        _, lengths, at = opened(src, self.codec, into.nbytes, layout, key, itemsize)
        out: Bytes = np.frombuffer(into, dtype=np.uint8)
        for index in range(0, len(lengths), itemsize):
            start = index // itemsize * BLOCK_BYTES
            target = out[start : start + BLOCK_BYTES]
            count, rest = divmod(target.size, itemsize)
            planes: list[Bytes] = []
            for part, length in enumerate(lengths[index : index + itemsize], start=index):
                packed = src[at : at + (length & ~STORED)]
                at += packed.nbytes
                size = count + (rest if len(planes) == itemsize - 1 else 0)
                planes.append(np.frombuffer(self._block(packed, length, size, part, key), dtype=np.uint8))
            np.copyto(target[count * itemsize :], planes[-1][count:])
            planes[-1] = planes[-1][:count]
            join_planes(planes[::-1], target[: count * itemsize])

    def _put(self, block: Bytes, itemsize: int, plane: int, out: Bytes) -> int:
        """Write one plane to `out`. Returns its length, with STORED if it is not compressed."""
        count = block.size // itemsize
        tail = block[count * itemsize :] if plane == 0 else block[:0]
        size = count + tail.size
        coded = plane == itemsize - 1 or self._shrinks(block[plane : count * itemsize : itemsize])
        target = self._scratch.planes[:size] if coded else out[:size]
        plane_of(block[: count * itemsize], itemsize, plane, target[:count], self._scratch.words)
        np.copyto(target[count:], tail)
        if not coded:
            return size | STORED
        packed = np.frombuffer(self.compress(target), dtype=np.uint8)
        if packed.size >= size:
            np.copyto(out[:size], target)
            return size | STORED
        np.copyto(out[: packed.size], packed)
        return int(packed.size)

    def _shrinks(self, plane: Bytes) -> bool:
        sample = plane[:: max(1, plane.size // SAMPLE_BYTES)].copy()
        return len(self.compress(sample)) < SAMPLE_SHARE * sample.size
