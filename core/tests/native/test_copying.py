"""Copies and checksums: the ways in C and in Python are one contract, checked against xxhash and plain slices."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
import weakref
from array import array
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.client.move import copying
from lmcache_core.client.move.copying import copy_in, copy_out, copying_threads, spans, threads_to_copy
from lmcache_core.errors import UsageError
from lmcache_core.limits import COPY_THREADS_AUTO_MAX, COPY_THREADS_MAX
from lmcache_core.native import native, why_not
from lmcache_core.pool.cores import usable_cores
from lmcache_core.pool.layout import Layout

KIB, MIB = 1 << 10, 1 << 20
needs_native = pytest.mark.skipif(native is None, reason=why_not)


@pytest.fixture(params=[pytest.param("C", marks=needs_native), "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(copying, "native", None)
    return str(request.param)


class Slots:
    """Memory as the pool has it: slots on pages, each of them followed by a margin that nobody may write to."""

    MARGIN = 4096

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.step = -(-nbytes // 4096) * 4096 + self.MARGIN
        self.memory = bytearray(b"\xee" * (count * self.step + 4096))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._first = -address % 4096
        self.base = address + self._first
        self.places = [(position, position * self.step) for position in range(count)]

    def slot(self, position: int) -> bytes:
        at = self._first + position * self.step
        return bytes(self.memory[at : at + self.nbytes])

    def fill(self, position: int, data: bytes) -> None:
        at = self._first + position * self.step
        self.memory[at : at + self.nbytes] = data

    def outside_is_untouched(self) -> bool:
        outside = bytearray(self.memory)
        for position, _ in reversed(self.places):
            at = self._first + position * self.step
            del outside[at : at + self.nbytes]
        return outside.count(0xEE) == len(outside)


def objects_of(count: int, nbytes: int, seed: int = 1) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(nbytes) for _ in range(count)]


def checksums_of(blob: bytes) -> list[int]:
    return list(memoryview(blob).cast("Q"))


@pytest.mark.parametrize("nbytes", [1, 240, 4096, 64 * KIB + 8, 3 * MIB + 17])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_goes_in_comes_out_with_its_checksums_and_nothing_else_moves(way: str, nbytes: int, threads: int) -> None:
    count = 3 if nbytes >= MIB else 20
    layout, objects, slots = Layout("uint8", (nbytes,)), objects_of(count, nbytes), Slots(count, nbytes)
    found = spans(objects, count, layout, writable=False)
    assert copy_in(slots.base, slots.places, found, layout, threads=threads) == b""
    assert [slots.slot(position) for position in range(count)] == objects
    again = Slots(count, nbytes)
    blob = copy_in(again.base, again.places, found, layout, threads=threads, checksums=True)
    assert checksums_of(blob) == [xxhash.xxh3_64_intdigest(each) for each in objects]
    assert (
        again.memory[again._first : again._first + count * again.step]
        == slots.memory[slots._first : slots._first + count * slots.step]
    )
    assert slots.outside_is_untouched()
    assert again.outside_is_untouched()
    into = [bytearray(nbytes) for _ in objects]
    targets = spans(into, count, layout, writable=True)
    assert not copy_out(slots.base, slots.places, targets, layout, threads=threads)
    assert into == objects
    into[:] = [bytearray(nbytes) for _ in objects]
    targets = spans(into, count, layout, writable=True)
    assert copy_out(slots.base, slots.places, targets, layout, threads=threads, checksums=True).tobytes() == blob
    assert into == objects
    assert slots.outside_is_untouched()


def test_positions_are_taken_as_they_are_named(way: str) -> None:
    layout, objects, slots = Layout("uint8", (100,)), objects_of(4, 100), Slots(4, 100)
    found = spans(objects, 4, layout, writable=False)
    chosen = [(3, slots.places[0][1]), (1, slots.places[2][1])]
    blob = copy_in(slots.base, iter(chosen), found, layout, checksums=True)
    assert slots.slot(0) == objects[3]
    assert slots.slot(2) == objects[1]
    assert checksums_of(blob) == [xxhash.xxh3_64_intdigest(objects[3]), xxhash.xxh3_64_intdigest(objects[1])]
    assert copy_in(slots.base, [], found, layout, checksums=True) == b""


def test_tensors_on_a_device_go_by_torch_beside_those_of_the_host(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    layout = Layout("bfloat16", (8, 64))
    tensors = [torch.randn(8, 64).to(torch.bfloat16) for _ in range(5)]
    slots = Slots(5, layout.nbytes)
    # A span of address 0 is how a device's tensor looks; no device is needed for torch to copy it.
    found = [(0 if position % 2 else tensor.data_ptr(), tensor, None) for position, tensor in enumerate(tensors)]
    blob = copy_in(slots.base, slots.places, found, layout, checksums=True)
    data = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]
    assert [slots.slot(position) for position in range(5)] == data
    assert checksums_of(blob) == [xxhash.xxh3_64_intdigest(each) for each in data]
    into = [torch.zeros(8, 64, dtype=torch.bfloat16) for _ in range(5)]
    targets = [(0 if position % 2 == 0 else tensor.data_ptr(), tensor, None) for position, tensor in enumerate(into)]
    assert not copy_out(slots.base, slots.places, targets, layout)
    assert all(torch.equal(got, sent) for got, sent in zip(into, tensors, strict=True))
    for tensor in into:
        tensor.zero_()
    assert copy_out(slots.base, slots.places, targets, layout, checksums=True).tobytes() == blob
    assert all(torch.equal(got, sent) for got, sent in zip(into, tensors, strict=True))
    assert slots.outside_is_untouched()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), nbytes=st.integers(0, 3000), count=st.integers(0, 12), threads=st.integers(0, 4))
@needs_native
def test_any_alignment_of_either_side_gives_the_same_bytes(
    data: st.DataObject, nbytes: int, count: int, threads: int
) -> None:
    assert native is not None
    source, target = bytearray(os.urandom(count * 4096 + 4096)), bytearray(count * 4096 + 4096)
    offsets = [data.draw(st.tuples(st.integers(0, 64), st.integers(0, 64))) for _ in range(count)]
    start_from = ctypes.addressof(ctypes.c_char.from_buffer(source))
    start_to = ctypes.addressof(ctypes.c_char.from_buffer(target))
    expected = bytearray(len(target))
    for number, (at, to) in enumerate(offsets):
        place = number * 4096
        expected[place + to : place + to + nbytes] = source[place + at : place + at + nbytes]
    blob = native.copy_many(
        array("Q", [start_to + number * 4096 + to for number, (_, to) in enumerate(offsets)]),
        array("Q", [start_from + number * 4096 + at for number, (at, _) in enumerate(offsets)]),
        nbytes,
        threads,
        True,
    )
    assert target == expected
    assert blob is not None
    assert checksums_of(blob) == [
        xxhash.xxh3_64_intdigest(source[number * 4096 + at : number * 4096 + at + nbytes])
        for number, (at, _) in enumerate(offsets)
    ]


@needs_native
def test_the_checksum_is_the_package_s_for_every_length_around_every_border() -> None:
    assert native is not None
    memory = memoryview(random.Random(7).randbytes(70 * KIB))
    lengths = set(range(1101))
    for border in (1024, 2048, 4096, 16 * KIB, 64 * KIB):
        lengths |= set(range(border - 70, border + 71))
    for nbytes in sorted(lengths):
        at = nbytes % 61
        given_bytes = memory[at : at + nbytes]
        assert native.xxh3_64(given_bytes) == xxhash.xxh3_64_intdigest(given_bytes), nbytes


@needs_native
@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=5000))
def test_the_checksum_is_the_package_s_for_any_bytes(data: bytes) -> None:
    assert native is not None
    assert native.xxh3_64(data) == xxhash.xxh3_64_intdigest(data)


@needs_native
def test_a_bigger_job_is_split_and_every_byte_arrives() -> None:
    """Large enough that threads are made, and that stores stream: one object in pieces, then many."""
    assert native is not None
    source = random.Random(3).randbytes(24 * MIB + 4099)
    for nbytes in (24 * MIB + 4099, 2 * MIB + 1, 64 * KIB, 1000):
        target = bytearray(len(source))
        count = len(source) // nbytes
        start_from = copying.address_of(memoryview(source))
        start_to = ctypes.addressof(ctypes.c_char.from_buffer(target))
        sources = array("Q", [start_from + number * nbytes for number in range(count)])
        targets = array("Q", [start_to + number * nbytes for number in range(count)])
        assert native.copy_many(targets, sources, nbytes, 4) is None
        copied = count * nbytes
        assert target[:copied] == source[:copied]
        assert not any(target[copied:])
        view = memoryview(source)
        expected = [xxhash.xxh3_64_intdigest(view[at : at + nbytes]) for at in range(0, copied, nbytes)]
        assert checksums_of(native.checksum_many(sources, nbytes, 4)) == expected


@pytest.fixture
def addresses() -> array[int]:
    memory = bytearray(8192)
    return array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0])


@needs_native
def test_what_cannot_be_an_address_is_refused(addresses: array[int]) -> None:
    assert native is not None
    good, null = addresses[:1], addresses[1:]
    for targets, sources, words in (
        (good, null, r"sources\[0\] is the address 0"),
        (null, good, r"targets\[0\] is the address 0"),
        (good, good + good, "1 targets for 2 sources"),
        (good, array("Q", [2**64 - 8]), r"no object of 100 bytes lies there"),
        (good.tobytes()[:5], good, "8 aligned bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            native.copy_many(targets, sources, 100)
    with pytest.raises(ValueError, match="nbytes is -1"):
        native.copy_many(good, good, -1)
    with pytest.raises(ValueError, match="threads is -1"):
        native.checksum_many(good, 1, -1)
    with pytest.raises(ValueError, match="more than the address space"):
        native.checksum_many(good * 1000, 1 << 62)
    with pytest.raises(TypeError):
        native.copy_many([1], good, 8)  # type: ignore[arg-type]


@needs_native
def test_other_threads_run_while_a_batch_is_copied() -> None:
    """With an interpreter that takes its lock from nobody, another thread runs only where the copy gives it away."""
    assert native is not None
    size = 16 * MIB
    source, target = bytearray(size), bytearray(size)
    sources = array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(source))])
    targets = array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(target))])
    begun, looked = threading.Event(), threading.Event()
    inside = seen = False

    def copy() -> None:
        nonlocal inside
        while not seen:  # on a busy machine the other thread may be late
            begun.set()
            inside = True
            native.copy_many(targets, sources, size)
            inside = False
            looked.wait()
            looked.clear()

    worker = threading.Thread(target=copy, daemon=True)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        worker.start()
        ends_s = time.monotonic() + 60
        while not seen and time.monotonic() < ends_s:
            begun.wait()
            begun.clear()
            seen = inside
            looked.set()
    finally:
        sys.setswitchinterval(interval_s)
    assert seen
    worker.join()


@needs_native
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # Python 3.12 warns of what is tested here
def test_a_child_that_forked_beside_copies_copies_too() -> None:
    assert native is not None
    size = 16 * MIB
    source, target = os.urandom(size), bytearray(size)
    sources = array("Q", [copying.address_of(memoryview(source)) + part * MIB for part in range(16)])
    targets = array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(target)) + part * MIB for part in range(16)])
    ends = threading.Event()

    def keep_copying() -> None:
        while not ends.is_set():
            native.copy_many(targets, sources, MIB, 4)

    other = threading.Thread(target=keep_copying)
    other.start()
    try:
        for _ in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                native.copy_many(targets, sources, MIB, 4)
                os._exit(0 if target == source else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ends.set()
        other.join()


def test_half_of_the_cores_copy_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 1), (4, 2), (8, 4), (256, COPY_THREADS_AUTO_MAX)):
        monkeypatch.setattr(copying, "usable_cores", lambda cores=cores: cores)
        assert threads_to_copy(0) == expected
        assert threads_to_copy(3) == 3
    for wrong in (-1, COPY_THREADS_MAX + 1, "many"):
        with pytest.raises(UsageError, match=f"copy_threads is {wrong!r}"):
            threads_to_copy(wrong)  # type: ignore[arg-type]


def test_auto_lets_the_extension_see_how_many_processors_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 2), (4, 4), (256, COPY_THREADS_AUTO_MAX)):
        monkeypatch.setattr(copying, "usable_cores", lambda cores=cores: cores)
        assert copying_threads("auto") == (1 << 16) + expected
    assert copying_threads(0) == threads_to_copy(0)
    assert copying_threads(3) == 3
    source = bytearray(os.urandom(16 * MIB))
    target = bytearray(16 * MIB)
    here = [array("Q", [copying.address_of(memoryview(each))]) for each in (target, source)]
    assert native is None or native.copy_many(*here, 16 * MIB, copying_threads("auto")) is None
    assert native is None or target == source


def test_a_quota_of_any_ancestor_group_bounds_the_cores(tmp_path: Path) -> None:
    def plant(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    ours = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "nothing") == ours
    root = plant(
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/pod/box\n0::/pod/box\n",
            "proc/self/mountinfo": "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "9900000 100000\n",
        }
    )
    assert usable_cores(root) == min(ours, 99)
    plant({"sys/fs/cgroup/pod/cpu.max": "150000 100000\n"})
    assert usable_cores(root) == 1
    plant(
        {
            "proc/self/mountinfo": "30 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
            "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
        }
    )
    assert usable_cores(root) == ours
    plant({"sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "50000\n"})
    assert usable_cores(root) == 1, "half a processor is still one thread"


def test_an_array_of_another_dtype_or_shape_than_the_layouts_is_refused() -> None:
    np = pytest.importorskip("numpy")
    layout = Layout("float16", (4, 8))
    right = np.zeros((4, 8), np.float16)
    for each in (right, right.ravel()):
        spans([each], 1, layout, writable=False)
    for each in (right.tobytes(), memoryview(right).cast("B"), bytearray(64)):
        with pytest.raises(UsageError, match="use a uint8 layout for opaque bytes"):
            spans([each], 1, layout, writable=False)
        spans([each], 1, Layout("uint8", (64,)), writable=False)
        spans([each], 1, Layout("float8_e4m3fn", (64,)), writable=False)
    for each in (right.view(np.int16), right.view(np.uint16), np.zeros(8, np.float64), right.view(np.int8)):
        with pytest.raises(UsageError, match="has items of format"):
            spans([each], 1, layout, writable=False)
    with pytest.raises(UsageError, match=r"has shape \(8, 4\)"):
        spans([right.reshape(8, 4)], 1, layout, writable=False)
    with pytest.raises(UsageError, match="has items of format 'h'"):
        spans([right.view(np.int16)], 1, Layout("bfloat16", (4, 8)), writable=False)


def test_a_tensor_s_memory_stays_for_the_call_though_another_thread_gives_it_other_memory() -> None:
    torch, np = pytest.importorskip("torch"), pytest.importorskip("numpy")
    layout = Layout("uint8", (64,))
    for swap in (lambda tensor: tensor.set_(torch.zeros(64, dtype=torch.uint8)), _new_data):
        memory = np.zeros(64, np.uint8)
        tensor, alive = torch.from_numpy(memory), weakref.ref(memory)
        del memory
        found = spans([tensor], 1, layout, writable=True)
        swap(tensor)
        assert alive() is not None
        del found
        assert alive() is None


def _new_data(tensor: Any) -> None:
    tensor.data = tensor.clone()
