"""Where a torch tensor's memory is: the only place in which a tensor becomes an address.

What a tensor says of itself need not be so of its memory. Its storage may have been given back or shrunk; it may be
lazily negated, sparse, nested, on the meta device, inside `vmap`; and a subclass may answer with whatever it likes. All
of that is looked at here, at each call, for what it is then. Nothing here imports torch: who has a tensor has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from lmcache_core.errors import UsageError


class TensorMemory(NamedTuple):
    """From a tensor's first element to the end of its storage. `tensor`: a plain one over the same memory. Keep
    `storage` while the address is used: a tensor may be given another one meanwhile (`set_`, `data = …`)."""

    address: int  # 0: on a device, where only torch goes
    nbytes: int
    tensor: Any
    storage: Any


def is_tensor(given: Any) -> bool:
    """Whether this is a torch tensor, of any kind."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and issubclass(type(given), kind)  # `isinstance` believes what an object says of itself


def still_there(tensor: Any, address: int) -> bool:
    """Whether a plain tensor that was at this address (0: on a device) still is, with all of its memory."""
    storage = tensor.untyped_storage()
    end = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    return bool(storage.nbytes() >= end and (not address or tensor.data_ptr() == address))


def whole_tensor(found: TensorMemory, name: str) -> Any:
    """Its elements in order in host memory: the tensor itself, or a copy. Raises `UsageError`."""
    tensor = found.tensor
    if tensor.is_cpu and tensor.is_contiguous():
        return tensor
    check_span(found, name)
    return tensor.detach().cpu().contiguous()


def check_span(found: TensorMemory, name: str) -> int:
    """How many bytes lie between a tensor's ends, gaps included. Raises `UsageError` if its storage has fewer."""
    tensor = found.tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes: int = (last + 1) * tensor.element_size() if tensor.numel() else 0
    _check_room(name, nbytes, found.nbytes)
    return nbytes


def dense_memory(given: Any, name: str) -> TensorMemory:
    """The memory of a tensor whose elements lie in it in order, without gaps. Raises `UsageError`."""
    found = storage_memory(given, name)
    tensor = found.tensor
    if not tensor.is_contiguous():
        raise UsageError(f"{name} is not contiguous: call .contiguous() first")
    _check_room(name, tensor.nbytes, found.nbytes)
    if tensor.is_cpu and tensor.nbytes and not found.address:
        raise UsageError(f"{name} has no memory of its own yet: pass one that was computed (.clone())")
    return found if tensor.is_cpu else found._replace(address=0)


def storage_memory(given: Any, name: str) -> TensorMemory:
    """The same of one that may be strided: its storage counts. Raises `UsageError` where the bytes in a tensor's memory
    are not its elements, or there are none."""
    tensor = _plain(given, name)
    try:
        storage, first = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, TypeError) as error:  # sparse, inside vmap or grad, of another library's storage
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{name} has no memory that can be copied ({reason}): pass a plain, dense tensor") from error
    if tensor.is_neg() or tensor.is_conj():
        raise UsageError(
            f"{name} is a lazily negated or conjugated view, and its memory holds other values: call .resolve_conj()"
            ".resolve_neg() first"
        )
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        kind = "on the meta device" if tensor.is_meta else "nested" if tensor.is_nested else "quantized"
        raise UsageError(f"{name} is {kind}: pass a plain, dense tensor")
    return TensorMemory(address + first if address else 0, nbytes - first, tensor, storage)


def _check_room(name: str, needed_bytes: int, nbytes: int) -> None:
    if needed_bytes > nbytes:
        raise UsageError(
            f"{name} needs {needed_bytes:,} bytes and its storage has {max(0, nbytes):,} left: its memory was given "
            "back or made smaller, as that of an engine that sleeps is; pass a tensor that has its memory"
        )


def _plain(given: Any, name: str) -> Any:
    """The tensor without what its class makes of it."""
    torch = sys.modules["torch"]
    if type(given) is torch.Tensor:
        return given
    with torch._C.DisableTorchFunctionSubclass():
        if torch._C._dispatch_keys(given).has(torch._C.DispatchKey.Python):  # its class alone knows, as of a FakeTensor
            raise UsageError(f"{name} is a {type(given).__name__}, which has no memory of its own: pass a plain tensor")
        return torch.Tensor.as_subclass(torch.Tensor.detach(given), torch.Tensor)


def weakly(tensor: Any) -> Callable[[], Any]:
    """A callable that returns the tensor while anybody has it, and None afterwards. A tensor that Python has dropped
    may live on in torch's C++, and a plain weak reference must not be used on such a tensor."""
    from torch.utils.weak import TensorWeakRef

    tie: Callable[[], Any] = TensorWeakRef(tensor)
    return tie
