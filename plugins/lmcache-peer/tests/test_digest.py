"""Digests: a reader's copy never lacks what its owner's index has, however it got there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.native import native
from lmcache_peer.digest import BLOCK_BYTES, BLOCKS_MAX, NAME_BYTES, Digest, PublishedDigest, place_of
from lmcache_peer.errors import LyingPeerError
from lmcache_peer.limits import DIGEST_BYTES_MIN, DIGEST_HISTORY
from lmcache_peer.messages import DigestReply


def name(number: int) -> bytes:
    return random.Random(number).randbytes(44)


def bits_of(numbers: set[int], nbytes: int) -> bytearray:
    """What `Index.digest` would fill a buffer of this size with."""
    bits = bytearray(nbytes)
    for number in numbers:
        place = place_of(name(number))
        at = place.block % (nbytes // BLOCK_BYTES) * BLOCK_BYTES
        block = int.from_bytes(bits[at : at + BLOCK_BYTES], "little") | place.bits
        bits[at : at + BLOCK_BYTES] = block.to_bytes(BLOCK_BYTES, "little")
    return bits


def take(reader: Digest, owner: PublishedDigest) -> DigestReply:
    reply, content = owner.since(reader.version)
    room = reader.room_for(reply)
    room[:] = b"".join(content)
    reader.apply(reply, room)
    return reply


_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 30)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("renew"), st.just(0)),
        st.tuples(st.just("grow"), st.just(0)),
        st.tuples(st.just("pull"), st.integers(0, 2)),
        st.tuples(st.just("forget"), st.integers(0, 2)),
    ),
    max_size=60,
)


@given(_OPERATIONS)
def test_a_reader_that_is_up_to_date_never_lacks_an_object(operations: list[tuple[str, int]]) -> None:
    owner, readers = PublishedDigest(), [Digest() for _ in range(3)]
    there: set[int] = set()
    published: set[int] = set()
    size = DIGEST_BYTES_MIN
    for operation, number in operations:
        match operation:
            case "store":
                there.add(number)
            case "remove":
                there.discard(number)
            case "renew":
                owner.renew(bits_of(there, size), len(there))
                published = set(there)
            case "grow":
                size = min(2 * size, 4 * DIGEST_BYTES_MIN)
                owner.renew(bits_of(there, size), len(there))
                published = set(there)
            case "pull":
                take(readers[number], owner)
                reader = readers[number]
                assert all(reader.may_have(place_of(name(each))) for each in published)
                take(fresh := Digest(), owner)
                for each in map(name, range(31)):
                    assert reader.may_have(place_of(each)) == fresh.may_have(place_of(each)), "nothing stays behind"
            case "forget":
                readers[number] = Digest()


def test_a_difference_is_small_and_an_old_version_gets_the_whole() -> None:
    owner, reader, late = PublishedDigest(), Digest(), Digest()
    assert take(reader, owner).whole
    take(late, owner)
    there: set[int] = set()
    for number in range(DIGEST_HISTORY + 5):
        there.add(number)
        owner.renew(bits_of(there, DIGEST_BYTES_MIN), len(there))
        reply = take(reader, owner)
        assert not reply.whole
        assert reply.changed == 1
        assert reader.may_have(place_of(name(number)))
    assert take(late, owner).whole
    assert all(late.may_have(place_of(name(number))) for number in there)
    assert take(late, owner).changed == 0


def test_a_digest_grows_with_what_it_stands_for() -> None:
    owner = PublishedDigest()
    assert owner.wants(DIGEST_BYTES_MIN * 8 // 16) is None
    larger = owner.wants(DIGEST_BYTES_MIN * 8)
    assert larger is not None
    assert len(larger) == 16 * DIGEST_BYTES_MIN
    most = owner.wants(1 << 60)
    assert most is not None
    assert len(most) == BLOCKS_MAX * BLOCK_BYTES


def test_a_change_behind_the_end_is_a_lie() -> None:
    reader = Digest()
    reply = DigestReply(1, 1, False, 1, 1)
    content = reader.room_for(reply)
    content[:4] = (1).to_bytes(4, "little")
    with pytest.raises(LyingPeerError, match="behind the last one"):
        reader.apply(reply, content)


@pytest.mark.skipif(native is None, reason="the index is the C extension's")
def test_owner_and_reader_agree_where_a_name_stands() -> None:
    """The index says which bits, in C; a reader finds them."""
    import mmap

    from lmcache_core.pool.layout import Layout

    class Placed:
        namespace, layout_id, checksum = 7, 1, None

        def __init__(self, key: bytes, offset: int) -> None:
            self.key, self.offset = key, offset

    assert native is not None
    nbytes = Layout("uint8", (4096,)).nbytes
    memory = mmap.mmap(-1, (1 + 1 + 32 + 64) * 4096)
    index = native.Index(
        memory, index_offset=4096, entries=1024, data_offset=34 * 4096, segment_bytes=len(memory), serving_offset=8
    )
    keys = [random.Random(number).randbytes(32) for number in range(64)]
    placed = [Placed(key, (34 + at) * 4096) for at, key in enumerate(keys)]
    assert index.publish(placed, {1: nbytes}, 1000) == 64
    owner, reader = PublishedDigest(), Digest()
    bits = owner.blank()
    owner.renew(bits, index.digest(bits))
    take(reader, owner)
    tail = (7).to_bytes(8, "little") + bytes(4)
    assert all(reader.may_have(place_of(key + tail)) for key in keys)
    assert reader.objects == 64
    room = bytearray(64 * NAME_BYTES)
    assert index.names(room) == 64
    tails = (7).to_bytes(8, "little")
    assert {bytes(room[at : at + NAME_BYTES]) for at in range(0, len(room), NAME_BYTES)} == {
        key + tails for key in keys
    }
    assert index.names(bytearray(NAME_BYTES)) == 64, "it says how much room it takes"
    index.close()
