"""Which buffers are looked at before a copy: those whose memory may go."""

from __future__ import annotations

import gc
import mmap
from array import array
from pathlib import Path

import pytest

from lmcache_core import buffers
from lmcache_core.buffers import held, may_vanish


def private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_memory_that_python_keeps_is_not_asked_about() -> None:
    for kept in (bytearray(8), array("B", bytes(8)), private(8192)):
        view = memoryview(kept)
        assert held(view[4:]) is not None
        assert not may_vanish(held(view))


def test_a_mapping_of_a_file_is_asked_about_also_below_an_array(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 8192)
    assert may_vanish(held(memoryview(mapping)))
    assert may_vanish(held(memoryview(numpy.frombuffer(mapping, numpy.uint8))))
    assert not may_vanish(held(memoryview(numpy.frombuffer(private(8192), numpy.uint8))))


def test_a_mapping_that_may_not_be_read_is_asked_about() -> None:
    numpy = pytest.importorskip("numpy")
    sealed = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    assert may_vanish(held(memoryview(sealed)))
    assert may_vanish(held(memoryview(numpy.frombuffer(sealed, numpy.uint8))))


def test_what_is_known_of_a_mapping_is_forgotten_with_it(tmp_path: Path) -> None:
    """Another mapping may get its address, and its id."""
    for _ in range(50):
        assert not may_vanish(held(memoryview(private(8192))))
        with (tmp_path / "file").open("w+b") as file:
            file.truncate(8192)
            assert may_vanish(held(memoryview(mmap.mmap(file.fileno(), 8192))))
    gc.collect()
    assert not buffers._WITHOUT_FILE
