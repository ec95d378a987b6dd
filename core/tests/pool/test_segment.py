"""The segment as its processes see it: same bytes at same offsets, checked before use, never torn away."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import stat
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lmcache_core.errors import PoolError, PoolMismatchError, UsageError
from lmcache_core.limits import HUGE_PAGE_BYTES
from lmcache_core.pool.backing import Access, Backing, segment_path
from lmcache_core.pool.header import PoolInfo
from lmcache_core.pool.segment import Segment, name_exists

from .conftest import Child

MIB = 1 << 20
Make = Callable[..., Segment]

ATTACH = """
    import sys
    from lmcache_core.pool.segment import Segment
    segment = Segment.attach_name(sys.argv[1])
"""


def maps_of(address: int) -> list[str]:
    start = f"{address:x}-"
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(start)]


def test_a_worker_finds_the_same_bytes_at_the_same_offset(make: Make, spawn: Callable[..., Child]) -> None:
    segment = make()
    offset = segment.info.data_offset + 3 * 4096
    child = spawn(
        ATTACH
        + """
    offset = int(sys.argv[2])
    segment.view(offset, 5)[:] = b"hello"
    print("written")
    input()
    """,
        segment.info.name,
        offset,
    )
    assert child.read() == "written"
    assert bytes(segment.view(offset, 5)) == b"hello"
    assert segment.path is not None
    with open(segment.path, "rb") as file:
        assert os.pread(file.fileno(), 5, offset) == b"hello"


@pytest.mark.parametrize("backing", [Backing.SHM, Backing.MEMFD])
def test_a_passed_descriptor_attaches_to_either_backing(make: Make, backing: Backing) -> None:
    segment = make(backing=backing)
    with Segment.attach_fd(segment.worker_fd(), segment.info) as worker:
        worker.view(segment.info.data_offset, 3)[:] = b"abc"
        assert bytes(segment.view(segment.info.data_offset, 3)) == b"abc"
        assert worker.info == segment.info


def test_the_info_survives_the_wire(make: Make) -> None:
    info = make().info
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=PoolInfo) == info


def test_data_and_mapping_start_on_huge_pages(make: Make) -> None:
    segment = make()
    assert segment.info.data_offset % HUGE_PAGE_BYTES == 0
    assert segment.mapping.address % HUGE_PAGE_BYTES == 0


@pytest.mark.parametrize("field", ["nbytes", "boot_id", "data_offset", "layout_version", "name", "backing"])
def test_a_segment_that_differs_is_refused_with_both_sides_named(make: Make, field: str) -> None:
    segment = make()
    other: dict[str, object] = {"name": "another", "backing": Backing.MEMFD}
    value = other.get(field) or getattr(segment.info, field) + 1
    expected = replace(segment.info, **{field: value})
    with pytest.raises(PoolMismatchError) as refused:
        Segment.attach_fd(segment.worker_fd(), expected)
    assert str(segment.info) in str(refused.value)
    assert str(expected) in str(refused.value)
    assert f"{field} differ" in str(refused.value)


def test_a_truncated_segment_is_refused(make: Make) -> None:
    segment = make()
    assert segment.path is not None
    os.truncate(segment.path, segment.info.nbytes - 4096)
    with pytest.raises(PoolMismatchError, match="truncated"):
        Segment.attach_name(segment.info.name)


def test_a_descriptor_that_is_no_segment_is_refused_and_closed() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    info = PoolInfo("p", Backing.SHM, 4 * MIB, 2 * MIB, 1, 1)
    with pytest.raises(PoolMismatchError, match="not a memory segment"):
        Segment.attach_fd(read_end, info)
    with pytest.raises(OSError):
        os.fstat(read_end)


def test_views_stay_within_the_data(make: Make) -> None:
    segment = make()
    start, end = segment.info.data_offset, segment.info.nbytes
    assert len(segment.view(start, end - start)) == segment.info.data_bytes
    for offset, nbytes in [(0, 1), (start - 1, 1), (start, end - start + 1), (end, 1), (start, -1), (-4096, 4096)]:
        with pytest.raises(UsageError, match="not within the data"):
            segment.view(offset, nbytes)


def test_a_readonly_view_cannot_be_written(make: Make) -> None:
    segment = make()
    with pytest.raises(TypeError):
        segment.view(segment.info.data_offset, 4, readonly=True)[:] = b"oops"


def test_memory_stays_mapped_under_a_view_and_goes_with_the_last_one(make: Make) -> None:
    segment = make()
    address = segment.mapping.address
    view = segment.view(segment.info.data_offset, 4)
    view[:] = b"kept"
    segment.close()
    assert bytes(view) == b"kept"
    assert maps_of(address)
    del view
    assert not maps_of(address)


@pytest.mark.parametrize("backing", [Backing.SHM, Backing.MEMFD])
def test_a_pool_that_a_worker_just_drops_is_not_held_open(make: Make, backing: Backing) -> None:
    segment = make(backing=backing)
    worker = Segment.attach_fd(segment.worker_fd(), segment.info)
    fd, address = worker.fileno(), worker.mapping.address
    held = weakref.ref(worker)
    del worker
    gc.collect()
    assert held() is None
    assert not maps_of(address)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_closed_segment_answers_with_an_error(make: Make) -> None:
    segment = make()
    offset = segment.info.data_offset
    segment.close()
    segment.close()
    for use in (
        lambda: segment.view(offset, 1),
        lambda: segment.buffer,
        lambda: segment.mark_slots([offset], 1, 0),
        lambda: segment.worker_fd(),
        lambda: segment.layouts,
    ):
        with pytest.raises(PoolError, match="closed"):
            use()


def test_a_mapping_is_neither_forked_nor_dumped(make: Make) -> None:
    segment = make()
    smaps = Path("/proc/self/smaps").read_text()
    mapping = smaps[smaps.index(f"{segment.mapping.address:x}-") :]
    flags = mapping[mapping.index("VmFlags:") :].splitlines()[0].split()
    assert {"dc", "dd"} <= set(flags)


def test_every_descriptor_closes_on_exec(make: Make) -> None:
    segment = make()
    fd = segment.worker_fd()
    os.set_inheritable(fd, True)  # as it may arrive
    with Segment.attach_fd(fd, segment.info) as worker:
        for one in (segment.fileno(), worker.fileno()):
            assert fcntl.fcntl(one, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_worker_that_exits_does_not_remove_the_pool(make: Make, spawn: Callable[..., Child]) -> None:
    segment = make()
    child = spawn(
        ATTACH
        + """
    from multiprocessing import resource_tracker
    print(resource_tracker._resource_tracker._fd)
    """,
        segment.info.name,
    )
    assert child.read() == "None", "a resource tracker was started: it would unlink the pool at exit"
    assert child.wait() == 0
    assert name_exists(segment)


def test_a_worker_that_closes_does_not_remove_the_pool(make: Make) -> None:
    segment = make()
    Segment.attach_name(segment.info.name).close()
    assert name_exists(segment)


def test_the_owner_removes_name_and_lock_file(make: Make, runtime_dir: Path) -> None:
    segment = make()
    assert segment.path is not None
    assert segment.path.exists()
    assert list(runtime_dir.iterdir())
    segment.close()
    assert not segment.path.exists()
    assert not list(runtime_dir.iterdir())


def test_serving_goes_on_when_the_name_is_deleted(make: Make) -> None:
    segment = make()
    assert segment.path is not None
    assert name_exists(segment)
    segment.path.unlink()
    assert not name_exists(segment)
    offset = segment.info.data_offset
    segment.view(offset, 2)[:] = b"ok"
    with Segment.attach_fd(segment.worker_fd(), segment.info) as worker:
        assert bytes(worker.view(offset, 2)) == b"ok"
    with pytest.raises(PoolError, match="is not there"):
        Segment.attach_name(segment.info.name)


def test_a_name_that_was_given_to_another_file_is_not_ours_to_remove(make: Make) -> None:
    segment = make()
    assert segment.path is not None
    segment.path.unlink()
    segment.path.write_bytes(b"somebody else's")
    assert not name_exists(segment)
    segment.close()
    assert segment.path.read_bytes() == b"somebody else's"


@pytest.mark.parametrize("backing", [Backing.MEMFD, Backing.HUGETLB])
def test_attach_by_name_says_when_the_backing_has_none(pool_name: str, backing: Backing) -> None:
    with pytest.raises(PoolError, match=f"backing {backing} and so no name"):
        Segment.attach_name(pool_name, PoolInfo(pool_name, backing, 4 * MIB, 2 * MIB, 1, 1))


@pytest.mark.parametrize("name", ["", "Upper", "-dash", "a/b", "a.b", "..", "ü", "a" * 65, "a\n"])
def test_an_unusable_pool_name_is_refused(runtime_dir: Path, name: str) -> None:
    with pytest.raises(UsageError, match="pool name"):
        Segment.create(name, 4 * MIB, runtime_dir=runtime_dir)
    with pytest.raises(UsageError, match="pool name"):
        segment_path(name)


@pytest.mark.parametrize("data_bytes", [0, -1, MIB - 1, (1 << 46) + 1])
def test_a_pool_too_small_or_too_large_is_refused(pool_name: str, runtime_dir: Path, data_bytes: int) -> None:
    with pytest.raises(UsageError, match=f"{pool_name}.*(smaller than one slab|over the limit)"):
        Segment.create(pool_name, data_bytes, runtime_dir=runtime_dir)
    assert not segment_path(pool_name).exists()


def test_the_pool_is_private_unless_a_group_is_listed(make: Make) -> None:
    segment = make()
    assert stat.S_IMODE(os.fstat(segment.fileno()).st_mode) == 0o600


@pytest.mark.parametrize("backing", [Backing.SHM, Backing.MEMFD])
def test_group_access_opens_the_pool_to_the_group_and_to_nobody_else(make: Make, backing: Backing) -> None:
    gid = os.getgid()
    segment = make(backing=backing, access=Access.GROUP, gids=[gid])
    found = os.fstat(segment.fileno())
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_gid == gid


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become members of several groups")
def test_every_listed_group_gets_in_and_others_stay_out(make: Make, spawn: Callable[..., Child]) -> None:
    segment = make(access=Access.GROUP, gids=[54321, 54322])
    script = """
        import os, sys
        os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(54399)
        try:
            os.close(os.open(sys.argv[1], os.O_RDWR))
            print("in")
        except PermissionError:
            print("out")
    """
    assert [spawn(script, segment.path, gid).read() for gid in (54321, 54322, 54323)] == ["in", "in", "out"]


def test_group_access_without_a_gid_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="names no gid"):
        make(access=Access.GROUP)


def test_a_sealed_segment_cannot_be_truncated_by_a_worker(make: Make) -> None:
    segment = make(backing=Backing.MEMFD)
    fd = segment.worker_fd()
    try:
        for size in (0, segment.info.nbytes + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_a_memfd_pool_leaves_nothing_in_dev_shm(make: Make) -> None:
    segment = make(backing=Backing.MEMFD)
    assert not segment_path(segment.info.name).exists()
    assert name_exists(segment)


def test_a_pool_on_reserved_huge_pages_serves(make: Make, huge_pages: int) -> None:
    segment = make(8 * MIB, backing=Backing.HUGETLB)
    with Segment.attach_fd(segment.worker_fd(), segment.info) as worker:
        worker.view(segment.info.data_offset, 4)[:] = b"huge"
        assert bytes(segment.view(segment.info.data_offset, 4)) == b"huge"
        assert segment.info.nbytes % HUGE_PAGE_BYTES == 0


def test_a_forked_child_gets_an_error_and_no_sigsegv(make: Make, spawn: Callable[..., Child]) -> None:
    segment = make()
    child = spawn(
        ATTACH
        + """
    import os
    pid = os.fork()
    if pid == 0:
        try:
            segment.view(segment.info.data_offset, 1)
        except Exception as error:
            print(error, flush=True)
        segment.close()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), bytes(segment.view(segment.info.data_offset, 1)))
    """,
        segment.info.name,
    )
    assert "belongs to the parent" in child.read()
    assert child.read() == "7 b'\\x00'"
    assert child.wait() == 0


def test_a_process_without_a_free_descriptor_forks_no_life_lock(make: Make, spawn: Callable[..., Child]) -> None:
    segment = make()
    row, _ = segment.claim_row()
    worker = spawn(
        """
        import os, resource, sys
        from lmcache_core.pool.lifelock import LifeLock
        from lmcache_core.pool.segment import Segment
        segment = Segment.attach_name(sys.argv[1])
        life = LifeLock.acquire(segment, int(sys.argv[2]))
        lent = segment.view(segment.header.data_offset, 4)
        ready, done = os.pipe(), os.pipe()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(*ready, *done) + 1,) * 2)
        filling = []
        try:
            while True:
                filling.append(os.dup(0))
        except OSError:
            pass
        if os.fork() == 0:
            os.write(ready[1], b"closed" if segment.closed and life.closed else b"kept")
            os._exit(0)
        print(os.read(ready[0], 10).decode(), flush=True)
        """,
        segment.info.name,
        row,
    )
    assert worker.read() == "closed"


def test_what_a_forked_child_has_mapped_itself_stays_as_it_is(make: Make, spawn: Callable[..., Child]) -> None:
    segment = make()
    worker = spawn(
        """
        import ctypes, os, sys
        where = []
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        def first():
            if libc.mmap(where[0], 4096, 3, 0x100022, -1, 0) == where[0]:
                ctypes.memmove(where[0], b"mine", 4)
        os.register_at_fork(after_in_child=first)  # before ours, as an allocator may be
        from lmcache_core.pool.segment import Segment
        segment = Segment.attach_name(sys.argv[1])
        where.append(segment.mapping.address)
        lent = segment.view(segment.header.data_offset, 4)
        heard, say = os.pipe()
        if os.fork() == 0:
            os.write(say, ctypes.string_at(where[0], 4))
            os._exit(0)
        print(os.read(heard, 10).decode(errors="replace"), flush=True)
        """,
        segment.info.name,
    )
    assert worker.read() == "mine"


def test_a_killed_worker_leaves_the_pool_as_it_is(make: Make, spawn: Callable[..., Child]) -> None:
    segment = make()
    child = spawn(ATTACH + "    print('here'); input()", segment.info.name)
    child.read()
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert name_exists(segment)
    with Segment.attach_name(segment.info.name, segment.info):
        pass


def test_the_serving_word_is_seen_through_every_mapping_and_changes_no_checksum(
    runtime_dir: Path, pool_name: str
) -> None:
    with Segment.create(pool_name, 4 * MIB, Backing.MEMFD, runtime_dir=runtime_dir) as segment:
        assert segment.serving == 0
        segment.serve(0xABCDEF)
        with Segment.attach_fd(segment.worker_fd(), segment.info) as worker:
            assert worker.serving == 0xABCDEF
            segment.serve(0)
            assert worker.serving == 0
        with pytest.raises(UsageError, match="24 bits"):
            segment.serve(1 << 24)


def test_the_whole_index_has_memory_from_the_start(runtime_dir: Path, pool_name: str) -> None:
    with Segment.create(pool_name, 4 * MIB, Backing.SHM, runtime_dir=runtime_dir, index_entries=1 << 16) as segment:
        header = segment.header
        allocated = os.fstat(segment.fileno()).st_blocks * 512
        assert allocated >= header.index_offset + header.index_bytes
        assert segment.index_numbers["entries"] == 1 << 16
        assert segment.index_numbers["index_offset"] == header.index_offset
