"""Arrays in shared memory: what a view promises, and when it ends."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest
from lmcache_l0.errors import TableLoadWarning, UsageError, ValueTooLargeError


@pytest.mark.parametrize("versions", [1, 2, 5])
def test_a_view_lasts_until_its_key_was_written_versions_more_times(make, versions):
    cache = make(versions=versions)
    cache.set_numpy("k", np.full(8, -1.0))
    view = cache.get_numpy("k", 8, "f8")
    for i in range(versions):
        cache.set_numpy("k", np.full(8, float(i)))
        assert view.valid()
        assert view.tolist() == [-1.0] * 8
    cache.set_numpy("k", np.zeros(8))
    assert not view.valid()
    assert not view[2:].valid()


def test_writes_of_other_keys_do_not_end_a_view(make):
    for sizes in ({}, {"versions": 1}):
        cache = make(**sizes)
        cache.set_numpy("k", np.arange(8))
        view = cache.get_numpy("k", (2, 4), np.int64)
        for i in range(40):
            cache.set(f"{i}", b"x" * 100)
        assert view.valid()
        assert view.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("spares", [1, 2, 7])
def test_a_view_lasts_until_its_key_and_then_its_stripe_was_written(make, spares):
    cache = make(spares=spares)  # of 64 slots: one stripe
    cache.set_numpy("k", np.full(8, -1.0))
    view = cache.get_numpy("k", 8, "f8")
    cache.set_numpy("k", np.zeros(8))
    for i in range(spares - 1):
        cache.set(f"{i}", b"x" * 64)
        assert view.valid()
        assert view.tolist() == [-1.0] * 8
    cache.set("one more", b"x" * 64)
    assert not view.valid()
    assert not view[2:].valid()


def test_reuse_of_a_deleted_slot_ends_its_views_in_the_end(make):
    cache = make(hash_slots=1)
    with pytest.warns(TableLoadWarning):
        cache.set("a", b"first")
    view = cache.view("a")
    cache.delete("a")
    for _ in range(2):  # into the spare buffers
        assert view.valid()
        assert bytes(view) == b"first"
        cache.set("b", b"other")
    cache.set("b", b"other")
    assert not view.valid()


def test_a_view_is_read_only_unless_asked(make):
    cache = make()
    cache.set_numpy("k", np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="read-only"):
        cache.get_numpy("k", 4, "i4")[0] = 1
    cache.get_numpy("k", 4, "i4", writable=True)[1] = 7
    assert cache.get_numpy("k", (4,), np.dtype("i4")).tolist() == [0, 7, 0, 0]
    with pytest.raises(TypeError):
        memoryview(cache.view("k"))[0] = 1


def test_a_view_has_no_copy_in_it(make):
    cache = make()
    cache.set_numpy("k", np.zeros(4, np.int32))
    view = cache.get_numpy("k", 4, "i4")
    cache.get_numpy("k", 4, "i4", writable=True)[:] = 5
    assert view.tolist() == [5] * 4


def test_a_snapshot_is_a_plain_array_of_its_own(make):
    cache = make()
    cache.set_numpy("k", np.arange(4.0))
    snapshot = cache.get_numpy("k", (2, 2), "f8", snapshot=True)
    snapshot += 1
    for _ in range(5):
        cache.set_numpy("k", np.zeros(4))
    assert type(snapshot) is np.ndarray
    assert snapshot.tolist() == [[1, 2], [3, 4]]


def test_what_is_computed_from_a_view_is_a_plain_array(make):
    cache = make()
    cache.set_numpy("k", np.arange(4.0))
    view = cache.get_numpy("k", 4, "f8")
    assert type(view * 2) is np.ndarray
    assert type(view.sum()) is np.float64
    assert view.copy().valid()


def test_a_view_outlives_its_handle(make):
    cache = make()
    cache.set_numpy("k", np.arange(4.0))
    view = cache.get_numpy("k", 4, "f8")
    cache.close()
    del cache
    gc.collect()
    assert view.tolist() == [0, 1, 2, 3]
    assert view.valid()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u2", "i4", "u8", "c16", "?", "M8[s]"])
def test_every_plain_dtype_comes_back(make, dtype):
    cache = make()
    array = np.arange(6).astype(dtype).reshape(2, 3)
    cache.set_numpy("k", array.view("i8").reshape(2, 3) if dtype == "M8[s]" else array)
    asked = "i8" if dtype == "M8[s]" else dtype
    view = cache.get_numpy("k", (2, 3), asked)
    assert view.dtype == np.dtype(asked)
    assert np.array_equal(view.view(dtype), array)


def test_every_array_in_one_piece_is_stored_as_it_lies(make):
    class Mine(np.ndarray):
        pass

    cache = make()
    whole = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    frozen = whole.copy()
    frozen.flags.writeable = False
    for array in (whole, frozen, whole[1], whole[:, :0], np.array(7.5), whole.view(Mine), whole.astype(">i2")):
        cache.set_numpy("k", array)
        found = cache.get_numpy("k", array.shape, array.dtype)
        assert np.array_equal(found, array)
    for pieces in (whole.T, whole[:, ::2], np.asfortranarray(whole), whole[..., ::-1]):
        with pytest.raises(ValueError, match="contiguous"):
            cache.set_numpy("k", pieces)
    with pytest.raises(ValueTooLargeError, match="400 bytes"):
        cache.set_numpy("k", np.zeros(400, np.uint8))


def test_a_value_is_not_read_as_another_type_of_its_size(make):
    cache = make()
    cache.set_numpy("k", np.arange(4, dtype=np.float32))
    for snapshot in (False, True):
        with pytest.raises(UsageError, match="stored as <f4 and is asked for as dtype\\('int32'\\)"):
            cache.get_numpy("k", 4, np.int32, snapshot=snapshot)
        with pytest.raises(UsageError, match="has 16 bytes and shape 5"):
            cache.get_numpy("k", 5, np.float32, snapshot=snapshot)
    cache.set("raw", b"\1\0\0\0")
    assert cache.get_numpy("raw", 1, np.int32).tolist() == [1]  # plain bytes are of any type


def test_shapes_that_are_none_are_refused(make):
    cache = make()
    cache.set("k", b"1234")
    for shape in ((-1, 4), -4, "4", (1 << 62, 1 << 62), (2.0, 2), None):
        with pytest.raises((UsageError, TypeError)):
            cache.get_numpy("k", shape, "u1")
    with pytest.raises(TypeError, match="Python objects"):
        cache.get_numpy("k", 4, object)
    with pytest.raises(ValueError, match="contiguous"):
        cache.set_numpy("k", np.arange(8)[::2])


def test_a_table_needs_no_numpy(make):
    cache = make()
    code = (
        "import sys; from lmcache_l0 import SharedCache\n"
        f"c = SharedCache({cache.path!r}); c.set('k', b'v'); assert c.get('k') == b'v' and c.view('k').valid()\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert cache.get("k") == b"v"
