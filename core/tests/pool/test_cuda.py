"""Pinning the pool for CUDA: what is registered, when it ends, and what is said where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.devices import contract
from lmcache_core.devices.pinning import pin_for_cuda
from lmcache_core.errors import PoolError, UsageError
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.segment import Segment

MIB = 1 << 20
Make = Callable[..., Segment]


def why_no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no GPU on this machine"


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


class Recorder:
    """A runtime that notes what it is asked, and whether the memory was there at that moment."""

    def __init__(self, answer: int = 0, refuses_at: int = -1) -> None:
        self.answer = answer
        self.refuses_at = refuses_at  # the number of the call that is refused
        self.calls: list[tuple[str, int, bool]] = []

    def register(self, address: int, nbytes: int) -> int:
        self.calls.append((f"register {nbytes}", address, is_mapped(address)))
        return 2 if len(self.calls) == self.refuses_at + 1 else self.answer

    def unregister(self, address: int) -> int:
        self.calls.append(("unregister", address, is_mapped(address)))
        return 0

    def error_text(self, error: int) -> str:
        return f"error {error}"


def test_the_whole_mapping_is_registered_once_and_until_its_last_view(make: Make) -> None:
    segment, cuda = make(4 * MIB, backing=Backing.MEMFD), Recorder()
    address, nbytes = segment.mapping.address, segment.mapping.nbytes
    assert pin_for_cuda(segment.mapping, cuda)
    assert not pin_for_cuda(segment.mapping, cuda)
    view = segment.view(segment.header.data_offset, 64)
    segment.close()
    assert cuda.calls == [(f"register {nbytes}", address, True)], "a copy may still run under a view"
    del view
    assert cuda.calls[1:] == [("unregister", address, True)], "before the memory is unmapped"
    assert not is_mapped(address)


def test_it_is_registered_in_steps_that_begin_at_multiples(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "PIN_STEP_BYTES", 4 * MIB)
    segment, cuda = make(9 * MIB, backing=Backing.MEMFD), Recorder()
    address, end = segment.mapping.address, segment.mapping.address + segment.mapping.nbytes
    assert pin_for_cuda(segment.mapping, cuda)
    starts = [at for _, at, _ in cuda.calls]
    assert starts[0] == address
    assert all(at % (4 * MIB) == 0 for at in starts[1:])
    assert sum(int(call.split()[1]) for call, _, _ in cuda.calls) == end - address
    segment.close()
    assert sorted(at for call, at, there in cuda.calls if call == "unregister" and there) == starts


def test_a_step_that_is_refused_ends_those_before_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "PIN_STEP_BYTES", 4 * MIB)
    segment, cuda = make(9 * MIB, backing=Backing.MEMFD), Recorder(refuses_at=1)
    with pytest.raises(PoolError, match="go without pinning"):
        pin_for_cuda(segment.mapping, cuda)
    assert not segment.mapping.pinned
    assert [call.split()[0] for call, _, _ in cuda.calls] == ["register", "register", "unregister"]
    assert cuda.calls[0][1] == cuda.calls[2][1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_leaves_cuda_alone(make: Make) -> None:
    segment, cuda = make(4 * MIB, backing=Backing.MEMFD), Recorder()
    pin_for_cuda(segment.mapping, cuda)
    child = os.fork()
    if child == 0:
        segment.after_fork_in_child()
        os._exit(len(cuda.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_refusal_carries_the_runtime_s_words_and_can_be_tried_again(make: Make) -> None:
    segment, cuda = make(4 * MIB, backing=Backing.MEMFD), Recorder(answer=2)
    with pytest.raises(PoolError, match=r"error 2.*ulimit -l"):
        pin_for_cuda(segment.mapping, cuda)
    cuda.answer = 0
    assert pin_for_cuda(segment.mapping, cuda)


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_what_to_do(make: Make) -> None:
    segment = make(4 * MIB, backing=Backing.MEMFD)
    with pytest.raises(UsageError, match=r"needs (torch: pip install|a GPU, and torch finds none)"):
        pin_for_cuda(segment.mapping)
    assert not segment.mapping.pinned


@pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu() or "there is a GPU")
def test_a_gpu_reads_and_writes_the_pinned_pool(make: Make) -> None:
    import torch

    segment = make(64 * MIB, backing=Backing.MEMFD)
    assert pin_for_cuda(segment.mapping)
    start = segment.header.data_offset
    host = torch.frombuffer(segment.view(start, 64 * MIB), dtype=torch.uint8)
    assert host.is_pinned()
    sent = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8, device="cuda")
    host.copy_(sent, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, sent.cpu())
    back = torch.empty_like(sent)
    back.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, sent)
