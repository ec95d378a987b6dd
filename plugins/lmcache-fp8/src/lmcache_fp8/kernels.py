"""The two implementations, behind one small interface; both give the same bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lmcache_core.errors import DamagedObjectError, PluginError
from lmcache_core.serde.contract import Buffer
from lmcache_fp8.grouping import Grouping

DTYPES = ("bfloat16", "float16", "float32")  # the order is the C kernel's
CURE = "reinstall lmcache-fp8 where a C compiler is found, or install lmcache-fp8[torch]"


class Kernel(ABC):
    """Quantises whole objects. Thread-safe; releases the GIL while it computes."""

    @abstractmethod
    def encode(self, src: memoryview, dtype: str, grouping: Grouping) -> Buffer:
        """The scales as little-endian floats, then one byte an element. The caller has checked all lengths."""

    @abstractmethod
    def decode(self, src: memoryview, into: memoryview, dtype: str, grouping: Grouping) -> None:
        """Fill `into`. Raises DamagedObjectError for a scale that no encoder writes; lengths are checked."""


def bad_scale(index: int) -> DamagedObjectError:
    """The error for a scale that is not a number, not positive or out of range."""
    return DamagedObjectError(
        f"fp8 object: scale {index} is one that no encoder writes; the bytes were changed on their way: "
        "the object is dropped and stored again by its next writer"
    )


class NativeKernel(Kernel):
    """The C kernel; `isa` is one of `isas()`, or "auto" for the best that this machine has."""

    def __init__(self, isa: str = "auto") -> None:
        try:
            from lmcache_fp8 import _native
        except ImportError as error:
            raise PluginError(f"lmcache-fp8 was installed without its C kernel ({error}): {CURE}") from error
        self._native = _native
        self._isa = isa

    def encode(self, src: memoryview, dtype: str, grouping: Grouping) -> Buffer:
        return self._native.encode(src, DTYPES.index(dtype), grouping, self._isa)

    def decode(self, src: memoryview, into: memoryview, dtype: str, grouping: Grouping) -> None:
        bad = self._native.decode(src, into, DTYPES.index(dtype), grouping, self._isa)
        if bad >= 0:
            raise bad_scale(bad)


def kernel_for(choice: str) -> Kernel:
    """The kernel that a setting names. Raises PluginError, with the cure, where it is not installed."""
    if choice == "torch":
        return _torch_kernel()
    try:
        return NativeKernel()
    except PluginError:
        if choice == "native":
            raise
    return _torch_kernel()


def _torch_kernel() -> Kernel:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise PluginError(
            f"lmcache-fp8 has no way to compute: the C kernel was not asked for or not built, and torch is not "
            f"installed ({error}): {CURE}"
        ) from error
    from lmcache_fp8.torch_kernel import TorchKernel

    return TorchKernel()
