"""The header of an object: verified before a byte is used."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.errors import DamagedObjectError, MismatchedObjectError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.tiers.object.format import (
    HEADER_BYTES,
    TIER_KEY_BYTES,
    ObjectHeader,
    build_header,
    check_header,
    describe_header,
    object_kind,
    payload_checksum,
    read_header,
    split_tier_key,
    tier_key,
)

KEY = bytes(range(32))
LAYOUT = Layout("bfloat16", (2, 4, 16), "KTD")
KIND = object_kind(LAYOUT, CodecChain())


def _header(**changes: object) -> memoryview:
    page = memoryview(mmap.mmap(-1, HEADER_BYTES))
    fields: dict[str, object] = {
        "key": KEY,
        "namespace": 5,
        "epoch": 2,
        "encoded_bytes": LAYOUT.nbytes,
        "checksum": 99,
    } | changes
    build_header(page, fields.pop("kind", KIND), **fields)
    return page


def _check(page: memoryview) -> ObjectHeader:
    return check_header(page, KIND, key=KEY, namespace=5, epoch=2)


def test_a_header_says_what_was_written() -> None:
    header = _check(_header())
    assert (header.key, header.namespace, header.epoch) == (KEY, 5, 2)
    assert (header.decoded_bytes, header.encoded_bytes, header.checksum) == (LAYOUT.nbytes, LAYOUT.nbytes, 99)
    assert describe_header(header) == {
        "dtype": "bfloat16", "shape": [2, 4, 16], "memory_format": "KTD", "codecs": [],
    }  # fmt: skip


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_damage(bit: int) -> None:
    page = _header()
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedObjectError):
        _check(page)


@pytest.mark.parametrize("changes", [{"key": b"x" * 32}, {"namespace": 6}, {"epoch": 1}])
def test_another_objects_header_is_damage_with_a_message(changes: dict[str, object]) -> None:
    with pytest.raises(DamagedObjectError, match="asked for object 0001"):
        _check(_header(**changes))


@pytest.mark.parametrize(
    "layout",
    [Layout("float16", (2, 4, 16), "KTD"), Layout("bfloat16", (4, 2, 16), "KTD"), Layout("bfloat16", (2, 4, 16))],
)
def test_another_layout_of_the_same_size_is_a_mismatch(layout: Layout) -> None:
    assert layout.nbytes == LAYOUT.nbytes
    with pytest.raises(MismatchedObjectError, match="bfloat16"):
        _check(_header(kind=object_kind(layout, CodecChain())))


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097])
def test_a_page_of_another_size_is_damage(nbytes: int) -> None:
    with pytest.raises(DamagedObjectError):
        read_header(memoryview(bytes(nbytes)))


def test_a_description_that_does_not_fit_its_page_is_refused_before_anything_is_stored() -> None:
    class Wordy(CodecChain):
        def describe(self) -> list[tuple[str, Mapping[str, str | int | float]]]:
            return [("wordy", {"table": "n" * 5000})]

    with pytest.raises(UsageError, match="to describe"):
        object_kind(Layout("uint8", (1,)), Wordy())


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_tier_keys_are_read_back(key: bytes, namespace: int, epoch: int) -> None:
    raw = tier_key(key, namespace, epoch)
    assert len(raw) == TIER_KEY_BYTES == 44
    assert split_tier_key(raw) == (key, namespace, epoch)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(UsageError, match="43 bytes"):
        split_tier_key(bytes(43))


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_the_checksum_does_not_depend_on_how_bytes_are_cut(content: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    parts = [memoryview(content)[a:b] for a, b in itertools.pairwise(edges)]
    assert payload_checksum(parts) == payload_checksum([content])


@pytest.mark.parametrize("description", [b"", b"\xff", b"{", b"[" * 3000, b"9" * 3000, b"[]", b"null"])
def test_a_sealed_description_that_is_none_is_damage(description: bytes) -> None:
    header = _check(_header())._replace(description=description)
    with pytest.raises(DamagedObjectError, match="describes no object"):
        describe_header(header)
