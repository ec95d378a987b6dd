"""The codec chain of a tier: its serdes, applied in order when storing and in reverse when loading."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lmcache_core.errors import DamagedObjectError, SettingsError, UsageError
from lmcache_core.limits import CHAIN_SERDES_MAX, PAGE_BYTES
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.contract import Serde
from lmcache_core.serde.identity import IdentitySerde
from lmcache_core.serde.scratch import Scratch


class Encoded(NamedTuple):
    """`buffers` follow one another on the medium; `lengths[i]` is the size after serde i, and the last one is the total
    size of the buffers (no lengths: nothing was encoded)."""

    buffers: Sequence[memoryview]
    lengths: Sequence[int]


class CodecChain:
    """Serdes applied one after another. An empty chain costs nothing: the payload is the pool's own memory.

    Shared by all lanes of a tier; each thread has its own Scratch.
    """

    def __init__(self, serdes: Sequence[Serde] = ()) -> None:
        self.serdes = tuple(serde for serde in serdes if not isinstance(serde, IdentitySerde))
        if len(self.serdes) > CHAIN_SERDES_MAX:
            raise SettingsError(
                f"a codec chain has at most {CHAIN_SERDES_MAX} serdes, got {len(self.serdes)}: use fewer"
            )

    @property
    def is_identity(self) -> bool:
        """Whether encoded bytes are the object's bytes."""
        return not self.serdes

    @property
    def lossless(self) -> bool:
        return all(serde.lossless for serde in self.serdes)

    @property
    def lossy(self) -> list[tuple[str, Mapping[str, str | int | float]]]:
        """Name and parameters of each serde that does not restore the same bytes."""
        return [(serde.name, dict(serde.parameters())) for serde in self.serdes if not serde.lossless]

    def describe(self) -> list[tuple[str, Mapping[str, str | int | float]]]:
        """Name and parameters of each serde, as an object's header records them."""
        return [(serde.name, dict(serde.parameters())) for serde in self.serdes]

    def encoded_bytes_max(self, layout: Layout) -> int:
        """The most bytes that an object of this layout can take on the medium, without its header."""
        nbytes = layout.nbytes
        for serde in self.serdes:
            nbytes = serde.encoded_bytes_max(nbytes, layout)
            layout = serde.encoded_layout(layout, nbytes)
        return nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes, scratch: Scratch) -> Encoded:
        """The object in its form for the medium. Buffers may live in `scratch`, or be `src` itself. Raises `UsageError`
        for what a serde made and `decode` would refuse."""
        buffers: Sequence[memoryview] = [src]
        lengths: list[int] = []
        nbytes = src.nbytes
        for serde in self.serdes:
            bound = serde.encoded_bytes_max(nbytes, layout)
            encoded = serde.encode(_joined(buffers, scratch).toreadonly(), layout, key)
            buffers = [memoryview(part).cast("B") for part in encoded]
            nbytes = sum(part.nbytes for part in buffers)
            if not 0 < nbytes <= bound:  # no load would accept it
                raise UsageError(f"serde {serde.name!r} made {nbytes:,} bytes, and says that it makes 1 to {bound:,}")
            lengths.append(nbytes)
            layout = serde.encoded_layout(layout, nbytes)
        return Encoded(buffers, lengths)

    def decode(
        self,
        src: memoryview,
        into: memoryview,
        layout: Layout,
        key: bytes,
        lengths: Sequence[int],
        scratch: Scratch,
    ) -> None:
        """Decode the object into `into`. `lengths` are those that `encode` returned.

        Raises `DamagedObjectError` if a serde refuses its input or leaves a part of its target as it was: another's
        bytes are there. Also if the lengths do not fit the chain, before anything is allocated from them.
        """
        if len(lengths) != len(self.serdes) or (lengths and lengths[-1] != src.nbytes):
            raise DamagedObjectError(
                f"object {key.hex()[:16]}… records {len(lengths)} encoded lengths, and the chain has "
                f"{len(self.serdes)} serdes, or its size differs: store it again"
            )
        layouts = self._stages(layout, key, lengths)
        for step in range(len(self.serdes) - 1, -1, -1):
            target = into if step == 0 else scratch.take(lengths[step - 1])
            fences = _Fences(target)
            self.serdes[step].decode(src.toreadonly(), target, layouts[step], key)
            if fences.stand:
                name = self.serdes[step].name
                raise DamagedObjectError(f"serde {name!r} filled only a part of object {key.hex()[:16]}…: repair it")
            src = target

    def _stages(self, layout: Layout, key: bytes, lengths: Sequence[int]) -> list[Layout]:
        """The layout before each serde, after each recorded length was checked against its serde's bound: lengths come
        from the medium, and memory is allocated from them."""
        layouts, nbytes = [layout], layout.nbytes
        for serde, length in zip(self.serdes, lengths, strict=True):
            bound = serde.encoded_bytes_max(nbytes, layouts[-1])
            if not 0 < length <= bound:
                raise DamagedObjectError(
                    f"object {key.hex()[:16]}… records {length:,} bytes after serde {serde.name!r}, which makes at "
                    f"most {bound:,} here: store it again"
                )
            layouts.append(serde.encoded_layout(layouts[-1], length))
            nbytes = length
        return layouts


class _Fences:
    """Words that no decoder writes by chance, in each page of what it has to fill and at the end. One that still stands
    was not filled. Fencing takes a hundredth of the time in which the memory could be cleared."""

    _WORD = int.from_bytes(os.urandom(8), sys.byteorder)
    _WORD_BYTES = 8
    _STEP = PAGE_BYTES // _WORD_BYTES

    def __init__(self, target: memoryview) -> None:
        flat = target.cast("B")
        whole = flat.nbytes // self._WORD_BYTES * self._WORD_BYTES
        self._places = [flat[:whole].cast("Q")[:: self._STEP], flat[flat.nbytes - whole :].cast("Q")[-1:]]
        for words in self._places:
            words[:] = memoryview(array("Q", [self._WORD]) * len(words))

    @property
    def stand(self) -> bool:
        """Whether any still stands."""
        return any(self._WORD in words.tolist() for words in self._places)


def _joined(parts: Sequence[memoryview], scratch: Scratch) -> memoryview:
    """One view of all parts: the next serde of a chain reads one contiguous run of bytes."""
    if len(parts) == 1:
        return parts[0]
    whole = scratch.take(sum(part.nbytes for part in parts))
    at = 0
    for part in parts:
        whole[at : at + part.nbytes] = part
        at += part.nbytes
    return whole
