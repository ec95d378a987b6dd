"""Calls that an adversary makes: Python that runs in the middle of a call, foreign files, lying buffers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from lmcache_l0 import SharedCache
from lmcache_l0.errors import TableBusyError, TableDamagedError, TableError, TableLoadWarning, UsageError


def python(code: str, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A process of its own, that may die of what it does."""
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=timeout, check=False
    )


def lives(code: str, path: str) -> None:
    done = python(
        "import sys, warnings; warnings.simplefilter('ignore')\nfrom lmcache_l0 import SharedCache\n" + code, path
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


# ---- Python in the middle of a call


@pytest.mark.parametrize(
    "call",
    [
        "set_many((str(i), b'x') for i in close())",
        "get_many(str(i) for i in close())",
        "get_many_into(list(map(str, close())), bytearray(3000))",
    ],
)
def test_closing_the_table_in_the_iterator_of_a_batch_is_an_error_and_no_crash(make, call):
    lives(
        f"""
c = SharedCache(sys.argv[1])
c.set_many({{str(i): b'x' for i in range(60)}})
def close():
    for i in range(3000):
        if i == 2500: c.close()
        yield i
try:
    c.{call}
except Exception as error:
    assert "closed" in str(error), error
else:
    raise SystemExit("it went through")
""",
        make().path,
    )


def test_closing_the_table_in_a_signal_handler_during_a_batch_is_an_error_and_no_crash(make):
    lives(
        """
import signal
c = SharedCache(sys.argv[1])
signal.signal(signal.SIGALRM, lambda *_: c.close())
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    while True:
        c.set_many([("k", b"x" * 4000)] * 20_000)
except Exception as error:
    assert "closed" in str(error), error
""",
        make(max_value_size=4096).path,
    )


def test_closing_the_table_in_another_thread_during_a_batch_is_an_error_and_no_crash(make):
    lives(
        """
import threading
for turn in range(20):
    c = SharedCache(sys.argv[1])
    begun = threading.Event()
    def close():
        begun.wait()
        c.close()
    other = threading.Thread(target=close)
    other.start()
    try:
        while True:
            c.set_many([("k", b"x" * 4000)] * 3_000)
            c.get_many(["k"] * 3_000)
            begun.set()
    except Exception as error:
        assert "closed" in str(error), error
    other.join()
""",
        make(max_value_size=4096).path,
    )


CLOSES = """
class I(int):
    def __index__(self): c.close(); return 1
class K(str):
    def __repr__(self): c.close(); return "k"
class B:
    def __bool__(self): c.close(); return True
class D:
    @property
    def dtype(self): c.close(); return "u1"
class G:
    def __del__(self): c.close()
def garbage():
    import gc
    gc.set_threshold(1)
    g = G()
    g.me = g
    del g
    for _ in range(99):
        c.scan(0, 1000)
        c.writers()
"""


@pytest.mark.parametrize(
    "call",
    [
        "c.insert('k', b'x', I(1))",
        "c.get_numpy(K('k'), 9, 'u1')",
        "c.get_numpy('k', 1, 'u1', snapshot=B())",
        "c.view('k', writable=B())",
        "setattr(c, 'enabled', B())",
        "c.set_numpy('k', D())",
        "garbage()",
    ],
)
def test_closing_the_table_in_whatever_a_call_asks_of_its_arguments_is_no_crash(make, call):
    cache = make()
    cache.set_many({f"{i}": b"x" for i in range(30)})
    lives(
        f"c = SharedCache(sys.argv[1]); c.set('k', b'x')\n{CLOSES}\ntry: {call}\nexcept Exception as e: print(repr(e))",
        cache.path,
    )


def test_a_fork_within_a_batch_writes_in_the_child_under_a_lock_of_its_own(make):
    """The child goes on in the middle of set_many; a third process must see that it lives."""
    cache = make(hash_slots=4096)
    lives(
        """
import os
c = SharedCache(sys.argv[1])
c.set("first", b"")
child = None
def items():
    global child
    for i in range(2100):
        if i == 1500: child = os.fork()
        yield str(i), b"x"
c.set_many(items())
writers = c.writers()
assert os.getpid() in writers, (os.getpid(), writers)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
        cache.path,
    )
    assert len(cache) == 2101


# ---- descriptors


def test_a_writer_that_has_lost_every_descriptor_is_not_taken_for_dead(make):
    """A daemon closes them all. What proves its life must not be among them."""
    cache = make(wait_s=0.3)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cache.set("k", b"x")
            os.dup2(theirs, 0)
            os.closerange(1, 4096)
            cache.set("k", b"y")
            os.write(0, b"!")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(ours, 1) == b"!"
        assert cache.writers() == [child]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
    assert cache.writers() == []


def test_a_descriptor_that_has_become_another_file_is_not_believed(make, folder):
    """After closerange() the number belongs to a file in which nobody holds a lock."""
    cache = make()
    cache.set("k", b"x")
    lives(
        """
import os
c = SharedCache(sys.argv[1])
table = os.stat(sys.argv[1])
for fd in range(3, 64):
    try:
        mine = os.fstat(fd).st_ino == table.st_ino
    except OSError:
        continue
    if mine:
        other = os.open(sys.argv[1] + ".other", os.O_RDWR | os.O_CREAT)
        os.dup2(other, fd)
assert len(c.writers()) == 1, c.writers()   # the test's own process lives
c.set("k", b"y")                            # and the life lock is taken in the table, not in the other file
assert os.getpid() in c.writers()
c.close()
""",
        cache.path,
    )
    assert cache.get("k") == b"y"


def test_a_name_that_has_become_another_file_is_not_written(make, folder):
    cache = make()
    Path(cache.path).unlink()
    make(cache.path, hash_slots=8, max_value_size=8)
    lives(
        """
import os, fcntl
c = SharedCache(sys.argv[1])
os.closerange(3, 64)
os.unlink(sys.argv[1])
SharedCache(sys.argv[1], hash_slots=9, max_value_size=9)
try:
    c.set("k", b"x")
except Exception as error:
    assert "must not have been replaced" in str(error), error
else:
    raise SystemExit("written")
""",
        cache.path,
    )


# ---- files


@pytest.mark.parametrize(
    "content",
    [b"", bytes(1), bytes(3_101_024), b"\0" * 200 + b"an image whose first words are zero" * 90_000, b"text" * 4096],
)
def test_a_file_that_is_no_table_is_never_changed(folder, content):
    path = folder / "image"
    path.write_bytes(content)
    for sizes in ({}, {"hash_slots": 20}, {"size_gb": 0.001}):
        with pytest.raises(TableDamagedError, match="name another path"):
            SharedCache(path, **sizes)
    assert path.read_bytes() == content
    assert [file.name for file in folder.iterdir()] == ["image"]


def test_a_table_whose_ready_word_was_lost_is_not_made_anew_under_its_readers(make):
    cache = make()
    cache.set("k", b"v")
    view = cache.view("k")
    with open(cache.path, "r+b") as file:
        file.seek(128)
        file.write(bytes(8))
    with pytest.raises(TableDamagedError):
        make(cache.path, hash_slots=64, max_value_size=256)
    assert Path(cache.path).stat().st_size == cache.file_bytes
    assert bytes(view) == cache.get("k") == b"v"


def test_who_attaches_during_a_creation_finds_no_table_or_a_whole_one(folder):
    code = (
        "import sys; from lmcache_l0 import SharedCache\n"
        "print(flush=True)\n"
        "c = SharedCache(sys.argv[1], hash_slots=200_000, max_value_size=256); c.set('k', b'v')"
    )
    maker = subprocess.Popen([sys.executable, "-c", code, str(folder / "t")], stdout=subprocess.PIPE)
    maker.stdout.readline()
    absent = 0
    while True:
        over = maker.poll() is not None
        try:
            with SharedCache(folder / "t", create=False) as cache:
                assert cache.hash_slots == 200_000
        except FileNotFoundError:
            assert not over
            absent += 1
        if over:
            break
    assert maker.wait() == 0
    maker.stdout.close()
    assert absent
    assert [file.name for file in folder.iterdir()] == ["t"]


def test_a_maker_that_was_killed_leaves_nothing_in_the_way(folder):
    code = (
        "import os, signal, sys; from lmcache_l0 import _table, SharedCache\n"
        "_table.initialise = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "SharedCache(sys.argv[1], hash_slots=100)"
    )
    assert python(code, str(folder / "t")).returncode == -signal.SIGKILL
    assert [file.name for file in folder.iterdir()] == [".t.making"]
    with SharedCache(folder / "t", hash_slots=20) as cache:
        assert cache.hash_slots == 20
    assert [file.name for file in folder.iterdir()] == ["t"]


def test_a_maker_that_fails_removes_nothing_of_others(folder, monkeypatch):
    def fail(*_):
        (folder / "t").write_bytes(b"somebody else's")
        raise OSError("no more room")

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="no more room"):
        SharedCache(folder / "t", hash_slots=20)
    assert (folder / "t").read_bytes() == b"somebody else's"
    assert [file.name for file in folder.iterdir()] == ["t"]


def test_a_stopped_maker_holds_nobody_up_for_longer_than_wait_s(folder):
    code = (
        "import os, signal, sys; from lmcache_l0 import _table, SharedCache\n"
        "real = _table.initialise\n"
        "def stopped(*arguments):\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    real(*arguments)\n"
        "_table.initialise = stopped\n"
        "SharedCache(sys.argv[1], hash_slots=20).set('k', b'of the first')"
    )
    maker = subprocess.Popen([sys.executable, "-c", code, str(folder / "t")])
    try:
        os.waitid(os.P_PID, maker.pid, os.WSTOPPED)
        with pytest.raises(TableBusyError, match="another process has been making the table"):
            SharedCache(folder / "t", hash_slots=20, wait_s=0.1)
        maker.send_signal(signal.SIGCONT)
        assert maker.wait(60) == 0
        with SharedCache(folder / "t", hash_slots=20) as cache:
            assert cache.get("k") == b"of the first"
    finally:
        maker.kill()
        maker.wait()


def test_a_symbolic_link_and_others_files_are_refused(make, folder):
    cache = make()
    (folder / "link").symlink_to(cache.path)
    with pytest.raises(TableError, match="symbolic link"):
        SharedCache(folder / "link")
    (folder / "dangling").symlink_to(folder / "nowhere")
    with pytest.raises(TableError, match="symbolic link"):
        SharedCache(folder / "dangling", hash_slots=3)
    Path(cache.path).chmod(0o620)
    with pytest.raises(TableError, match="others than its owner may write it"):
        SharedCache(cache.path)
    Path(cache.path).chmod(0o600)
    if os.geteuid() == 0:
        os.chown(cache.path, 12345, 12345)
        with pytest.raises(TableError, match="belongs to user 12345"):
            SharedCache(cache.path)
    os.mkfifo(folder / "pipe")
    with pytest.raises(TableError, match="is not a file"):
        SharedCache(folder / "pipe", read_only=True)


@pytest.mark.parametrize("wait_s", [0, -1.0, float("nan"), float("inf"), 1e11])
def test_a_wait_that_no_clock_can_count_is_refused(make, wait_s):
    with pytest.raises(UsageError, match="wait_s"):
        make(wait_s=wait_s)
    from lmcache_l0 import _table

    with open(make().path, "rb") as file, pytest.raises(UsageError, match="wait_s"):
        _table.Table("t", file.fileno(), False, wait_s, 0.7, False)


# ---- what lies in a buffer


def test_arrays_of_objects_are_neither_stored_nor_filled(make):
    cache = make()
    objects = np.array([object(), object()])
    fields = np.zeros(2, dtype=[("Order", "i4"), ("thing", object)])
    for array in (objects, fields):
        for call in (
            lambda array=array: cache.set("k", array),
            lambda array=array: cache.set_numpy("k", array),
            lambda array=array: cache.set_many({"k": array}),
            lambda array=array: cache.insert("k", array, cache.ticket("k")),
        ):
            with pytest.raises((UsageError, TypeError), match="Python objects"):
                call()
    assert "k" not in cache
    cache.set("k", bytes(16))
    with pytest.raises(UsageError, match="Python objects"):
        cache.get_many_into(["k"], objects)
    cache.set("k", np.zeros(2, dtype=[("Order", "i4")]))  # the O is a name's


def test_rows_of_another_type_are_refused_row_by_row(make):
    cache = make()
    cache.set_numpy("a", np.arange(4, dtype=np.float32))
    cache.set_numpy("b", np.arange(4, dtype=np.int32))
    out = np.full((2, 4), 7, np.int32)
    with pytest.raises(UsageError, match=r"'a' was stored as <f4 and is asked for as dtype\('int32'\)"):
        cache.get_many_into(["b", "a"], out)
    assert out.tolist() == [[0, 1, 2, 3], [7] * 4]
    raw = bytearray(32)  # bytes of anything
    assert cache.get_many_into(["a", "b"], raw) == b"\1\1"
    assert raw == np.arange(4, dtype=np.float32).tobytes() + np.arange(4, dtype=np.int32).tobytes()
    import array

    with pytest.raises(UsageError, match="'b' was stored as <i4"):
        cache.get_many_into(["a", "b"], array.array("f", [0] * 8))


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("M8[100m]", "M8[100ms]"),
        ("M8[s]", "M8[ms]"),
        ([("a", "f4"), ("b", "i4")], [("a", "i4"), ("b", "f4")]),
        ([("a", "f4"), ("b", "i4")], [("b", "f4"), ("a", "i4")]),
        ("f4", [("a", "f4")]),
        ("<f4", ">f4"),
    ],
)
def test_types_are_compared_whole(make, stored, asked):
    cache = make()
    cache.set_numpy("k", np.zeros(3, stored))
    same = cache.get_numpy("k", shape=(3,), dtype=stored)
    assert same.dtype == np.dtype(stored)
    n = 3 * np.dtype(stored).itemsize // np.dtype(asked).itemsize
    for snapshot in (False, True):
        with pytest.raises(UsageError, match="was stored as"):
            cache.get_numpy("k", shape=(n,), dtype=asked, snapshot=snapshot)
    rows = np.zeros((1, n), asked)
    with pytest.raises(UsageError, match="was stored as"):
        cache.get_many_into(["k"], rows)


def test_a_view_of_a_view_by_any_way_knows_when_it_has_ended(make):
    cache = make(versions=1)
    cache.set_numpy("k", np.arange(8.0))
    view = cache.get_numpy("k", 8, "f8")
    derived = [
        np.lib.stride_tricks.as_strided(view, (2,), (8,), subok=True),
        np.lib.stride_tricks.sliding_window_view(view, 2, subok=True),
        view.reshape(2, 4)[1],
        view.view(np.int64),
        np.frombuffer(memoryview(view), "f8").view(type(view)),
        np.array(view, copy=None, subok=True),
    ]
    own = view.copy()
    assert all(one.valid() for one in derived)
    for i in range(2):
        cache.set_numpy("k", np.full(8, float(i)))
    assert [one.valid() for one in derived] == [False] * len(derived)
    assert own.valid()


# ---- the GIL


@pytest.mark.parametrize("call", ["set", "set_numpy", "insert", "snapshot"])
def test_a_large_copy_lets_other_threads_run(make, call):
    size = 32 << 20
    cache = make(hash_slots=1, max_value_size=size, versions=1, reserve=False)
    array = np.ones(size, np.uint8)
    with pytest.warns(TableLoadWarning):
        cache.set_numpy("k", array)
    calls = {
        "set": lambda: cache.set("k", array),
        "set_numpy": lambda: cache.set_numpy("k", array),
        "insert": lambda: (cache.delete("k"), cache.insert("k", array, cache.ticket("k"))),
        "snapshot": lambda: cache.get_numpy("k", size, "u1", snapshot=True),
    }
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that only a release of the GIL lets the other thread in
    moved, gate = threading.Event(), threading.Lock()
    gate.acquire()
    try:
        other = threading.Thread(target=lambda: gate.acquire() and moved.set())
        other.start()
        gate.release()  # from here on it wants to run, and only a call can let it
        until = time.monotonic() + 60
        while not moved.is_set() and time.monotonic() < until:
            calls[call]()
        assert moved.is_set()
        other.join()
    finally:
        sys.setswitchinterval(before)
