"""The serde `lz4`."""

from __future__ import annotations

from typing import ClassVar

import lz4.block

from lmcache_compress.block_serde import BlockSerde
from lmcache_compress.settings import Lz4Settings
from lmcache_compress.shuffle import Bytes


class Lz4Serde(BlockSerde):
    """lz4 blocks, without lz4's own frame: lengths are in ours."""

    name: ClassVar[str] = "lz4"
    codec: ClassVar[bytes] = b"lz4 "

    def __init__(self, settings: Lz4Settings) -> None:
        super().__init__(settings.shuffle)
        self._level = settings.level

    def compress(self, block: Bytes) -> bytes:
        if self._level == 0:
            return bytes(lz4.block.compress(block, mode="default", store_size=False))
        return bytes(lz4.block.compress(block, mode="high_compression", compression=self._level, store_size=False))

    def decompress(self, block: memoryview, nbytes: int) -> bytes:
        try:
            return bytes(lz4.block.decompress(block, uncompressed_size=nbytes))
        except lz4.block.LZ4BlockError as error:
            raise ValueError(str(error)) from error
