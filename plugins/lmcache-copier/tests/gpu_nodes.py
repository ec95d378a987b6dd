"""A copier that reaches a GPU, or CUDA's driver over host memory where there is none, and what an engine has there."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from lmcache_copier import ServerPages, register_pages
from lmcache_core import Client, Layout, Namespace, PageGroup, Region
from lmcache_core.devices import cuda
from lmcache_core.native import native
from lmcache_testing.processes import ServerProcess, end_process
from lmcache_testing.waiting import until

DRIVER = Path(__file__).parents[3] / "core" / "tests" / "client" / "host_driver.c"
LAYERS, BLOCKS, PAGE, STRIDE = 2, 8, 3000, 4096
OBJECT = 2 * LAYERS * PAGE
SPACE = Namespace("on a device", Layout("uint8", (OBJECT,)))


def why_no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no GPU on this machine"


class HostDevice:
    """CUDA's driver over host memory. It notes what CUDA leaves undefined."""

    def __init__(self, folder: Path) -> None:
        self.library = folder / "libcuda.so.1"
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or not DRIVER.exists():
            pytest.skip("no C compiler (apt-get install gcc), or no checkout")
        flags = ["-shared", "-fPIC", "-O1", "-pthread", "-o", str(self.library)]
        subprocess.run([compiler, *flags, str(DRIVER)], check=True)
        self.driver = CDLL(str(self.library))
        for name in ("host_allocate", "host_bytes", "host_header"):
            getattr(self.driver, name).restype = ctypes.c_void_p
        self.driver.host_allocate.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
        for name in ("host_bytes", "host_give_back", "host_header", "host_opened_by", "host_faults"):
            getattr(self.driver, name).argtypes = [ctypes.c_void_p]

    @property
    def environment(self) -> dict[str, str]:
        """In which a process finds it."""
        return {"LD_LIBRARY_PATH": f"{self.library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"}

    def memory(self) -> HostMemory:
        return HostMemory(self.driver)

    def engine_begins(self) -> None:
        self.driver.host_engine_begins()

    def engine_ends(self) -> None:
        self.driver.host_engine_ends()


class HostMemory:
    """An allocation of it: each layer's blocks behind those of the last."""

    nbytes = LAYERS * BLOCKS * STRIDE

    def __init__(self, driver: CDLL) -> None:
        self._driver = driver
        self.address = driver.host_allocate(self.nbytes, None)
        self._header = driver.host_header(self.address)
        there = (ctypes.c_uint8 * self.nbytes).from_address(driver.host_bytes(self.address))
        self._bytes = np.ctypeslib.as_array(there)
        self.__cuda_array_interface__ = {
            "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3,
        }  # fmt: skip

    @property
    def buffer(self) -> Any:
        return self

    @property
    def opened_by(self) -> int:
        """The pid of the process that has it open; 0: none has."""
        return int(self._driver.host_opened_by(self._header))

    @property
    def faults(self) -> int:
        """1: freed while it was open; 2: used after it was freed."""
        return int(self._driver.host_faults(self._header))

    def read(self) -> Any:
        return self._bytes.copy()

    def write(self, data: Any) -> None:
        self._bytes[:] = data

    def free(self) -> None:
        self._driver.host_give_back(self.address)


class Gpu:
    """A real one."""

    environment: ClassVar[dict[str, str]] = {}

    def memory(self) -> GpuMemory:
        return GpuMemory()

    def engine_begins(self) -> None:
        """Work for a while."""
        import torch

        product = torch.zeros(4096, 4096, device="cuda")
        for _ in range(200):
            product = product @ product

    def engine_ends(self) -> None:
        import torch

        torch.cuda.synchronize()


class GpuMemory:
    nbytes = LAYERS * BLOCKS * STRIDE
    opened_by = faults = 0  # nobody tells

    def __init__(self) -> None:
        import torch

        self.buffer: Any = torch.zeros(self.nbytes, dtype=torch.uint8, device="cuda")

    def read(self) -> Any:
        return self.buffer.cpu().numpy()

    def write(self, data: Any) -> None:
        import torch

        self.buffer.copy_(torch.from_numpy(np.ascontiguousarray(np.broadcast_to(np.uint8(data), self.nbytes))))

    def free(self) -> None:
        self.buffer = None


class CopierProcess:
    """A copier beside a server, started by hand, so that nothing needs to be installed, and it is killed at will."""

    def __init__(self, server: ServerProcess, environment: dict[str, str]) -> None:
        self._environment = os.environ | environment
        self._environment |= {"LMCACHE_CORE_NAME": server.name, "LMCACHE_CORE_RUNTIME_DIR": str(server.runtime_dir)}
        self._path = server.runtime_dir / server.name / "copier"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._path.unlink(missing_ok=True)
        options = '{"threads": 1, "uids": [], "gids": []}'
        command = [sys.executable, "-m", "lmcache_copier", options]
        self._process = subprocess.Popen(command, env=self._environment)
        until(self._path.exists, "the copier's socket")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        end_process(self._process)

    @property
    def open_allocations(self) -> int:
        """By its mappings: what a device has cannot be touched at its address."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return sum("memfd:device" in each and " ---s " in each for each in lines)


def group_on(memory: Any) -> PageGroup:
    layers = [Region(memory.buffer, at * BLOCKS * STRIDE, PAGE, STRIDE, BLOCKS, "cuda") for at in range(LAYERS)]
    return PageGroup(SPACE, layers, 2)


def registered(client: Client, memory: Any) -> ServerPages:
    pages = register_pages(client, [group_on(memory)], "server")
    assert isinstance(pages, ServerPages)
    return pages


def object_of(data: Any, blocks: list[int]) -> bytes:
    """What an object of these blocks has."""
    starts = [(layer * BLOCKS + block) * STRIDE for layer in range(LAYERS) for block in blocks]
    return b"".join(data[start : start + PAGE].tobytes() for start in starts)


class Stage:
    """A server, a copier, and an engine's client."""

    def __init__(self, device: Any, server: ServerProcess, copier: CopierProcess, client: Client) -> None:
        self.device, self.server, self.copier, self.client = device, server, copier, client

    def get(self, key: bytes) -> bytes | None:
        """From the pool, by a way of its own."""
        into = bytearray(OBJECT)
        return bytes(into) if self.client.retrieve([key], [into], namespace=SPACE, verify="always").hits else None


def staged(device: Any, environment: dict[str, str] | None = None) -> Iterator[Stage]:
    """With this environment for the copier, beside the device's."""
    if native is None:
        pytest.skip("pages of a GPU are copied by the C extension")
    with pytest.MonkeyPatch.context() as patched:
        if isinstance(device, HostDevice):
            patched.setattr(cuda, "LIBRARY", str(device.library))
        with ServerProcess(32 << 20) as server:
            more = device.environment | (environment or {})
            with CopierProcess(server, more) as copier, server.client() as client:
                yield Stage(device, server, copier, client)
