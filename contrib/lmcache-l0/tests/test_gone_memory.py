"""Values and targets in memory that has gone: an error that says so, and no signal."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lmcache_l0 import SharedCache
from lmcache_l0.errors import UsageError

NBYTES = 3 * mmap.PAGESIZE
CALLS = ("set", "set_many", "put", "insert", "set_numpy", "get_many_into")
MAPPINGS = ("truncated", "closed", "read-only")


def mapped(folder: Path, how: str) -> Any:
    """A buffer over pages of a file that are not there any more, or may not be touched."""
    import numpy

    path = folder / f"file-{how}"
    path.write_bytes(b"a" * NBYTES)
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), NBYTES)
    array = numpy.frombuffer(mapping, numpy.uint8)
    if how == "truncated":
        os.truncate(path, 100)
        return array
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(NBYTES)
    assert (libc.munmap(address, length) if how == "closed" else libc.mprotect(address, length, mmap.PROT_READ)) == 0
    return array


def call(table: SharedCache, name: str, gone: Any) -> None:
    if name == "set":
        table.set(b"key", memoryview(gone))
    elif name == "set_many":
        table.set_many({b"key": gone})
    elif name == "put":
        table.put(b"key", gone, 0, 0)
    elif name == "insert":
        table.insert(b"key", gone, table.ticket(b"key"))
    elif name == "set_numpy":
        table.set_numpy(b"key", gone)
    else:
        table.set(b"key", bytes(NBYTES))
        table.get_many_into([b"key"], gone)


def main(folder: str, name: str, how: str) -> None:
    gone = mapped(Path(folder), how)
    table = SharedCache(Path(folder, "table"), hash_slots=64, max_value_size=NBYTES)
    try:
        call(table, name, gone)
        print("stored")
    except UsageError as error:
        print(f"UsageError: {error}")
    finally:
        print(len(table), flush=True)
        table.close()
        os._exit(0)  # numpy and Python would unmap what is not theirs any more


@pytest.mark.parametrize("how", MAPPINGS)
@pytest.mark.parametrize("name", CALLS)
def test_memory_that_has_gone_is_an_error_and_no_signal(folder: Path, name: str, how: str) -> None:
    pytest.importorskip("numpy")
    command = [sys.executable, __file__, str(folder), name, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    if how == "read-only" and name != "get_many_into":
        assert done.stdout.splitlines() == ["stored", "1"]
    else:
        assert "has memory that cannot be" in done.stdout
        assert done.stdout.splitlines()[-1] == ("1" if name == "get_many_into" else "0")


if __name__ == "__main__":
    main(*sys.argv[1:])
