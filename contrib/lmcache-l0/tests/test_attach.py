"""Making and finding tables: sizes, rights, races, files that are no tables."""

from __future__ import annotations

import os
import random
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from lmcache_l0 import SharedCache, _table
from lmcache_l0.errors import (
    SizesError,
    TableDamagedError,
    TableError,
    TableMismatchError,
    TableRoomError,
    UsageError,
)
from lmcache_l0.sizing import GIB, plan_table


def test_two_of_three_sizes_decide_the_third():
    assert plan_table().file_bytes <= GIB
    assert plan_table(size_gb=0.5, max_value_size=100).file_bytes <= GIB // 2
    plan = plan_table(hash_slots=1000)
    assert (plan.hash_slots, plan.max_value_size, plan.keys_planned) == (1000, 4096, 700)
    plan = plan_table(size_gb=1, hash_slots=10_000)
    assert plan_table(hash_slots=10_000, max_value_size=plan.max_value_size).file_bytes <= GIB
    assert plan_table(hash_slots=10_000, max_value_size=plan.max_value_size + 64).file_bytes > GIB


@pytest.mark.parametrize("size_gb", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("value", [1, 64, 4096, 1 << 20])
def test_a_size_is_used_up_to_the_last_slot(size_gb, value):
    plan = plan_table(size_gb=size_gb, max_value_size=value) if size_gb * GIB > value * 4 else None
    if plan is None:
        return
    assert plan.file_bytes <= size_gb * GIB
    assert plan_table(hash_slots=plan.hash_slots + 1, max_value_size=value).file_bytes > size_gb * GIB


def test_sizes_that_contradict_name_three_ways_out():
    with pytest.raises(SizesError) as caught:
        plan_table(size_gb=0.1, hash_slots=100_000, max_value_size=4096)
    text = str(caught.value).replace(",", "")
    names = ("size_gb", "hash_slots", "max_value_size")
    more, fewer, smaller = (text.split(f"{name}=")[-1].split(" ")[0] for name in names)
    plan_table(size_gb=float(more), hash_slots=100_000, max_value_size=4096)
    plan_table(size_gb=0.1, hash_slots=int(fewer), max_value_size=4096)
    plan_table(size_gb=0.1, hash_slots=100_000, max_value_size=int(smaller))


def test_a_slot_of_4_kib_costs_4_and_a_half():
    plan = plan_table(hash_slots=10_000_000)
    assert plan.slot_bytes < 4.55 * 1024
    assert 45e9 < plan.file_bytes < 46.5e9
    assert plan_table(hash_slots=10_000_000, versions=2).slot_bytes > 12 * 1024
    with pytest.raises(SizesError, match=r"1,000,000 slots for values of 4,096 bytes need 4\.3\d\d GiB"):
        plan_table(size_gb=1, hash_slots=1_000_000, max_value_size=4096)


@pytest.mark.parametrize(
    ("sizes", "ways"),
    [
        ({"size_gb": 0.0003, "hash_slots": 100_000}, ["size_gb", "hash_slots"]),  # not even the smallest values fit
        ({"size_gb": 1e-5, "max_value_size": 1 << 20}, ["size_gb"]),  # not even one slot
        ({"size_gb": 1e-9}, ["size_gb"]),
        ({"size_gb": 0.1, "hash_slots": 100_000, "max_value_size": 4096}, ["size_gb", "hash_slots", "max_value_size"]),
    ],
)
def test_only_ways_out_that_lead_out_are_named(sizes, ways):
    with pytest.raises(SizesError) as caught:
        plan_table(**sizes)
    offered = str(caught.value).split("give ")[1]
    assert re.findall(r"(\w+)=", offered) == ways


def test_values_of_one_mib_are_at_home(make, folder):
    cache = make(folder / "t", size_gb=0.01, max_value_size=1 << 20)
    value = os.urandom(1 << 20)
    cache.set("k", value)
    assert cache.get("k") == value
    assert cache.hash_slots == 8


@pytest.mark.parametrize(
    "sizes",
    [
        {"hash_slots": 0},
        {"hash_slots": True},
        {"max_value_size": 0},
        {"max_value_size": 1 << 31},
        {"spares": 0},
        {"spares": 8},
        {"versions": True},
        {"versions": 2, "spares": 3},
        {"size_gb": float("nan")},
        {"size_gb": float("inf")},
        {"versions": 65},
        {"max_key_size": 257},
        {"size_gb": 0},
        {"size_gb": -1.0},
        {"hash_slots": 1 << 40, "max_value_size": 1 << 30},
    ],
)
def test_sizes_beyond_the_limits_are_refused(folder, sizes):
    with pytest.raises(UsageError):
        SharedCache(folder / "t", **sizes)
    assert not (folder / "t").exists()


def test_the_file_is_its_owners_alone(make):
    before = os.umask(0)
    try:
        cache = make()
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path(cache.path).stat().st_mode) == 0o600


def test_a_second_handle_sees_what_the_first_wrote(make):
    first = make()
    second = make(first.path)
    first.set("k", b"1")
    assert second.get("k") == b"1"
    second.set("k", b"2")
    assert first.get("k") == b"2"
    assert (second.hash_slots, second.max_value_size) == (64, 256)


def test_an_attach_with_other_sizes_names_both(make):
    cache = make(versions=3)
    make(cache.path, hash_slots=64, max_value_size=256, versions=3)
    with pytest.raises(TableMismatchError, match="spares=2, not 4"):
        make(make().path, spares=4)
    for sizes, said in [
        ({"hash_slots": 65}, "hash_slots=64, not 65"),
        ({"max_value_size": 512}, "max_value_size=256, not 512"),
        ({"versions": 2}, "versions=3, not 2"),
        ({"max_key_size": 8}, "max_key_size=256, not 8"),
        ({"size_gb": 1}, "GiB, not 1.000"),
    ]:
        with pytest.raises(TableMismatchError, match=said):
            make(cache.path, **sizes)


def test_an_attach_with_the_size_of_its_making_is_welcome(make, folder):
    make(folder / "t", size_gb=0.01)
    make(folder / "t", size_gb=0.01)
    make(folder / "t")


def test_nothing_is_made_where_only_an_attach_was_asked_for(folder):
    with pytest.raises(FileNotFoundError, match="make one, "):
        SharedCache(folder / "absent", create=False)
    with pytest.raises(FileNotFoundError):
        SharedCache(folder / "absent", hash_slots=10, read_only=True)
    with pytest.raises(UsageError):
        SharedCache(folder / "absent", create=True, read_only=True)
    assert not list(folder.iterdir())


def test_a_path_alone_makes_a_table_of_one_gib_for_values_of_4_kib(make, folder):
    cache = make(folder / "t", reserve=False)
    assert cache.max_value_size == 4096
    assert 0.999 * GIB < cache.file_bytes <= GIB


def test_a_reader_without_rights_to_write_reads(make):
    cache = make()
    cache.set("k", b"v")
    Path(cache.path).chmod(0o400)
    reader = make(cache.path, read_only=True)
    assert reader.get("k") == b"v"
    assert reader.get_many(["k"]) == [b"v"]
    for call in (
        lambda: reader.set("k", b""),
        lambda: reader.delete("k"),
        lambda: reader.get_numpy("k", 1, "u1", writable=True),
        reader.cool,
        lambda: setattr(reader, "enabled", False),
    ):
        with pytest.raises(UsageError, match="read-only"):
            call()


def test_a_table_without_room_is_refused_before_it_is_there(folder):
    with pytest.raises(TableRoomError, match="make it smaller"):
        SharedCache(folder / "t", size_gb=40_000)
    assert not (folder / "t").exists()


def test_memory_is_there_from_the_beginning_unless_not_asked_for(make, folder):
    cache = make()
    assert Path(cache.path).stat().st_blocks * 512 >= cache.file_bytes
    sparse = make(folder / "sparse", size_gb=1, reserve=False)
    assert Path(sparse.path).stat().st_blocks * 512 < sparse.file_bytes // 4


def test_the_switch_is_seen_by_every_handle(make):
    cache = make()
    other = make(cache.path)
    assert other.enabled
    cache.enabled = False
    assert not other.enabled
    other.enabled = True
    assert cache.enabled


def test_an_unlinked_table_goes_on_and_makes_room_for_a_new_one(make):
    cache = make()
    cache.unlink()
    cache.set("k", b"v")  # its first write: the life lock is taken on a file without a name
    fresh = make(cache.path, hash_slots=32, max_value_size=64)
    assert cache.get("k") == b"v"
    assert fresh.get("k") is None


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("short", b"x", TableDamagedError),
        ("text", b"hello" * 5000, TableDamagedError),
        ("empty", b"", TableDamagedError),
        ("zeros", bytes(1 << 20), TableDamagedError),
    ],
)
def test_a_file_that_is_no_table_is_refused(folder, name, content, error):
    (folder / name).write_bytes(content)
    with pytest.raises(error, match="name another path"):
        SharedCache(folder / name)
    assert (folder / name).read_bytes() == content


def test_a_folder_is_no_table(folder):
    with pytest.raises((TableError, IsADirectoryError)):
        SharedCache(folder)


def test_another_layout_version_is_named(make):
    cache = make()
    with open(cache.path, "r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    with pytest.raises(TableMismatchError, match=f"layout 99 and this library speaks {_table.LAYOUT_VERSION}"):
        make(cache.path)


def test_a_table_that_was_cut_off_is_refused(make):
    cache = make()
    path = cache.path
    cache.close()
    os.truncate(path, Path(path).stat().st_size - 4096)
    with pytest.raises(TableDamagedError, match="cut off"):
        make(path)


def test_damaged_tables_never_crash_who_attaches(make, folder):
    """Random bytes anywhere in the file; every call of the library on it, in a process that must live."""
    cache = make(hash_slots=20)
    for i in range(12):
        cache.set(f"{i}", b"x" * i * 20)
    good = Path(cache.path).read_bytes()
    dice = random.Random(5)
    for number in range(60):
        bad = bytearray(good)
        start = dice.choice([0, 0, 4096, cache.file_bytes - 24 * cache.slot_bytes])
        for _ in range(dice.choice([1, 10, 1000])):
            bad[dice.randrange(start, len(bad))] = dice.randrange(256)
        if number % 10 == 0:
            bad = bad[: dice.randrange(len(bad))]
        (folder / f"bad-{number}").write_bytes(bad)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("attacher.py")), *map(str, sorted(folder.glob("bad-*")))],
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    used, refused = map(int, done.stdout.split())
    assert used + refused == 60
    assert used >= 5
    assert refused >= 5


def test_of_many_makers_one_makes_and_all_attach(folder):
    code = (
        "import sys; from lmcache_l0 import SharedCache\n"
        "sys.stdin.read()\n"
        "c = SharedCache(sys.argv[1], hash_slots=500); c.set(sys.argv[2], b'here'); print(c.table_id)"
    )
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder / "t"), str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(6)
    ]
    for maker in makers:
        maker.stdin.close()
        maker.stdin = None
    identities = {maker.communicate(timeout=60)[0] for maker in makers}
    assert len(identities) == 1
    with SharedCache(folder / "t") as cache:
        assert sorted(cache) == [str(i).encode() for i in range(6)]
