"""Keys of L1 and L0 for one name, each told from the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_l0.records import (
    L0_KEY_BYTES_MAX,
    RECORD_BYTES_MAX,
    is_record,
    l0_key,
    l0_key_of,
    l1_key,
    l1_key_of,
    prefix_of,
    record_layout,
)

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout

names = st.binary(min_size=1, max_size=80)
namespaces = st.integers(0, 2**64 - 1)


@given(namespaces, names)
def test_the_key_of_each_level_is_derived_from_the_other(namespace, name):
    above, below = l0_key(prefix_of(namespace), name), l1_key(name)
    assert len(below) == 32
    assert len(above) <= L0_KEY_BYTES_MAX
    assert l0_key_of(prefix_of(namespace), below) == above
    assert l1_key_of(above) == (namespace, below)


@given(st.lists(st.tuples(namespaces, names), min_size=2, max_size=2, unique=True))
def test_two_names_never_have_one_key(pair):
    (one, a), (other, b) = pair
    assert l0_key(prefix_of(one), a) != l0_key(prefix_of(other), b)
    assert one != other or l1_key(a) != l1_key(b)


@given(namespaces, st.binary(min_size=32, max_size=32))
def test_a_key_of_l1_that_no_name_has_stands_in_l0_as_it_is(namespace, key):
    above = l0_key_of(prefix_of(namespace), key)
    assert l1_key_of(above) == (namespace, key)
    assert len(above) == 40 or l1_key(above[8:]) == key


@given(st.binary(max_size=60))
def test_whatever_stands_in_a_table_is_a_key_of_a_record_or_none(key):
    found = l1_key_of(key)
    assert found is None or l0_key_of(prefix_of(found[0]), found[1]) == key or len(key) == 40


def test_records_are_told_by_their_layout():
    assert is_record(record_layout(4080))
    assert is_record(record_layout(1 << 20))
    for other in (
        Layout("uint8", (4096,)),
        Layout("uint8", (4096,), "T"),
        Layout("float32", (1024,), "R"),
        Layout("uint8", (64, 64), "RT"),
        Layout("uint8", (RECORD_BYTES_MAX + 1,), "R"),
        Layout("uint8", (16,), "R"),
    ):
        assert not is_record(other)
    for wrong in (0, -1, 1.5, (1 << 20) + 1):
        with pytest.raises(UsageError, match="max_value_size"):
            record_layout(wrong)
    with pytest.raises(UsageError, match="0 bytes"):
        l1_key(b"")
