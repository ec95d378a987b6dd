"""Odd tensors and arrays through the calls that copy: an error in words or the right bytes, never a signal.

Each case runs in a child process, since what goes wrong here ends one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.link.channel import Channel, Pending
from lmcache_core.client.move import copying
from lmcache_core.client.move.regions import PageGroup, Region
from lmcache_core.errors import StaleRegionError, UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol.messages import PrepareStore
from lmcache_core.tokens.keys import chunk_keys
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import embedded_server

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

FLOATS = 1024
SPACE = Namespace("odd", Layout("float32", (FLOATS,)))
STORED = b"s" * 32


def _plain() -> torch.Tensor:
    return torch.arange(FLOATS, dtype=torch.float32)


def _resized(nbytes: int) -> torch.Tensor:
    tensor = _plain()
    tensor.untyped_storage().resize_(nbytes)
    return tensor


class _Subclass(torch.Tensor):  # type: ignore[misc]
    def data_ptr(self) -> int:
        return 4096  # not so

    @classmethod
    def __torch_function__(cls, *args: object, **kwargs: object) -> Any:
        raise RuntimeError("nothing is told")


def _fake() -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(FLOATS)


class _DuckTensor:
    dtype, is_cpu, shape = "torch.float32", True, (FLOATS,)

    def data_ptr(self) -> int:
        return 4096

    def is_contiguous(self) -> bool:
        return True


def _read_only() -> object:
    array = np.zeros(FLOATS, np.float32)
    array.flags.writeable = False
    return array


def _released() -> memoryview[float]:
    view = memoryview(bytearray(4 * FLOATS)).cast("f")
    view.release()
    return view


def _file(nbytes: int) -> int:
    fd = os.memfd_create("odd")
    os.truncate(fd, nbytes)
    return fd


def _truncated(nbytes: int, dtype: str = "float32") -> Any:
    """An array whose file was cut to `nbytes` behind its back."""
    fd = _file(4 * FLOATS * 4)
    array = np.memmap(f"/proc/self/fd/{fd}", dtype, "r+", shape=(4 * FLOATS,))[-FLOATS:]
    os.truncate(fd, nbytes)
    return array


def _closed() -> torch.Tensor:
    """A tensor over shared memory that was unmapped, as torch does not keep it."""
    shared = shared_memory.SharedMemory(create=True, size=4 * FLOATS)
    tensor = torch.frombuffer(shared.buf, dtype=torch.float32)[:FLOATS]
    shared.unlink()
    shared.close()
    return tensor


def _mapped_read_only() -> object:
    """torch takes it for writable, with a warning."""
    warnings.simplefilter("ignore", UserWarning)
    return torch.frombuffer(mmap.mmap(_file(4 * FLOATS), 4 * FLOATS, access=mmap.ACCESS_READ), dtype=torch.float32)


def _protected(how: int) -> memoryview[float]:
    """Two pages' halves, of which the first cannot be touched (`how` 0) or not be written to (1)."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    start = libc.mmap(None, 2 * mmap.PAGESIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    view = memoryview((ctypes.c_char * (4 * FLOATS)).from_address(start + mmap.PAGESIZE - 2048)).cast("B").cast("f")
    libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_int(how))
    return view


class _ClaimsToBe:
    __class__ = torch.Tensor  # type: ignore[assignment]
    dtype, shape = torch.float32, (FLOATS,)


class _Interface:
    __array_interface__: ClassVar = {"data": (0xDEAD0000, False), "shape": (FLOATS,), "typestr": "<f4", "version": 3}


class _NoCapsule:
    def __init__(self, device: Any = (1, 0), error: Exception | None = None) -> None:
        self._device, self._error = device, error

    def __dlpack_device__(self) -> Any:
        return self._device

    def __dlpack__(self, **more: object) -> str:
        if self._error is not None:
            raise self._error
        return "no capsule"


ODD: dict[str, Callable[[], Any]] = {
    "truncated": lambda: _truncated(0),
    "truncated inside": lambda: _truncated(4 * FLOATS * 4 - 4096 - 8),
    "truncated tensor": lambda: torch.from_numpy(_truncated(0)),
    "truncated integers": lambda: _truncated(0, "int64"),
    "truncated, every other": lambda: _truncated(0, "int64")[::2],
    "truncated, backwards": lambda: _truncated(0, "int64")[::-1],
    "truncated tensor, every other": lambda: torch.from_numpy(_truncated(0, "int64"))[::2],
    "unmapped": _closed,
    "unmapped integers": lambda: _closed().view(torch.int32),
    "mapped read-only": _mapped_read_only,
    "protected at its start": lambda: _protected(0),
    "read-only at its start": lambda: _protected(1),
    "protected tensor": lambda: torch.frombuffer(_protected(0), dtype=torch.float32),
    "claims to be a tensor": _ClaimsToBe,
    "array interface": _Interface,
    "no capsule": _NoCapsule,
    "no device": lambda: _NoCapsule("x"),
    "failing capsule": lambda: _NoCapsule(error=RuntimeError("not so")),
    "freed": lambda: _resized(0),
    "shrunk": lambda: _resized(100),
    "grown": lambda: _resized(4 * FLOATS + 64),
    "meta": lambda: _plain().to("meta"),
    "negated": lambda: torch._neg_view(_plain()),
    "conjugated": lambda: torch.zeros(FLOATS // 2, dtype=torch.complex64).conj(),
    "sparse": lambda: _plain().to_sparse(),
    "csr": lambda: _plain().reshape(32, 32).to_sparse_csr(),
    "mkldnn": lambda: _plain().to_mkldnn(),
    "functional": lambda: torch._to_functional_tensor(_plain()),
    "zero": lambda: torch._efficientzerotensor((FLOATS,)),
    "jagged": lambda: torch.nested.nested_tensor([_plain()], layout=torch.jagged),
    "subclass": lambda: _plain().as_subclass(_Subclass),
    "parameter": lambda: torch.nn.Parameter(_plain()),
    "fake": _fake,
    "expanded": lambda: torch.zeros(1).expand(FLOATS),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.zeros(0),
    "duck": _DuckTensor,
    "read-only": _read_only,
    "released": _released,
    "backwards": lambda: np.zeros(FLOATS, np.float32)[::-1],
    "big-endian": lambda: np.zeros(FLOATS, ">f4"),
    "complex": lambda: np.zeros(FLOATS // 2, np.complex64),
    "objects": lambda: np.zeros(FLOATS, object),
}


def _values(given: Any) -> bytes:
    if isinstance(given, torch.Tensor):
        return bytes(torch.Tensor.as_subclass(given.detach(), torch.Tensor).numpy().tobytes())
    return bytes(memoryview(given).tobytes())


def _store(client: Client, name: str) -> str:
    given, key = ODD[name](), name.encode().ljust(32, b"-")
    client.store([key], [given], namespace=SPACE)
    into = bytearray(4 * FLOATS)
    assert client.retrieve([key], [memoryview(into).cast("f")], namespace=SPACE).hits == 1
    with torch._C.DisableTorchFunctionSubclass():
        assert into == _values(given)
    return "right"


def _retrieve(client: Client, name: str) -> str:
    given = ODD[name]()
    assert client.retrieve([STORED], [given], namespace=SPACE).hits == 1
    with torch._C.DisableTorchFunctionSubclass():
        assert _values(given) == _plain().numpy().tobytes()
    return "right"


def _register(client: Client, name: str) -> str:
    client.register_pages([PageGroup(SPACE, [Region(ODD[name](), 0, 4 * FLOATS, 4 * FLOATS, 1)], 1)])
    return "right"


def _page_ids(client: Client, name: str) -> str:
    pages = client.register_pages([PageGroup(SPACE, [Region(_plain(), 0, 4 * FLOATS, 4 * FLOATS, 1)], 1)])
    pages.store([(0, [b"p" * 32], ODD[name]())])
    return "right"


def _pages(client: Client, name: str) -> str:
    pages = client.register_pages([PageGroup(SPACE, [Region(ODD[name](), 0, 4 * FLOATS, 4 * FLOATS, 1)], 1)])
    with contextlib.suppress(UsageError):
        pages.store([(0, [b"q" * 32], [0])])
    pages.retrieve([(0, [STORED], [0])])
    return "right"


def _tokens(client: Client, name: str) -> str:
    given = ODD[name]()
    chunk_keys(given.to(torch.int64) if name == "grown" else given, SPACE, 16)
    return "right"


CALLS = {
    "store": _store,
    "retrieve": _retrieve,
    "register": _register,
    "pages": _pages,
    "page_ids": _page_ids,
    "tokens": _tokens,
}


def _walk(server: str, folder: str, call: str, name: str) -> None:
    """In a child: 0, or a traceback and 1."""
    with Client.connect(server, runtime_dir=Path(folder)) as client:
        client.register_layout(SPACE)
        try:
            CALLS[call](client, name)
        except UsageError:
            return


def walk_all(server: str, folder: str, call: str) -> None:
    """In a process with one thread, which forks for each case: prints those that did not end well."""
    for name in ODD:
        child = os.fork()
        if child == 0:
            try:
                _walk(server, folder, call, name)
            except BaseException:  # noqa: BLE001  # whatever it is, the parent prints the case
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(name, code)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with embedded_server(tmp_path_factory.mktemp("odd"), l1={"size_bytes": 8 << 20}) as made:
        with made.connect() as client:
            client.store([STORED], [_plain()], namespace=SPACE)
        yield made.parts.settings.name, str(made.parts.settings.runtime_dir)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_odd_buffers_are_refused_or_copied_right_and_end_no_process(server: tuple[str, str], call: str) -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); import test_odd_buffers as t; t.walk_all(*sys.argv[2:])"
    arguments = [sys.executable, "-c", script, str(Path(__file__).parent), *server, call]
    child = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert (child.returncode, child.stdout) == (0, ""), child.stderr[-3000:]


@pytest.fixture
def client(server: tuple[str, str]) -> Iterator[Client]:
    with Client.connect(server[0], runtime_dir=Path(server[1])) as client:
        client.register_layout(SPACE)
        yield client


def test_targets_that_share_memory_are_refused(client: Client) -> None:
    whole = torch.zeros(FLOATS + 4)
    for pair in ([whole[:FLOATS], whole[4:]], [whole[:FLOATS], whole[:FLOATS]]):
        with pytest.raises(UsageError, match="shares memory"):
            client.retrieve([STORED, b"t" * 32], pair, namespace=SPACE)


@pytest.mark.parametrize("view", [False, True])
def test_an_array_whose_pages_are_registered_cannot_be_resized(client: Client, view: bool) -> None:
    array = np.zeros(4 * FLOATS, np.float32)
    given = array[FLOATS:] if view else array
    pages = client.register_pages([PageGroup(SPACE, [Region(given, 0, 4 * FLOATS, 4 * FLOATS, 2)], 1)])
    with pytest.raises(ValueError, match="resize"):
        array.resize(1 << 24, refcheck=False)
    assert pages.store([(0, [b"r" * 32], [0])]).stored == 1


class _Grows(Sequence[Any]):
    """Makes its first array another size while it is asked for the second object."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: Any) -> Any:
        if at == 1:
            self.array.resize(1 << 24, refcheck=False)
        return [self.array, memoryview(bytearray(4 * FLOATS)).cast("f")][at]


def test_an_array_that_is_resized_while_a_batch_is_looked_at_is_refused(client: Client) -> None:
    with pytest.raises((UsageError, ValueError), match=r"bytes|resize"):
        client.store([b"1" * 32, b"2" * 32], _Grows(np.zeros(FLOATS, np.float32)), namespace=SPACE)


EXCHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "set_": lambda tensor: tensor.set_(torch.zeros_like(tensor)),
    "data": lambda tensor: setattr(tensor, "data", torch.zeros_like(tensor)),
    "dropped": lambda tensor: tensor.set_(torch.zeros(0)),
    "made smaller": lambda tensor: tensor.untyped_storage().resize_(0),
    "made larger": lambda tensor: tensor.resize_(FLOATS * 4096),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_tensor_whose_storage_goes_while_the_server_is_asked_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given, send = torch.ones(FLOATS), Channel.send

    def asked(self: Channel, pending: Pending, message: object, **options: Any) -> None:
        if isinstance(message, PrepareStore):
            EXCHANGES[name](given)
        send(self, pending, message, **options)

    monkeypatch.setattr(Channel, "send", asked)
    with pytest.raises(UsageError, match="keep its storage as it is until the call returns"):
        client.store([name.encode().ljust(32, b"~")], [given], namespace=SPACE)
    assert client.retrieve([name.encode().ljust(32, b"~")], [torch.ones(FLOATS)], namespace=SPACE).hits == 0


@pytest.mark.parametrize("name", ["set_", "data", "dropped"])
def test_a_tensor_that_gets_another_storage_during_a_copy_keeps_the_copied_one(
    client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What `UntypedStorage.resize_` frees at that moment cannot be held: see decision 0053."""
    given, check, key = torch.ones(FLOATS), copying.first_unreachable, f"during {name}".encode().ljust(32, b"~")

    def last_look(*arguments: Any, **options: Any) -> int:
        EXCHANGES[name](given)
        gc.collect()
        return check(*arguments, **options)

    shared = given.share_memory_()  # so that the system is asked, which is the last step before the copy
    monkeypatch.setattr(copying, "first_unreachable", last_look)
    assert client.store([key], [shared], namespace=SPACE).stored == 1
    monkeypatch.undo()
    into = torch.zeros(FLOATS)
    assert client.retrieve([key], [into], namespace=SPACE).hits == 1
    assert bool((into == 1).all())


@pytest.mark.parametrize("found", [{}, {"typestr": "x"}, {"typestr": "<f4", "shape": "?", "data": (1, False)}, 7])
def test_an_invalid_gpu_array_interface_is_refused(client: Client, found: Any) -> None:
    given = type("Given", (), {"__cuda_array_interface__": found})()
    with pytest.raises(UsageError, match="makes no sense"):
        client.register_pages([PageGroup(SPACE, [Region(given, 0, 4 * FLOATS, 4 * FLOATS, 1, "cuda")], 1)])


def test_memory_that_was_truncated_after_its_registration_is_stale(client: Client) -> None:
    fd = _file(4 * FLOATS)
    given = np.memmap(f"/proc/self/fd/{fd}", "float32", "r+", shape=(FLOATS,))
    pages = client.register_pages([PageGroup(SPACE, [Region(given, 0, 4 * FLOATS, 4 * FLOATS, 1)], 1)])
    os.truncate(fd, 0)
    with pytest.raises(StaleRegionError, match="truncated"):
        pages.store([(0, [b"t" * 32], [0])])
    with pytest.raises(StaleRegionError, match="truncated"):
        pages.retrieve([(0, [STORED], [0])])
    os.close(fd)


@pytest.mark.parametrize("step", [2, -1])
def test_tokens_with_gaps_in_a_file_are_read(step: int) -> None:
    fd = _file(8 * FLOATS)
    mapped = np.memmap(f"/proc/self/fd/{fd}", "int64", "r+", shape=(FLOATS,))
    mapped[:] = range(FLOATS)
    assert chunk_keys(mapped[::step], SPACE, 16) == chunk_keys(list(range(FLOATS))[::step], SPACE, 16)
    os.close(fd)
