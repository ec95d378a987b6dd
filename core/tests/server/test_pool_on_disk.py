"""`l1.backing = "file"`: a pool on a disk, over restarts, kills, reboots and power cuts, and what it refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli.main import main
from lmcache_core.client.client import Client
from lmcache_core.errors import NotEnoughMemoryError, PoolBusyError, PoolError, SettingsError
from lmcache_core.native import native
from lmcache_core.pool import header as headers
from lmcache_core.pool import on_disk
from lmcache_core.pool.clean import CleanState, clean
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.lifelock import LifeLock
from lmcache_core.pool.mapping import punch_hole
from lmcache_core.pool.segment import Segment
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import embedded_server
from lmcache_testing.waiting import until

needs_index = pytest.mark.skipif(native is None, reason="adoption needs the C extension")
SPACE = Namespace("on a disk", Layout("uint8", (20_000,)))
MIB = 1 << 20


class Node:
    """Servers of one name, one after another, over one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.disk.mkdir(mode=0o700)
        self.file = self.disk / "pool [1]"

    @contextmanager
    def serve(self, l2: dict[str, Any] | None = None, **l1: Any) -> Iterator[Server]:
        table = {"backing": "file", "path": str(self.file), "size_bytes": 8 * MIB, **l1}
        with embedded_server(self.folder, name="ondisk", l1=table, l2=l2 or {}) as server:
            yield server

    def word(self, offset: int) -> int:
        with self.file.open("rb") as file:
            return int(struct.unpack("<Q", os.pread(file.fileno(), 8, offset))[0])

    def reboot(self) -> None:
        """Nothing is left of what was in memory: sockets, and the number of the boot."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        for path in self.disk.glob("*.owner"):
            path.unlink()
        with self.file.open("r+b") as file:
            os.pwrite(file.fileno(), struct.pack("<Q", 77), headers.BOOT_OFFSET)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content(number: int, version: int = 0) -> bytes:
    return random.Random(f"{number} {version}").randbytes(20_000)


def store(client: Client, numbers: range, version: int = 0) -> None:
    keys = [key(each) for each in numbers]
    objects = [bytearray(content(each, version)) for each in numbers]
    assert client.store(keys, objects, namespace=SPACE).stored == len(keys)


def found(client: Client, numbers: range, verify: str = "never") -> dict[int, bytes]:
    into = [bytearray(20_000) for _ in numbers]
    result = client.retrieve([key(each) for each in numbers], into, namespace=SPACE, verify=verify, prefix=False)
    return {
        number: bytes(each)
        for number, each, status in zip(numbers, into, result.statuses, strict=True)
        if status.name == "HIT"
    }


def pool_of(server: Server) -> dict[str, Any]:
    with server.connect() as client:
        return dict(client.status()["pool"])


@needs_index
@pytest.mark.parametrize("verify", ["first", "background", "never"])
def test_after_an_orderly_end_and_a_reboot_everything_is_there(node: Node, verify: str) -> None:
    with node.serve() as server, server.connect() as client:
        store(client, range(20))
        assert client.status()["pool"]["path"] == str(node.file)
    assert node.word(headers.FLUSHED_OFFSET) == 1
    node.reboot()
    with node.serve(adopt={"verify": verify}) as server, server.connect() as client:
        pool = pool_of(server)
        assert pool["rebooted"]
        assert pool["adopted"]["objects"] == 20
        assert node.word(headers.FLUSHED_OFFSET) == 0, "from now on a power cut leaves it in disorder"
        assert found(client, range(20)) == {each: content(each) for each in range(20)}
        store(client, range(20, 30))
    with node.serve() as server, server.connect() as client:
        assert not pool_of(server)["rebooted"], "the same boot"
        assert len(found(client, range(30))) == 30


@needs_index
def test_what_a_disk_has_changed_is_a_miss_whatever_the_settings_say(node: Node) -> None:
    with node.serve() as server, server.connect() as client:
        store(client, range(10))
    node.reboot()
    data = node.file.read_bytes()
    at = data.index(content(3)) + 700
    with node.file.open("r+b") as file:
        os.pwrite(file.fileno(), b"\0\1\2\3", at)
    for _ in range(2):  # and not only in the first start after it
        with node.serve(adopt={"verify": "never"}) as server, server.connect() as client:
            assert found(client, range(10)) == {each: content(each) for each in range(10) if each != 3}


@needs_index
@pytest.mark.parametrize("optimistic", [False, True])
def test_a_lease_does_not_lend_what_a_disk_has_changed(node: Node, optimistic: bool) -> None:
    with node.serve() as server, server.connect() as client:
        store(client, range(10))
    node.reboot()
    at = node.file.read_bytes().index(content(3)) + 700
    with node.file.open("r+b") as file:
        os.pwrite(file.fileno(), b"\0\1\2\3", at)
    with node.serve() as server, server.connect() as client:
        client.register_layout(SPACE)  # so that the index is searched
        keys = [key(each) for each in range(10)]
        with client.prepare_retrieve(keys, namespace=SPACE, prefix=False, optimistic=optimistic) as lease:
            lent = {at: bytes(lease.view(at)) for at in lease.granted}
            read = [at for at, status in enumerate(lease.finish()) if status.name == "HIT"]
        assert {at: lent[at] == content(at) for at in lent} == dict.fromkeys(set(range(10)) - {3}, True)
        assert read == [0, 1, 2, *range(4, 10)]


@needs_index
def test_a_clear_before_a_server_begins_counts_after_a_power_cut(node: Node) -> None:
    """The tiers were cleared while no server had the pool: that is seen before anybody is served."""
    with node.serve() as server, server.connect() as client:
        store(client, range(10))
    image = node.file.read_bytes()
    run = node.folder / "run" / "ondisk"
    segment = Segment.create(
        "ondisk", 8 * MIB, "file", runtime_dir=run, on_stale="adopt", file=node.file, access="owner"
    )
    try:
        assert segment.adopted
        segment.note_cleared(int(time.time()) + 5)
        page = node.file.read_bytes()[: headers.HEADER_BYTES]
    finally:
        segment.close()
    node.file.write_bytes(page + image[headers.HEADER_BYTES :])  # all that the disk had of it
    node.reboot()
    with node.serve() as server, server.connect() as client:
        client.register_layout(SPACE)
        assert found(client, range(10)) == {}


@needs_index
def test_what_a_disk_has_changed_is_not_written_back_as_if_it_were_whole(node: Node) -> None:
    """Compressed, it would have a checksum of its own in the tier."""
    pytest.importorskip("lmcache_mock")
    pytest.importorskip("lmcache_compress")
    with node.serve() as server, server.connect() as client:
        store(client, range(10))
    node.reboot()
    at = node.file.read_bytes().index(content(3)) + 700
    with node.file.open("r+b") as file:
        os.pwrite(file.fileno(), b"\0\1\2\3", at)
    with node.serve(l2={"mem": {"type": "mock", "serde": ["zstd"]}}) as server, server.connect() as client:
        client.register_layout(SPACE)
        until(
            lambda: sum(client.status()["tiers"]["stores"]["counts"].values()) >= 10, "all to be written back, or not"
        )
        (tier,) = client.status()["tiers"]["tiers"]
        assert tier["objects"] == 9
        assert tier["writes"]["breaker"] == "closed"


@needs_index
def test_no_torn_image_of_a_power_cut_gives_wrong_bytes(node: Node, tmp_path: Path) -> None:
    """Sectors are of different moments, at random; each key has other content each time that it is stored."""
    images: list[bytes] = []
    with node.serve() as server, server.connect() as client:
        for version in range(4):
            store(client, range(version, 60), version)
            images.append(node.file.read_bytes())
            client.clear(SPACE)
        cleared = node.word(headers.CLEARED_OFFSET)
    rng = random.Random(5)
    kept = 0
    for _ in range(12):
        node.reboot()
        blocks = rng.choice([64, 512, 4096])
        share = rng.random()
        old, new = rng.sample(images, 2)
        torn = bytearray(new)
        for start in range(0, len(torn), blocks):
            if rng.random() < share:
                torn[start : start + blocks] = old[start : start + blocks]
        torn[: headers.HEADER_BYTES] = images[0][: headers.HEADER_BYTES]  # no clear yet: everything may be adopted
        node.file.write_bytes(torn)
        node.reboot()
        with node.serve() as server, server.connect() as client:
            for number, each in found(client, range(60)).items():
                kept += 1
                assert each in [content(number, version) for version in range(4)], "bytes that were never this key's"
    assert kept, "no image was adopted: this shows nothing"
    assert cleared


@needs_index
def test_what_was_cleared_does_not_come_back_after_a_power_cut(node: Node) -> None:
    with node.serve() as server, server.connect() as client:
        store(client, range(10))
        before = node.file.read_bytes()
        client.clear(SPACE)
        page = node.file.read_bytes()[: headers.HEADER_BYTES]
    node.file.write_bytes(page + before[headers.HEADER_BYTES :])  # only what is flushed by a clear got to the disk
    node.reboot()
    with node.serve() as server, server.connect() as client:
        assert pool_of(server)["adopted"]["dropped"]["unverifiable"] == 10
        assert found(client, range(10)) == {}


@needs_index
@pytest.mark.parametrize("reboots", [True, False])
def test_an_entry_without_its_seal_is_dropped_after_a_reboot_alone(node: Node, reboots: bool) -> None:
    with node.serve() as server, server.connect() as client:
        store(client, range(4))
    checksum_at = node.file.read_bytes().index(key(2)) + 64  # keys stand in the index alone
    with node.file.open("r+b") as file:
        os.pwrite(file.fileno(), os.pread(file.fileno(), 8, checksum_at)[::-1], checksum_at)
    if reboots:
        node.reboot()
    with node.serve() as server, server.connect() as client:
        assert pool_of(server)["adopted"]["dropped"]["half_changed"] == int(reboots)
        assert sorted(found(client, range(4))) == [0, 1, 3], "without a seal, its reader notices"


@needs_index
def test_a_server_that_fails_before_it_serves_leaves_what_it_has_found(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node.serve() as server, server.connect() as client:
        store(client, range(5))
    node.reboot()
    with monkeypatch.context() as patched:
        patched.setattr("lmcache_core.server.build.Clears", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), node.serve():
            pass
    assert node.word(headers.BOOT_OFFSET) == 77
    assert node.word(headers.FLUSHED_OFFSET) == 1
    with node.serve() as server, server.connect() as client:
        assert pool_of(server)["rebooted"]
        assert len(found(client, range(5))) == 5


@needs_index
def test_a_clear_that_the_disk_does_not_take_is_an_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(address: int, nbytes: int) -> None:
        raise OSError(5, "Input/output error")

    with node.serve() as server, server.connect() as client:
        store(client, range(3))
        with monkeypatch.context() as patched:
            patched.setattr("lmcache_core.pool.segment.flush", refuses)
            with pytest.raises(PoolError, match=r"does not take the clear, .*: Input/output error"):
                client.clear(SPACE)
        assert len(found(client, range(3))) == 3
        client.clear(SPACE)
        assert found(client, range(3)) == {}


@needs_index
def test_without_keeping_the_file_goes_with_its_server(node: Node) -> None:
    with node.serve(keep_pool=False) as server, server.connect() as client:
        store(client, range(3))
        assert node.file.stat().st_blocks * 512 >= 8 * MIB, "it has all of its blocks, so that no write can fail"
    assert not node.file.exists()


# --- what is refused ---------------------------------------------------------------------------------------------


def fails(node: Node, words: str, kind: type[Exception] = PoolError, **l1: Any) -> None:
    with pytest.raises(kind, match=words), node.serve(**l1):
        pass


@pytest.mark.parametrize("made", [b"", b"somebody's data", bytes(9 * MIB), b"LMCPOOM\0" + bytes(4096)])
def test_a_file_that_is_no_pool_is_not_touched(node: Node, made: bytes) -> None:
    node.file.write_bytes(made)
    before = node.file.stat()
    for on_stale in ("adopt", "recreate"):
        fails(node, "is not a pool of lmcache-core, so it is not touched: use another l1.path", on_stale=on_stale)
    after = node.file.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    assert node.file.read_bytes() == made


@needs_index
def test_the_pool_of_a_server_of_another_name_is_not_touched(node: Node) -> None:
    with node.serve():
        pass
    data = node.file.read_bytes()
    table = {"backing": "file", "path": str(node.file), "size_bytes": 4 * MIB}
    with pytest.raises(PoolError, match="is the pool of the server 'ondisk'"), embedded_server(node.folder, l1=table):
        pass
    assert node.file.read_bytes() == data


def test_one_of_two_servers_has_the_file(node: Node, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(node.disk)
    table = {"backing": "file", "path": str(tmp_path / "link" / node.file.name), "size_bytes": 8 * MIB}
    other = embedded_server(tmp_path / "elsewhere", name="ondisk", l1=table)
    (tmp_path / "elsewhere").mkdir()
    with node.serve(), pytest.raises(PoolBusyError, match="belongs to a living server"), other:
        pass


@needs_index
def test_what_a_server_left_while_it_made_the_file_is_made_anew(node: Node) -> None:
    node.file.write_bytes(on_disk.MAKING + bytes(4096))
    with node.serve() as server:
        assert pool_of(server)["adopted"] is None


def test_a_new_file_has_its_mark_before_it_has_its_name(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    link = os.link

    def looking(source: str, path: Path, **options: Any) -> None:
        link(source, path, **options)
        seen.append(path.read_bytes())

    monkeypatch.setattr(os, "link", looking)
    with node.serve():
        pass
    assert seen == [on_disk.MAKING]


def test_a_pool_is_made_where_every_new_file_has_a_name(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def without_tmpfile(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return really_open(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", without_tmpfile)
    with node.serve():
        assert node.file.read_bytes()[: len(on_disk.MAGIC)] == on_disk.MAGIC


@needs_index
def test_a_disk_that_does_not_take_that_it_is_served_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with node.serve():
        pass
    before = node.file.read_bytes()

    def refuses(address: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("lmcache_core.pool.segment.flush", refuses)
        fails(node, "does not take that it is served, .*: Input/output error; see to its disk")
    assert len(node.file.read_bytes()) == len(before)
    with node.serve() as server:
        assert pool_of(server)["adopted"] is not None


@pytest.mark.parametrize("lives", [True, False])
def test_a_worker_outlives_a_boot_number_of_its_servers_container(node: Node, lives: bool) -> None:
    """Containers may have numbers of their own: then another number is no reboot. What is read is checked anyway."""
    options: dict[str, Any] = {"runtime_dir": node.folder / "run", "file": node.file, "on_stale": "adopt"}
    segment = Segment.create("ondisk", 4 * MIB, "file", **options)
    row, _ = segment.claim_row()
    worker = Segment.attach_fd(segment.worker_fd(), segment.info)
    lock = LifeLock.acquire(worker, row)
    boot = segment.header.boot_id
    segment.close(keep=True)
    node.reboot()
    if not lives:
        lock.close()
    with closing(Segment.create("ondisk", 4 * MIB, "file", **options)) as successor:
        assert successor.rebooted
        assert successor.living_rows()[row] == lives
        assert (successor.header.boot_id == boot) == lives, "the worker's mapping is good as long as it is used"
    lock.close()
    worker.close()


@needs_index
def test_a_file_that_is_smaller_than_its_header_says_is_made_anew(node: Node) -> None:
    with node.serve():
        pass
    os.truncate(node.file, 5 * MIB)
    with node.serve() as server:
        assert native is None or "truncated" in pool_of(server)["why_cold"]
        assert node.file.stat().st_size > 8 * MIB


def test_a_link_and_a_directory_are_no_pool(node: Node, tmp_path: Path) -> None:
    node.file.mkdir()
    fails(node, "cannot be opened|is not a file")
    node.file.rmdir()
    (tmp_path / "other").write_bytes(b"x")
    node.file.symlink_to(tmp_path / "other")
    fails(node, "cannot be opened")
    assert (tmp_path / "other").read_bytes() == b"x"


def test_a_disk_that_is_not_mounted_is_named(node: Node) -> None:
    fails(
        node,
        r"nowhere does not exist: create it, or mount its disk.*RequiresMountsFor",
        path=str(node.disk / "nowhere" / "p"),
    )


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "cifs"])
def test_a_network_s_file_system_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(on_disk, "file_system_of", lambda directory: kind)
    fails(node, f"is on {kind}, and processes of other machines may map the same file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(node: Node) -> None:
    os.chown(node.disk, 12345, -1)
    fails(node, r"cannot hold a pool: .*name another directory in l1\.path")


def test_a_disk_without_room_is_named_and_nothing_stays(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(node, r"disk has .* GiB free .*free some there, .*l1\.path", NotEnoughMemoryError, size_bytes=8 << 40)
    assert list(node.disk.iterdir()) == []

    def full(fd: int, offset: int, nbytes: int) -> None:  # somebody else was faster
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fails(node, r"got no room for its .* bytes at .*: No space left on device; free some", NotEnoughMemoryError)
    assert list(node.disk.iterdir()) == []


@needs_index
def test_a_pool_with_holes_gets_its_blocks_before_it_is_served(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a copy, or from a backup: `cp` makes holes of zeros."""
    with node.serve() as server, server.connect() as client:
        store(client, range(3))
    blocks = node.file.stat().st_blocks
    with node.file.open("r+b") as file:
        punch_hole(file.fileno(), 7 * MIB, MIB)
    assert node.file.stat().st_blocks < blocks
    with node.serve() as server, server.connect() as client:
        assert pool_of(server)["adopted"] is not None
        assert node.file.stat().st_blocks >= blocks
        assert set(found(client, range(3))) == {0, 1, 2}
    with node.file.open("r+b") as file:
        punch_hole(file.fileno(), 7 * MIB, MIB)

    def quota(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    before = node.file.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", quota)
        fails(node, r"got no room .*: Disk quota exceeded \(a quota of bytes or of files", NotEnoughMemoryError)
    assert node.file.read_bytes() == before


# --- commands ----------------------------------------------------------------------------------------------------


@needs_index
def test_clean_removes_the_file_of_a_dead_server_and_no_other(node: Node) -> None:
    with node.serve():
        assert [each.state for each in clean(files=[node.file])] == [CleanState.OWNER_LIVES]
    foreign, gone = node.disk / "data", node.disk / "gone"
    foreign.write_bytes(b"somebody's")
    states = [each.state for each in clean(files=[foreign, gone, node.file], dry_run=True)]
    assert states == [CleanState.REFUSED, CleanState.REFUSED, CleanState.WOULD_REMOVE]
    (removed,) = clean(files=[node.file])
    assert (removed.state, removed.nbytes >= 8 * MIB) == (CleanState.REMOVED, True)
    assert [path.name for path in node.disk.iterdir()] == ["data"]


def check(node: Node, capsys: pytest.CaptureFixture[str], **l1: Any) -> dict[str, tuple[bool, str]]:
    table = {"backing": "file", "path": str(node.file), "size_bytes": "8MiB", **l1}
    flags = [word for name, value in table.items() for word in (f"--l1.{name}", str(value))]
    main(["check", "--json", "--name", "ondisk", "--runtime_dir", str(node.folder / "run"), *flags])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return {each["subject"]: (each["ok"], each["message"]) for each in findings}


def test_check_says_what_a_server_would(
    node: Node, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(node, capsys)
    assert found["l1.path"][0]
    assert found["l1"][0]
    node.file.write_bytes(b"somebody's")
    ok, text = check(node, capsys)["l1"]
    assert not ok
    assert "is not a pool of lmcache-core" in text
    node.file.unlink()
    monkeypatch.setattr(on_disk, "file_system_of", lambda directory: "tmpfs")
    ok, text = check(node, capsys)["l1.path"]
    assert not ok
    assert "is on tmpfs, which ends with the machine" in text


def test_the_settings_say_what_is_missing() -> None:
    with pytest.raises(SettingsError, match="needs path"):
        make_settings(l1={"backing": "file"})
    with pytest.raises(SettingsError, match='path is given, and backing is "shm"'):
        make_settings(l1={"path": "/mnt/nvme/pool"})
    assert make_settings(l1={"backing": "file", "path": "/mnt/nvme/pool"}).l1.keeps_pool
    assert not make_settings(l1={}).l1.keeps_pool
