"""Several processes: writers at once, readers meanwhile, writers that are killed, creators that are gone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
from lmcache_l0 import SharedCache
from lmcache_l0.errors import TableBusyError

KILLS = 80  # of each kind of table


def stamped(key: int, stamp: int, n: int) -> bytes:
    """A value of n bytes that says which key it belongs to, and is one pattern from end to end."""
    return (key.to_bytes(2, "little") + stamp.to_bytes(6, "little")) * (n // 8)


def whole(key: int, value: bytes) -> bool:
    return value[:2] == key.to_bytes(2, "little") and value == value[:8] * (len(value) // 8)


forked: set[int] = set()


@pytest.fixture(autouse=True)
def no_child_is_left():
    """Whatever became of the test."""
    yield
    for pid in list(forked):
        os.kill(pid, signal.SIGKILL)
        ended(pid)


def in_child(work) -> int:
    """Fork; the child does `work` and ends without a trace of pytest. Its pid, for `ended`."""
    pid = os.fork()
    if pid:
        forked.add(pid)
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    status = os.waitpid(pid, 0)[1]
    forked.discard(pid)
    return os.waitstatus_to_exitcode(status)


def write_for_ever(cache: SharedCache, key: str, value: bytes) -> None:
    """Until the tester is gone."""
    tester = os.getppid()
    while os.getppid() == tester:
        for _ in range(100):
            cache.set(key, value)


def stop_in_the_middle(cache: SharedCache, key: str, writer: int) -> None:
    """Stop a process that writes this key without end while it holds the key's slot."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        os.kill(writer, signal.SIGCONT)
        view = cache.view(key)
        while view.valid() and time.monotonic() < until:  # it has run, and written
            time.sleep(0)
        os.kill(writer, signal.SIGSTOP)
        os.waitpid(writer, os.WUNTRACED)
        if cache.stats.locked:
            return
    raise AssertionError("the writer was never met in the middle of a write")


@pytest.mark.parametrize("sizes", [{"spares": 1}, {}, {"versions": 1}], ids=["1 spare", "2 spares", "1 version"])
def test_readers_never_see_half_a_write_of_many_writers(make, sizes):
    cache = make(hash_slots=16, max_value_size=32 << 10, **sizes)

    def write(seed: int) -> None:
        dice = random.Random(seed)
        for stamp in range(1000):
            key = dice.randrange(4)
            if dice.random() < 0.1:
                cache.delete(f"{key}")
            cache.set(f"{key}", stamped(key, stamp, dice.choice([8, 4096, 32 << 10])))

    writers = [in_child(lambda seed=seed: write(seed)) for seed in range(3)]
    reads, left = 0, set(writers)
    while left:
        over = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        forked.difference_update(over)
        left -= over
        for key in range(4):
            for value in (cache.get(f"{key}"), *cache.get_many([f"{key}"] * 3)):
                assert value is None or whole(key, value)
                reads += value is not None
            snapshot = cache.view(f"{key}")
            if snapshot is not None:
                copy = bytes(snapshot)
                assert whole(key, copy) or not snapshot.valid()
    assert reads > 0
    assert sorted(cache) == [b"0", b"1", b"2", b"3"]
    assert cache.stats.locked == 0


def test_writers_of_different_keys_lose_nothing_of_each_other(make):
    cache = make(hash_slots=4096, max_value_size=64)

    def write(writer: int) -> None:
        for i in range(600):
            cache.set(f"{writer}/{i}", f"{writer}:{i}".encode())
            cache.set(f"shared {i}", b"anyone's")
            if i % 3 == 0:
                cache.delete(f"{writer}/{i}")

    writers = [in_child(lambda writer=writer: write(writer)) for writer in range(4)]
    assert [ended(pid) for pid in writers] == [0] * 4
    expected = {f"{w}/{i}".encode(): f"{w}:{i}".encode() for w in range(4) for i in range(600) if i % 3}
    expected |= {f"shared {i}".encode(): b"anyone's" for i in range(600)}
    assert dict(cache.items()) == expected
    assert len(cache) == len(expected) == cache.stats.keys


@pytest.mark.parametrize("sizes", [{}, {"versions": 2}], ids=["stripes", "versions"])
def test_writers_killed_at_any_moment_leave_every_value_whole_and_every_slot_writable(make, sizes):
    cache = make(hash_slots=8, max_value_size=64 << 10, **sizes)
    dice = random.Random(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key in range(4):
            cache.set(f"{key}", stamped(key, 0, 64 << 10))

        def write(started: int) -> None:
            stamp, tester = 1, os.getppid()
            while os.getppid() == tester:
                for key in range(4):
                    cache.set(f"{key}", stamped(key, stamp, 64 << 10))
                for key in range(4, 7):
                    cache.set(f"{key}", stamped(key, stamp, 32 << 10))
                    cache.delete(f"{key}")
                if stamp == 1:
                    os.write(started, b"!")
                stamp += 1

        for _ in range(KILLS):
            ours, theirs = os.pipe()
            writer = in_child(lambda theirs=theirs: write(theirs))
            assert os.read(ours, 1) == b"!"
            time.sleep(dice.random() * 0.002)  # the random moment
            os.kill(writer, signal.SIGKILL)
            assert ended(writer) == -signal.SIGKILL
            os.close(ours)
            os.close(theirs)
            for key in range(4):
                assert whole(key, cache.get(f"{key}"))
            for key in range(4, 7):
                value = cache.get(f"{key}")
                assert value is None or whole(key, value)
            victim = dice.randrange(7)
            cache.set(f"{victim}", stamped(victim, 1, 8))
            if victim > 3:
                cache.delete(f"{victim}")
        assert cache.stats.recovered > 0  # or no kill hit a write, and this test has shown nothing
        for key in range(7):
            cache.set(f"{key}", stamped(key, 2, 64 << 10))
        cache.set("the last slot", b"")
        assert cache.stats.keys == 8  # no slot was lost to the dead
        assert cache.stats.claimed == 0


@pytest.mark.parametrize("versions", [None, 2], ids=["its stripe", "its own key"])
def test_a_stopped_writer_holds_up_its_stripe_or_its_key_and_no_other(make, versions):
    cache = make(hash_slots=320, max_value_size=1 << 20, wait_s=0.2, reserve=False, versions=versions)
    value = stamped(1, 1, 1 << 20)
    cache.set("1", value)
    writer = in_child(lambda: write_for_ever(cache, "1", value))
    stop_in_the_middle(cache, "1", writer)
    held_up = 0
    for i in range(2, 62):
        try:
            cache.set(f"{i}", b"not held up")
        except TableBusyError:
            held_up += 1
    # A stripe is a fifth of this table.
    assert held_up == 0 if versions else held_up < 30
    assert whole(1, cache.get("1"))
    with pytest.raises(TableBusyError, match="alive but does not move"):
        cache.set("1", b"mine")
    os.kill(writer, signal.SIGKILL)
    ended(writer)
    cache.set_many({f"{i}": b"mine" for i in range(1, 62)})
    assert set(cache.get_many([f"{i}" for i in range(1, 62)])) == {b"mine"}


def test_a_parents_death_is_seen_though_its_child_lives(make):
    """The life lock must not travel with a fork: the child would keep its dead parent alive for good."""
    cache = make(wait_s=20.0, max_value_size=1 << 20)
    value = bytes(1 << 20)
    cache.set("k", value)
    hold, release = os.pipe()
    ready, told = os.pipe()

    def parent() -> None:
        cache.set("k", value)  # it is a writer now
        if os.fork() == 0:
            os.close(release)
            os.write(told, b"!")
            os.read(hold, 1)  # lives until the test is over
            os._exit(0)
        write_for_ever(cache, "k", value)

    try:
        writer = in_child(parent)
        assert os.read(ready, 1) == b"!"
        stop_in_the_middle(cache, "k", writer)
        os.kill(writer, signal.SIGKILL)
        ended(writer)
        cache.set("k", b"relieved")
        assert cache.get("k") == b"relieved"
        assert cache.stats.recovered == 1
    finally:
        for fd in (release, hold, ready, told):
            os.close(fd)


def test_a_table_outlives_its_creator(folder):
    code = (
        "import sys, os, signal; from lmcache_l0 import SharedCache\n"
        "c = SharedCache(sys.argv[1], hash_slots=10); c.set('k', b'v'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    gone = subprocess.run([sys.executable, "-c", code, str(folder / "t")], check=False, timeout=60)
    assert gone.returncode == -signal.SIGKILL
    with SharedCache(folder / "t") as cache:
        assert cache.get("k") == b"v"
        cache.set("k", b"w")
        assert cache.writers() == [os.getpid()]


def test_living_writers_are_listed_and_dead_ones_are_not(make):
    cache = make()
    ours, theirs = os.pipe()
    stay, leave = os.pipe()

    def write() -> None:
        os.close(leave)
        cache.set("k", b"")
        os.write(theirs, b"!")
        os.read(stay, 1)

    writer = in_child(write)
    os.read(ours, 1)
    assert cache.writers() == [writer]
    cache.set("k", b"")
    assert sorted(cache.writers()) == sorted([writer, os.getpid()])
    os.kill(writer, signal.SIGKILL)
    ended(writer)
    assert cache.writers() == [os.getpid()]
    for fd in (ours, theirs, stay, leave):
        os.close(fd)


def test_long_batches_let_other_threads_run(make):
    """Another thread must come to run while a long batch is copied."""
    cache = make(hash_slots=512, max_value_size=256 << 10, versions=1)
    keys = [f"{i}" for i in range(300)]
    cache.set_many([(key, bytes(256 << 10)) for key in keys])
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that only a release of the GIL lets the other thread in
    moved, gate = threading.Event(), threading.Lock()
    gate.acquire()
    try:
        other = threading.Thread(target=lambda: gate.acquire() and moved.set())
        other.start()
        gate.release()  # from here on it wants to run, and only a batch can let it
        until = time.monotonic() + 60
        while not moved.is_set() and time.monotonic() < until:
            cache.get_many(keys)
        assert moved.is_set()
        other.join()
    finally:
        sys.setswitchinterval(before)


def test_threads_of_one_handle_take_turns(make):
    cache = make(hash_slots=1024, max_value_size=4096)
    failed: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(40):
                cache.set_many([(f"{k}", stamped(k, i, 4096)) for k in range(600)])
                assert all(whole(k, v) for k, v in enumerate(cache.get_many([f"{k}" for k in range(600)])))
        except BaseException as error:  # noqa: BLE001 - told to the test below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert cache.stats.keys == 600
