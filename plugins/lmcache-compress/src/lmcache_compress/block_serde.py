"""What zstd and lz4 share: blocks, shuffling, scratch memory for each thread."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from lmcache_compress.frame import BLOCK_BYTES, FORMAT, STORED, damaged, frame_bytes, opened, seal
from lmcache_compress.shuffle import Bytes, shuffled, unshuffled
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Buffer, Serde


class _Scratch(threading.local):
    """Two blocks of each thread."""

    def __init__(self) -> None:
        self.planes: Bytes = np.empty(BLOCK_BYTES, dtype=np.uint8)
        self.words: Bytes = np.empty(BLOCK_BYTES, dtype=np.uint8)


class BlockSerde(Serde):
    """A serde that compresses block by block. Subclasses add a codec."""

    lossless: ClassVar[bool] = True
    codec: ClassVar[bytes]  # four bytes in each object

    def __init__(self, shuffle: bool) -> None:
        self._shuffle = shuffle
        self._scratch = _Scratch()

    @abstractmethod
    def compress(self, block: Bytes) -> bytes:
        """Any length; called by many threads at once."""

    @abstractmethod
    def decompress(self, block: memoryview, nbytes: int) -> bytes:
        """At most `nbytes`; never allocates more, whatever `block` says. Raises ValueError for an invalid block."""

    def parameters(self) -> Mapping[str, str | int | float]:
        return {"format": FORMAT}

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return frame_bytes(nbytes) + nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        nbytes = src.nbytes
        itemsize = layout.itemsize if self._shuffle else 1
        source: Bytes = np.frombuffer(src, dtype=np.uint8)
        out: Bytes = np.empty(self.encoded_bytes_max(nbytes, layout), dtype=np.uint8)  # untouched pages cost nothing
        at, lengths = frame_bytes(nbytes), []
        for start in range(0, nbytes, BLOCK_BYTES):
            block = source[start : start + BLOCK_BYTES]
            packed = np.frombuffer(self.compress(self._planes(block, itemsize)), dtype=np.uint8)
            stored = packed.size >= block.size
            if stored:
                packed = block
            np.copyto(out[at : at + packed.size], packed)
            lengths.append(packed.size | (STORED if stored else 0))
            at += packed.size
        seal(out[:at], self.codec, itemsize, lengths, nbytes, layout, key)
        return [out[:at].data]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        itemsize, lengths, at = opened(src, self.codec, into.nbytes, layout, key)
        out: Bytes = np.frombuffer(into, dtype=np.uint8)
        for index, length in enumerate(lengths):
            target = out[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            packed = src[at : at + (length & ~STORED)]
            at += packed.nbytes
            block = np.frombuffer(self._block(packed, length, target.size, index, key), dtype=np.uint8)
            if itemsize == 1 or length & STORED:
                np.copyto(target, block)
            else:
                unshuffled(block, itemsize, target)

    def _planes(self, block: Bytes, itemsize: int) -> Bytes:
        if itemsize == 1:
            return block
        planes = self._scratch.planes[: block.size]
        shuffled(block, itemsize, planes, self._scratch.words)
        return planes

    def _block(self, packed: memoryview, length: int, nbytes: int, index: int, key: bytes) -> Buffer:
        if length & STORED:
            block: Buffer = packed
        else:
            try:
                block = self.decompress(packed, nbytes)
            except ValueError as error:
                raise damaged(key, self.codec, f"its block {index} cannot be decoded: {error}") from error
        if len(block) != nbytes:
            raise damaged(key, self.codec, f"its block {index} has {len(block):,} bytes instead of {nbytes:,}")
        return block
