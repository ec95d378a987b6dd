"""The codec chain and its scratch memory."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.errors import DamagedObjectError, SettingsError
from lmcache_core.limits import CHAIN_SERDES_MAX, SCRATCH_BYTES_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.contract import Buffer, Serde
from lmcache_core.serde.identity import IdentitySerde
from lmcache_core.serde.scratch import Scratch

KEY = b"k" * 32


class Deflate(Serde):
    """zlib, in two buffers, so that a chain has something to join."""

    name, lossless = "deflate", True

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes + nbytes // 1000 + 64

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        assert src.readonly
        packed = zlib.compress(src, 1)
        return [packed[:5], memoryview(packed)[5:]]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        try:
            plain = zlib.decompress(src)
        except zlib.error as error:
            raise DamagedObjectError(str(error)) from error
        if len(plain) != into.nbytes:
            raise DamagedObjectError("wrong size")
        into[:] = plain


class Xor(Serde):
    """Changes every byte and no length; records what a decoder must agree on."""

    name, lossless = "xor", True

    def __init__(self, mask: int) -> None:
        self._mask = mask

    def parameters(self) -> dict[str, str | int | float]:
        return {"mask": self._mask}

    def encoded_bytes_max(self, nbytes: int, layout: Layout) -> int:
        return nbytes

    def encode(self, src: memoryview, layout: Layout, key: bytes) -> Sequence[Buffer]:
        return [bytes(byte ^ self._mask for byte in src)]

    def decode(self, src: memoryview, into: memoryview, layout: Layout, key: bytes) -> None:
        into[:] = bytes(byte ^ self._mask for byte in src)


def _round_trip(chain: CodecChain, content: bytes) -> bytes:
    layout, scratch = Layout("uint8", (len(content),)), Scratch()
    encoded = chain.encode(memoryview(content), layout, KEY, scratch)
    wire = b"".join(bytes(part) for part in encoded.buffers)
    assert len(wire) <= chain.encoded_bytes_max(layout)
    scratch.reset()
    back = memoryview(bytearray(len(content)))
    chain.decode(memoryview(wire), back, layout, KEY, encoded.lengths, scratch)
    return bytes(back)


@given(st.binary(min_size=1, max_size=2000), st.lists(st.sampled_from("dxyi"), max_size=CHAIN_SERDES_MAX))
def test_any_chain_gives_back_what_it_was_given(content: bytes, names: list[str]) -> None:
    made: dict[str, Serde] = {"d": Deflate(), "x": Xor(0x5A), "y": Xor(0xFF), "i": IdentitySerde()}
    chain = CodecChain([made[name] for name in names])
    if chain.is_identity:
        assert set(names) <= {"i"}
        return
    assert _round_trip(chain, content) == content


def test_an_identity_chain_sends_the_objects_own_memory() -> None:
    chain = CodecChain([IdentitySerde(), IdentitySerde()])
    source = memoryview(bytearray(100))
    encoded = chain.encode(source, Layout("uint8", (100,)), KEY, Scratch())
    assert encoded.buffers[0] is source
    assert (chain.is_identity, chain.describe(), list(encoded.lengths)) == (True, [], [])


def test_a_chain_describes_itself_in_order_with_parameters() -> None:
    assert CodecChain([Xor(3), Deflate()]).describe() == [("xor", {"mask": 3}), ("deflate", {})]


def test_lengths_that_do_not_fit_are_damage() -> None:
    chain = CodecChain([Deflate()])
    layout = Layout("uint8", (10,))
    for lengths in ([], [5], [3, 3]):
        with pytest.raises(DamagedObjectError):
            chain.decode(memoryview(b"abc"), memoryview(bytearray(10)), layout, KEY, lengths, Scratch())


class _Watched(Scratch):
    """Remembers the largest buffer that was asked for."""

    largest = 0

    def take(self, nbytes: int) -> memoryview:
        self.largest = max(self.largest, nbytes)
        return super().take(min(nbytes, 1 << 20))  # a chain that asks for more fails its test, not the machine


@given(
    st.lists(st.sampled_from("dx"), min_size=2, max_size=CHAIN_SERDES_MAX),
    st.data(),
    st.sampled_from([0, -1, 1 << 20, 1 << 30, (1 << 64) - 1]),
)
def test_a_forged_length_is_damage_before_anything_is_allocated(
    names: list[str], data: st.DataObject, forged: int
) -> None:
    made: dict[str, Serde] = {"d": Deflate(), "x": Xor(0x5A)}
    chain, layout, scratch = CodecChain([made[name] for name in names]), Layout("uint8", (1000,)), _Watched()
    encoded = chain.encode(memoryview(bytes(1000)), layout, KEY, Scratch())
    wire = b"".join(bytes(part) for part in encoded.buffers)
    lengths = list(encoded.lengths)
    lengths[data.draw(st.integers(0, len(lengths) - 2))] = forged
    with pytest.raises(DamagedObjectError, match="at most"):
        chain.decode(memoryview(wire), memoryview(bytearray(1000)), layout, KEY, lengths, scratch)
    assert scratch.largest == 0


def test_too_many_serdes_are_refused() -> None:
    with pytest.raises(SettingsError, match="at most 8 serdes, got 9"):
        CodecChain([Deflate()] * (CHAIN_SERDES_MAX + 1))


def test_the_identity_serde_refuses_another_size() -> None:
    with pytest.raises(DamagedObjectError):
        IdentitySerde().decode(memoryview(b"abc"), memoryview(bytearray(4)), Layout("uint8", (4,)), KEY)


@given(st.lists(st.integers(0, 3 << 20), max_size=20))
def test_scratch_views_never_overlap_and_are_page_aligned(sizes: list[int]) -> None:
    import ctypes

    scratch = Scratch()
    taken = []
    for size in sizes:
        view = scratch.take(size)
        assert view.nbytes == size
        if size:
            taken.append((ctypes.addressof(ctypes.c_char.from_buffer(view)), size, view))
    assert all(address % 4096 == 0 for address, _, _ in taken)
    spans = sorted((address, address + size) for address, size, _ in taken)
    assert all(a_end <= b_start for (_, a_end), (b_start, _) in itertools.pairwise(spans))


def test_scratch_is_reused_and_does_not_keep_what_is_over_its_limit() -> None:
    scratch = Scratch()
    scratch.take(1 << 20)
    scratch.take(4 << 20)
    scratch.reset()
    first = scratch.take(4 << 20)
    scratch.reset()
    again = scratch.take(4 << 20)
    again[0] = 77
    assert first[0] == 77, "the same memory"
    huge = scratch.take(SCRATCH_BYTES_MAX + 1)
    assert huge.nbytes == SCRATCH_BYTES_MAX + 1
    assert scratch.nbytes <= SCRATCH_BYTES_MAX
