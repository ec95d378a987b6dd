"""Pages on a GPU. All that does not need one runs over CUDA's driver as `host_driver.c` has it, in host memory; what is
marked `cuda` runs on a GPU as well, where there is one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_core import PageGroup, Region
from lmcache_core.client.client import Client
from lmcache_core.client.move import pages as pages_room
from lmcache_core.client.move.pages import Pages
from lmcache_core.client.results import Status
from lmcache_core.devices import cuda as devices
from lmcache_core.errors import StaleRegionError, UsageError
from lmcache_core.native import native
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.processes import ServerProcess

pytestmark = pytest.mark.skipif(native is None, reason="pages of a GPU are copied by the C extension")
WAIT_S = 60.0
LAYERS, BLOCKS, PAGE, STRIDE = 3, 24, 5000, 5376
BYTES = LAYERS * BLOCKS * STRIDE
PAGE_BYTES = 1 << 16  # a multiple of any machine's pages


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def why_no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no GPU on this machine"


class HostMemory:
    """Of a device that is none."""

    def __init__(self, driver: CDLL, nbytes: int = BYTES, there: int | None = None) -> None:
        self._driver = driver
        self.address = driver.host_allocate(nbytes, there)
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(driver.host_bytes(self.address)))
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3,
        }  # fmt: skip

    @property
    def buffer(self) -> Any:
        return self

    def read(self) -> Any:
        return self.bytes.copy()

    def write(self, data: Any) -> None:
        self.bytes[:] = data


class CudaMemory:
    """Of a GPU, as torch has it."""

    def __init__(self) -> None:
        import torch

        self.buffer = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")

    def read(self) -> Any:
        return self.buffer.cpu().numpy()

    def write(self, data: Any) -> None:
        import torch

        self.buffer.copy_(torch.from_numpy(data))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    made = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("host_driver.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", "-o", made, source], check=True
    )
    return made


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CDLL]:
    monkeypatch.setattr(devices, "LIBRARY", str(library))
    loaded = ctypes.CDLL(str(library))
    for name in ("host_allocate", "host_bytes", "host_last_recorded"):
        getattr(loaded, name).restype = ctypes.c_void_p
    loaded.host_allocate.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
    loaded.host_bytes.argtypes = loaded.host_give_back.argtypes = [ctypes.c_void_p]
    loaded.host_contexts.restype = loaded.host_queued.restype = ctypes.c_long
    yield loaded
    loaded.host_engine_ends()
    loaded.host_gate(0)
    loaded.host_fail_after(-1)
    until(lambda: loaded.host_contexts() == 0)
    assert loaded.host_queued() == 0


@pytest.fixture(
    params=["host", pytest.param("cuda", marks=pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu()))]
)
def make_memory(request: pytest.FixtureRequest) -> Callable[[], object]:
    if request.param == "cuda":
        return CudaMemory
    driver = request.getfixturevalue("driver")
    return lambda: HostMemory(driver)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(64 << 20) as process:
        yield process


@pytest.fixture(params=["index", "calls"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    with server.client(use_index=request.param == "index", copy_threads=3) as client:
        yield client


def space_of(nbytes: int) -> Namespace:
    return Namespace("on a device", Layout("uint8", (nbytes,)))


def registered(client: Client, memory: Any, per_object: int = 2) -> Pages:
    regions = [Region(memory.buffer, layer * BLOCKS * STRIDE, PAGE, STRIDE, BLOCKS, "cuda") for layer in range(LAYERS)]
    space = space_of(LAYERS * per_object * PAGE)
    return client.register_pages([PageGroup(space, regions, per_object, null_page=0)])


def keys_of(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def random_bytes() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng().integers(0, 256, BYTES, np.uint8)


def page_of(data: Any, layer: int, block: int) -> Any:
    start = (layer * BLOCKS + block) * STRIDE
    return data[start : start + PAGE]


def stored(pages: Pages, memory: Any, ids: Sequence[int]) -> tuple[list[bytes], Any]:
    """Keys of what lies in these blocks, two each, and all of the memory as it was."""
    before, keys = random_bytes(), keys_of(len(ids) // 2)
    memory.write(before)
    assert pages.store([(0, keys, ids)]).stored == len(keys)
    memory.write(np.zeros_like(before))
    return keys, before


def test_regions_that_are_adjacent_by_chance_are_copied_apart(client: Client, driver: CDLL) -> None:
    """The device refuses a copy that lies in two of its allocations. Here a page ends where the next region begins."""
    first = HostMemory(driver, 2 * PAGE_BYTES)
    driver.host_give_back(first.address)
    memories = [HostMemory(driver, PAGE_BYTES, first.address + at * PAGE_BYTES) for at in range(2)]
    regions = [Region(each, 0, PAGE_BYTES, PAGE_BYTES, 1, "cuda") for each in memories]
    pages = client.register_pages([PageGroup(space_of(2 * PAGE_BYTES), regions, 1)])
    contents = [os.urandom(PAGE_BYTES) for _ in memories]
    for memory, content in zip(memories, contents, strict=True):
        memory.write(np.frombuffer(content, np.uint8))
    keys = keys_of(1)
    assert pages.store([(0, keys, [0])]).stored == 1
    for memory in memories:
        memory.write(0)
    assert pages.retrieve([(0, keys, [0])]).hits == 1
    assert [bytes(each.read()) for each in memories] == contents


@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("order", ["region", "object"])
def test_what_is_stored_and_retrieved_is_what_plain_indexing_gives(
    client: Client, make_memory: Callable[[], Any], order: Any, verify: str
) -> None:
    memory = make_memory()
    pages = registered(client, memory)
    source, target = [5, 6, 0, 9, 3, 17], [20, 4, 11, 12, 0, 2]
    keys, before = stored(pages, memory, source)
    job = pages.retrieve_start([(0, keys, target, 1)], order=order, verify=verify)  # the first page is not written
    for layer in range(LAYERS):
        assert job.wait_region(layer, WAIT_S)
    assert job.wait(WAIT_S)
    assert job.result is not None
    assert job.result.hits == len(keys)
    expected = np.zeros_like(before)
    for here, there in zip(source[1:], target[1:], strict=True):
        for layer in range(LAYERS):
            if there:
                page_of(expected, layer, there)[:] = page_of(before, layer, here) if here else 0
    assert (memory.read() == expected).all()


@pytest.mark.parametrize("through", ["device", "host"])
def test_what_a_device_stores_host_memory_reads_and_the_other_way_round(
    client: Client, make_memory: Callable[[], Any], through: str
) -> None:
    memory, here = make_memory(), np.zeros(BYTES, np.uint8)
    space = space_of(LAYERS * 2 * PAGE)
    regions = [Region(here, layer * BLOCKS * STRIDE, PAGE, STRIDE, BLOCKS) for layer in range(LAYERS)]
    beside = client.register_pages([PageGroup(space, regions, 2, null_page=0)])
    pages, before, keys, ids = registered(client, memory), random_bytes(), keys_of(2), [1, 2, 3, 4]
    memory.write(before)
    here[:] = before
    assert (pages if through == "device" else beside).store([(0, keys, ids)]).stored == 2
    memory.write(np.zeros_like(before))
    here[:] = 0
    assert (beside if through == "device" else pages).retrieve([(0, keys, ids)], verify="always").hits == 2
    found = here if through == "device" else memory.read()
    for layer in range(LAYERS):
        assert all((page_of(found, layer, at) == page_of(before, layer, at)).all() for at in ids)


def test_memory_that_is_not_registered_may_lie_on_a_device(client: Client, make_memory: Callable[[], Any]) -> None:
    memory, before, keys = make_memory(), random_bytes(), keys_of(3)
    memory.write(before)
    regions = [Region(memory.buffer, 0, PAGE, STRIDE, 3, "cuda")]
    assert client.store_strided(keys, regions, range(3), namespace=space_of(PAGE)).stored == 3
    memory.write(np.zeros_like(before))
    assert client.retrieve_strided(keys, regions, [2, 1, 0], namespace=space_of(PAGE)).hits == 3
    assert [bytes(page_of(memory.read(), 0, at)) for at in range(3)] == [
        bytes(page_of(before, 0, 2 - at)) for at in range(3)
    ]


@pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu() or "there is a GPU")
def test_pages_are_read_behind_the_current_stream_of_torch_into_a_pinned_pool(client: Client) -> None:
    import torch

    memory, before = CudaMemory(), random_bytes()
    pages, keys = registered(client, memory), keys_of(2)
    client.pin_memory()
    with torch.cuda.stream(torch.cuda.Stream()):
        large = torch.randn(8192, 8192, device="cuda")
        for _ in range(20):  # keeps the stream busy for longer than a copy of what is there now would take
            large = large @ large
        memory.buffer.copy_(torch.from_numpy(before).pin_memory(), non_blocking=True)
        assert pages.store([(0, keys, [1, 2, 3, 4])]).stored == 2
    memory.buffer.zero_()
    assert pages.retrieve([(0, keys, [1, 2, 3, 4])]).hits == 2
    found = memory.read()
    assert all((page_of(found, 0, at) == page_of(before, 0, at)).all() for at in (1, 2, 3, 4))


# --- streams, and when a job is done ----------------------------------------------------------------------------


def test_pages_are_written_behind_what_the_stream_was_given(client: Client, driver: CDLL) -> None:
    memory = HostMemory(driver)
    pages = registered(client, memory)
    keys, before = stored(pages, memory, [1, 2, 3, 4])
    driver.host_engine_begins()
    job = pages.retrieve_start([(0, keys, [1, 2, 3, 4])], stream=0x1234)
    assert driver.host_last_recorded() == 0x1234
    assert not job.done()
    assert not memory.bytes.any()
    driver.host_engine_ends()
    assert job.wait(WAIT_S)
    assert (page_of(memory.bytes, 2, 4) == page_of(before, 2, 4)).all()


def test_pages_are_read_behind_what_the_stream_was_given(client: Client, driver: CDLL) -> None:
    memory, results = HostMemory(driver), []
    pages, keys, computed = registered(client, memory), keys_of(2), random_bytes()
    driver.host_engine_begins()
    thread = threading.Thread(target=lambda: results.append(pages.store([(0, keys, [1, 2, 3, 4])])))
    thread.start()
    until(lambda: driver.host_contexts() > 0)  # it is under way
    memory.write(computed)
    driver.host_engine_ends()
    thread.join()
    assert results[0].stored == 2
    memory.write(np.zeros_like(computed))
    assert pages.retrieve([(0, keys, [1, 2, 3, 4])]).hits == 2
    assert (page_of(memory.bytes, 1, 3) == page_of(computed, 1, 3)).all()


def test_a_store_of_pages_that_are_still_computed_returns_at_once(client: Client, driver: CDLL) -> None:
    memory = HostMemory(driver)
    pages, keys, computed = registered(client, memory), keys_of(2), random_bytes()
    driver.host_engine_begins()
    job = pages.store_start([(0, keys, [1, 2, 3, 4])])
    assert not job.has_read
    assert not job.wait_read(0.001)
    assert job.result is None
    memory.write(computed)
    driver.host_engine_ends()
    assert job.wait_read(WAIT_S)
    memory.write(np.zeros_like(computed))  # the pages are the engine's again
    assert job.wait(WAIT_S)
    assert job.result is not None
    assert job.result.stored == 2
    assert job.device_s > 0
    assert pages.retrieve([(0, keys, [1, 2, 3, 4])], verify="always").hits == 2
    assert (page_of(memory.bytes, 1, 3) == page_of(computed, 1, 3)).all()


def test_a_stream_that_is_captured_into_a_graph_is_refused(client: Client, driver: CDLL) -> None:
    pages = registered(client, HostMemory(driver))
    with pytest.raises(UsageError, match=r"captured into a CUDA graph.*outside of the capture"):
        pages.store_start([(0, keys_of(1), [1, 2])], stream=0xCA97)


def test_a_region_is_done_when_its_copies_have_landed(client: Client, driver: CDLL) -> None:
    memory = HostMemory(driver)
    pages = registered(client, memory)
    keys, _ = stored(pages, memory, [1, 2, 3, 4])
    driver.host_gate(1)
    job = pages.retrieve_start([(0, keys, [1, 2, 3, 4])])
    until(lambda: job.done() or driver.host_at_the_gate())
    assert not job.done()
    assert not any(job.done_region(layer) for layer in range(LAYERS))
    driver.host_gate(0)
    assert job.wait(WAIT_S)


def test_when_cancel_returns_no_copy_is_on_its_way(client: Client, driver: CDLL) -> None:
    memory = HostMemory(driver)
    pages = registered(client, memory)
    keys, _ = stored(pages, memory, [1, 2, 3, 4])
    driver.host_gate(1)
    job = pages.retrieve_start([(0, keys, [1, 2, 3, 4])])
    until(lambda: job.done() or driver.host_at_the_gate())
    opener = threading.Timer(0.05, driver.host_gate, [0])
    opener.start()
    job.cancel()
    assert driver.host_queued() == 0
    opener.join()
    result = job.result
    assert result is not None
    for at, status in enumerate(result.statuses[0]):
        pages_of_key = {2 * at + 1, 2 * at + 2}
        assert status in (Status.HIT, Status.ABORTED)
        touched = {
            block for block in pages_of_key if any(page_of(memory.bytes, layer, block).any() for layer in range(3))
        }
        assert status is Status.HIT or touched <= set(result.untrusted[0])


def test_what_leaves_the_pool_before_a_copy_lands_is_not_trusted(server: ServerProcess, driver: CDLL) -> None:
    memory = HostMemory(driver)
    with server.client() as client:
        pages = registered(client, memory)
        keys, _ = stored(pages, memory, [1, 2, 3, 4])
        assert client.lookup(keys, namespace=pages.groups[0].namespace, ask=False).hits == 2
        driver.host_gate(1)
        job = pages.retrieve_start([(0, keys, [1, 2, 3, 4])], order="object")
        until(driver.host_at_the_gate)
        with server.client() as other:
            other.clear(pages.groups[0].namespace)
        driver.host_gate(0)
        assert job.wait(WAIT_S)
        assert job.result is not None
        assert list(job.result.statuses[0]) == [Status.MISS, Status.MISS]
        assert set(job.result.untrusted[0]) & {1, 2, 3, 4}


@pytest.mark.parametrize("copies", [0, 3])
def test_a_device_that_refuses_ends_the_job_and_the_log_has_its_words(
    client: Client, driver: CDLL, caplog: pytest.LogCaptureFixture, copies: int
) -> None:
    memory = HostMemory(driver)
    pages = registered(client, memory)
    keys, _ = stored(pages, memory, [1, 2, 3, 4])
    driver.host_fail_after(copies)
    with caplog.at_level(logging.WARNING, "lmcache_core.client"):
        result = pages.retrieve([(0, keys, [1, 2, 3, 4])])
    assert Status.ABORTED in result.statuses[0]
    assert set(result.untrusted[0]) & {1, 2, 3, 4}
    assert "an illegal memory access was encountered (700)" in caplog.text
    fresh = keys_of(2)
    driver.host_fail_after(copies)
    assert pages.store([(0, fresh, [1, 2, 3, 4])]).stored == 0
    driver.host_fail_after(-1)
    assert pages.retrieve([(0, keys, [1, 2, 3, 4])]).hits == 2
    assert pages.store([(0, fresh, [1, 2, 3, 4])]).stored == 2


# --- memory that is given back ----------------------------------------------------------------------------------


def test_memory_that_was_given_back_is_refused_until_it_is_registered_anew(client: Client, driver: CDLL) -> None:
    memory = HostMemory(driver)
    pages = registered(client, memory)
    keys, before = stored(pages, memory, [1, 2, 3, 4])
    driver.host_give_back(memory.address)
    for _ in range(2):  # asleep, and awake with other memory at the same address
        with pytest.raises(
            StaleRegionError, match=r"group 0, region 0: its memory was given back.*register_pages again"
        ):
            pages.retrieve_start([(0, keys, [1, 2, 3, 4])])
        with pytest.raises(StaleRegionError):
            pages.store([(0, keys, [1, 2, 3, 4])])
        if driver.host_bytes(memory.address) is None:
            memory = HostMemory(driver, there=memory.address)
    anew = registered(client, memory)
    assert anew.retrieve([(0, keys, [1, 2, 3, 4])]).hits == 2
    assert (page_of(memory.bytes, 2, 4) == page_of(before, 2, 4)).all()


def test_a_tensor_s_memory_that_was_given_back_is_refused_until_it_is_registered_anew(server: ServerProcess) -> None:
    torch = pytest.importorskip("torch")
    tensor, keys = torch.arange(4096, dtype=torch.uint8), keys_of(4)
    with server.client() as client:

        def register() -> Pages:
            return client.register_pages([PageGroup(space_of(512), [Region(tensor, 0, 512, 1024, 4)], 1)])

        pages = register()
        assert pages.store([(0, keys, range(4))]).stored == 4
        tensor.untyped_storage().resize_(0)
        with pytest.raises(StaleRegionError):
            pages.retrieve([(0, keys, range(4))])
        tensor.untyped_storage().resize_(4096)
        assert register().retrieve([(0, keys, range(4))]).hits == 4


# --- what is refused --------------------------------------------------------------------------------------------


def refused(client: Client, words: str, *regions: Region) -> None:
    with pytest.raises(UsageError, match=words):
        client.register_pages([PageGroup(space_of(512 * len(regions)), regions, 1)])


def test_an_impossible_device_copy_is_refused_with_a_message(
    server: ServerProcess, driver: CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, here = HostMemory(driver), bytearray(4096)
    strided, alien = HostMemory(driver), HostMemory(driver)
    strided.__cuda_array_interface__ |= {"shape": (2, 512), "strides": (1024, 1)}
    alien.__cuda_array_interface__ |= {"data": (ctypes.addressof(ctypes.c_char.from_buffer(here)), False)}
    on_device = Region(memory, 0, 512, 1024, 4, "cuda")
    with server.client() as client:
        refused(client, "the buffer is a bytearray: give a torch tensor, or", Region(here, 0, 512, 1024, 4, "cuda"))
        refused(client, "the buffer is not contiguous", Region(strided, 0, 512, 512, 1, "cuda"))
        refused(client, "CUDA refuses cuPointerGetAttribute: error 1", Region(alien, 0, 512, 1024, 4, "cuda"))
        refused(client, "lie on several devices", on_device, Region(here, 0, 512, 1024, 4))
        refused(client, f"ends? at .* has {BYTES:,} bytes", Region(memory, BYTES - 100, 512, 1024, 4, "cuda"))
        refused(client, "the buffer is a HostMemory: pass a torch tensor", Region(memory, 0, 512, 1024, 4))
        monkeypatch.setattr(pages_room, "native", None)
        refused(client, "are copied by the C extension, which is not in use", on_device)


def test_without_a_driver_the_error_says_what_to_do(
    server: ServerProcess, driver: CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(driver)
    monkeypatch.setattr(devices, "LIBRARY", "libcuda_that_is_not_there.so.1")
    with server.client() as client:
        refused(
            client,
            r"needs NVIDIA's driver, and libcuda.* cannot be loaded .*--gpus",
            Region(memory, 0, 512, 1024, 4, "cuda"),
        )
