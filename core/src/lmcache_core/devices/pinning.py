"""The pool's mapping, registered with CUDA, so that a GPU reads and writes it directly.

Without this, the driver copies through a buffer of its own, and no copy is asynchronous. Registering locks every page,
once for each process that maps the pool. It is done in steps: see `contract.PIN_STEP_BYTES`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from lmcache_core.devices import contract
from lmcache_core.devices.contract import HostRegistrar
from lmcache_core.errors import PoolError, UsageError
from lmcache_core.pool.mapping import Mapping

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of this process, not only the current one


_pinning = threading.Lock()


def pin_for_cuda(mapping: Mapping, registrar: HostRegistrar | None = None) -> bool:
    """Register a mapping, until the last view of it is gone. False: it was already registered.

    Raises `UsageError` if there is no torch or no GPU, and `PoolError` with CUDA's message if it refuses: then nothing
    of it stays registered, and copies go through CUDA's own buffer.
    """
    with _pinning:  # one thread at a time: CUDA refuses what is registered already
        return False if mapping.pinned else _pin(mapping, _TorchRuntime() if registrar is None else registrar)


def _pin(mapping: Mapping, cuda: HostRegistrar) -> bool:
    done: list[int] = []
    for address, nbytes in _steps(mapping):
        if error := cuda.register(address, nbytes):
            _unregister(cuda, done, os.getpid())
            raise PoolError(
                f"CUDA cannot register the {mapping.nbytes:,} bytes of the pool ({cuda.error_text(error)}): raise "
                "ulimit -l, or go without pinning: copies work, and are slower"
            )
        done.append(address)
    mapping.pinned = True
    # The newest finalizer of an object runs first, so this one runs before the one that unmaps. CUDA itself ends with
    # the process, and may be gone before an atexit call.
    weakref.finalize(mapping.array, _unregister, cuda, done, os.getpid()).atexit = False
    return True


def _steps(mapping: Mapping) -> Iterator[tuple[int, int]]:
    address, end = mapping.address, mapping.address + mapping.nbytes
    while address < end:
        until = min(end, (address // contract.PIN_STEP_BYTES + 1) * contract.PIN_STEP_BYTES)
        yield address, until - address
        address = until


def _unregister(cuda: HostRegistrar, addresses: list[int], pid: int) -> None:
    if os.getpid() == pid:  # CUDA does not survive a fork, and neither does the mapping
        for address in addresses:
            cuda.unregister(address)


class _TorchRuntime:
    """torch's CUDA runtime: a process has only one."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise UsageError(
                "pinning the pool for CUDA needs torch: pip install 'lmcache-core[torch]' with a CUDA build of it"
            ) from error
        if not torch.cuda.is_available():
            raise UsageError(
                "pinning the pool for CUDA needs a GPU, and torch finds none: check nvidia-smi, "
                "CUDA_VISIBLE_DEVICES and torch.version.cuda (None: a build without CUDA); "
                "without a GPU, do not pin"
            )
        cuda: Any = torch.cuda
        cuda.init()
        self._cudart = cuda.cudart()

    def register(self, address: int, nbytes: int) -> int:
        return int(self._cudart.cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        return int(self._cudart.cudaHostUnregister(address))

    def error_text(self, error: int) -> str:
        return str(self._cudart.cudaGetErrorString(self._cudart.cudaError(error)))
