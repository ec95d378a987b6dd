"""Deaths, stops and hostile memory: a job fails or is a miss, nothing is freed while somebody may write to it, and
nothing is written to an engine that has given the job up."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_copier import ServerPages, messages, register_pages
from lmcache_copier import jobs as jobs_module
from lmcache_copier import link as link_module
from lmcache_copier.channel import Incoming
from lmcache_copier.pages import SharedFile, access_of
from lmcache_core import Client, Layout, Namespace, PageGroup, Region, Status
from lmcache_core.buffers import address_of
from lmcache_core.errors import DisconnectedError, UsageError
from lmcache_core.kernel.answers import Reason
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import until

from .copier_nodes import Node, group_of, keys
from .slow_pages import PAGE, SlowPages

IDS = array("q", range(4))
_PROT_NONE, _PROT_READ = 0, 1


def one_group(buffer: Any, pages: int = 8, model: str = "slow") -> PageGroup:
    """Objects of two pages."""
    return PageGroup(Namespace(model, Layout("uint8", (2 * PAGE,))), [Region(buffer, 0, PAGE, PAGE, pages)], 2)


def registered(node: Node, groups: PageGroup | list[PageGroup], files: Any = ()) -> ServerPages:
    pages = register_pages(node.client, groups if isinstance(groups, list) else [groups], "server", files)
    assert isinstance(pages, ServerPages)
    return pages


def protect(buffer: mmap.mmap, access: int) -> None:
    start = ctypes.c_void_p(address_of(memoryview(buffer)))
    assert ctypes.CDLL(None).mprotect(start, ctypes.c_size_t(len(buffer)), access) == 0


def quarantined(node: Node) -> int:
    """Objects whose slot somebody may still write to."""
    return int(node.l1["objects_by_state"]["quarantined"])


def free_slots(node: Node) -> bool:
    """Whether no writer holds or may touch a slot."""
    return node.l1["leases_by_kind"]["write"] == 0 and quarantined(node) == 0


@pytest.fixture
def slow() -> Iterator[SlowPages]:
    with closing(SlowPages(8)) as pages:
        yield pages


@pytest.fixture
def node(start: Callable[..., Node]) -> Node:
    return start()


def stored(pages: ServerPages, names: list[bytes], ids: Any = IDS) -> None:
    assert pages.store([(0, names, ids)]).stored == len(names)


# --- the copier -------------------------------------------------------------------------------------------------


def test_a_copier_that_is_killed_in_a_copy_frees_its_slots_and_fails_the_job(node: Node, slow: SlowPages) -> None:
    pages = registered(node, one_group(slow.buffer))
    job = pages.store_start([(0, keys(2), IDS)], reads=False)
    slow.wait_touched()
    assert node.l1["leases_by_kind"]["write"] == 1
    first = node.kill()
    assert job.wait(60)
    assert job.result is not None
    assert list(job.result.statuses[0]) == [Status.UNREACHABLE] * 2
    assert "ended" in job.fault
    until(lambda: free_slots(node), "the slots are free")
    assert node.client.lookup(keys(2), namespace=pages.groups[0].namespace).hits == 0
    slow.give(0, 8, b"abcd")
    until(lambda: node.helper["pid"] not in (None, first) and node.path.exists(), "a new copier")
    assert until(lambda: pages.store([(0, keys(2), IDS)]).stored == 2, "it stores again")


def test_a_copier_that_is_killed_while_it_writes_gives_its_reads_back_and_leaves_no_page_trusted(
    node: Node, slow: SlowPages
) -> None:
    stored(registered(node, one_group(bytearray(os.urandom(8 * PAGE)))), keys(2))
    into = registered(node, one_group(slow.buffer))
    job = into.retrieve_start([(0, keys(2), IDS)])
    threading.Thread(target=job.wait, daemon=True).start()
    slow.wait_touched()
    assert node.l1["leases_by_kind"]["read"] == 1
    node.kill()
    assert job.wait(60)
    assert job.result is not None
    assert sorted(job.result.untrusted[0]) == list(IDS)
    until(lambda: node.l1["leases_by_kind"]["read"] == 0, "its lease has ended")


@pytest.mark.slow
def test_kills_at_any_time_of_stores_and_loads_lose_no_byte(node: Node) -> None:
    chooser = random.Random(35)
    source, target = bytearray(8 * PAGE), bytearray(8 * PAGE)
    out, into = registered(node, one_group(source)), registered(node, one_group(target))
    for turn in range(5):
        killer = threading.Timer(chooser.random() * 0.05, os.kill, (node.pid, signal.SIGKILL))
        killer.start()
        served = 0
        while served < 3 or killer.is_alive():
            number = chooser.randrange(1 << 30)
            source[:] = bytes([number % 256]) * len(source)
            names = keys(4, 4 * number)
            saved = out.store([(0, names, list(range(8)))])
            target[:] = bytes([(number + 1) % 256]) * len(target)
            read = into.retrieve([(0, names, list(range(8)))])
            for at, status in enumerate(read.statuses[0]):
                piece = target[2 * at * PAGE : 2 * (at + 1) * PAGE]
                if status is Status.HIT:
                    assert piece == source[: len(piece)]
                elif not {2 * at, 2 * at + 1} & set(read.untrusted[0]):
                    assert piece == bytes([(number + 1) % 256]) * len(piece)
            served += read.hits == saved.stored == 4
        until(lambda: free_slots(node), f"slots after turn {turn}")


class CopyingServer(ServerProcess):
    def _command(self) -> list[str]:
        return [*super()._command(), "--copier.threads", "1"]


def test_a_server_that_hangs_costs_a_job_its_deadline_and_the_copier_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = bytearray(b"\x01" * 8 * PAGE)
    with CopyingServer(32 << 20) as server, server.client() as client:
        until(lambda: client.status()["operations"]["copier"]["copier"], "the copier")
        pages = register_pages(client, [one_group(target)], "server")
        assert pages.store([(0, keys(2), IDS)]).stored == 2
        pid = client.status()["helpers"]["copier"]["pid"]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            late = pages.store([(0, keys(2, 10), IDS)], deadline_s=0.2)
            assert list(late.statuses[0]) == [Status.UNREACHABLE] * 2
            assert list(late.reasons[0]) == [Reason.LATE] * 2
            missed = pages.retrieve([(0, keys(2), IDS)], deadline_s=0.2)
            assert list(missed.reasons[0]) == [Reason.LATE] * 2
            assert list(missed.statuses[0]) == [Status.MISS] * 2
            assert missed.untrusted == [[]]
            cancelled, ahead_s = pages.store_start([(0, keys(2, 20), IDS)], deadline_s=600.0, reads=False), [0.0]
            monkeypatch.setattr(jobs_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0]))
            cancelled.leave()
            ahead_s[0] = 6000.0  # the user's cancel is not called late, however late it is answered
            assert cancelled.wait(60)
            assert cancelled.result is not None
            assert list(cancelled.result.statuses[0]) == [Status.ABORTED] * 2
            assert list(cancelled.result.reasons[0]) == [Reason.NONE] * 2
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert until(lambda: pages.retrieve([(0, keys(2), IDS)]).hits == 2, "the server again")
        assert client.status()["helpers"]["copier"]["pid"] == pid


def test_a_stopped_copier_is_killed_before_its_job_is_given_up(node: Node) -> None:
    """It would go on to write to pages that are others' by then."""
    source = bytearray(os.urandom(8 * PAGE))
    target = mmap.mmap(-1, 8 * PAGE)
    out, into = registered(node, one_group(source)), registered(node, one_group(target))
    stored(out, keys(2))
    ended = os.pidfd_open(node.kill(signal.SIGSTOP))
    job = into.retrieve_start([(0, keys(2), IDS)], deadline_s=0.05)
    assert job.wait(60)
    assert job.result is not None
    assert list(job.result.statuses[0]) == [Status.UNREACHABLE] * 2
    assert sorted(job.result.untrusted[0]) == list(IDS)
    assert select.select([ended], [], [], 0)[0], "it is dead"
    os.close(ended)
    assert bytes(target) == bytes(8 * PAGE)
    assert until(lambda: into.retrieve([(0, keys(2), IDS)]).hits == 2, "a new copier")


def test_a_copier_that_has_answered_is_not_killed_because_the_engine_was_away(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer comes at the end of a wait, and whoever waited gets the interpreter back a minute later."""
    pages = registered(node, one_group(bytearray(8 * PAGE)))
    link, pid, ahead_s, real = access_of(node.client).link(), node.pid, [2.0], select.poll
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0]))
    call = link.open((messages.CopierDone,))
    assert not link.wait(call, 0)  # it is quiet, and asked whether it lives
    polls: list[Any] = []

    def late() -> Any:
        polls.append(real())
        if len(polls) > 1:
            return polls[-1]
        return SimpleNamespace(register=polls[0].register, poll=lambda timeout: polls[0].poll(60_000) and [])

    monkeypatch.setattr(link_module, "select", SimpleNamespace(poll=late, POLLIN=select.POLLIN))
    ahead_s[0] = 60.0
    assert not link.wait(call, 0)
    assert link.usable
    link.send(call, messages.AskAlive(call.rid))
    until(lambda: link.wait(call, 0.05), "its answer")
    assert node.pid == pid
    stored(pages, keys(2))


def test_an_interrupt_while_an_answer_is_read_does_not_lose_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = registered(node, one_group(bytearray(8 * PAGE)))
    real = Incoming.messages

    def interrupted(incoming: Incoming[Any]) -> Iterator[Any]:
        for each in real(incoming):
            if isinstance(each, messages.JobFinished):
                raise KeyboardInterrupt
            yield each

    job = pages.retrieve_start([(0, keys(2), IDS)])
    with monkeypatch.context() as patched:
        patched.setattr(Incoming, "messages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.wait(60)
    assert job.wait(60)
    assert job.result is not None
    until(lambda: pages.store([(0, keys(2), IDS)]).stored == 2, "it stores again")


@pytest.mark.parametrize("way", ["store", "retrieve"])
def test_an_interrupted_wait_leaves_no_job(node: Node, slow: SlowPages, way: str) -> None:
    """By a real signal, while the copier is in a copy."""
    stored(registered(node, one_group(bytearray(b"\x09" * 8 * PAGE))), keys(2))
    pages = registered(node, one_group(slow.buffer))

    def interrupt() -> None:
        slow.wait_touched()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        slow.give(0, 8, b"abcd")

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        getattr(pages, way)([(0, keys(2, 10 if way == "store" else 0), IDS)])
    helper.join()
    target = bytes(slow.buffer)
    until(lambda: free_slots(node) and node.l1["leases_by_kind"]["read"] == 0, "no lease is left")
    assert bytes(slow.buffer) == target
    stored(pages, keys(2, 20))
    assert node.helper["restarts"] == 0


def test_an_interrupted_registration_is_undone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number comes when nobody waits for it any more."""
    pages = ServerPages(node.client, node.client.register_pages([one_group(bytearray(8 * PAGE))]))
    link, real = access_of(node.client).link(), link_module.CopierLink.wait

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(link_module.CopierLink, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pages.registration()
    assert real is link_module.CopierLink.wait
    assert pages.registration() == (link, 2)
    with pytest.raises(UsageError, match="no memory is registered under 1"):
        link.call(lambda rid: messages.UnregisterMemory(rid, 1), (messages.CopierDone,))
    stored(pages, keys(2))


def test_slots_of_a_stopped_copier_stay_in_quarantine_until_it_is_dead(
    start: Callable[..., Node], slow: SlowPages
) -> None:
    """Its lease expires, and the key is free for others; the slot is not, for it may wake up and write."""
    node = start(lease={"write_ttl_s": 0.3})
    pages = registered(node, one_group(slow.buffer))
    job = pages.store_start([(0, keys(2), IDS)], reads=False)  # nobody asks how it is
    slow.wait_touched()
    node.kill(signal.SIGSTOP)
    until(lambda: quarantined(node) > 0, "the lease has expired")
    again = node.client.register_pages([one_group(bytearray(b"\x07" * 8 * PAGE))])
    assert again.store([(0, keys(2), IDS)]).stored == 2  # in other slots
    slow.give(0, 8, b"late")  # the stopped copier's system call ends, and writes into its slots
    assert quarantined(node) > 0
    target = bytearray(8 * PAGE)
    into = node.client.register_pages([one_group(target)])
    assert into.retrieve([(0, keys(2), IDS)], verify="always").hits == 2
    assert target[: 4 * PAGE] == b"\x07" * 4 * PAGE
    node.kill()
    until(lambda: free_slots(node), "it is dead")
    assert job.wait(60)


def test_a_copy_that_hangs_in_the_engines_memory_can_be_given_up(node: Node, slow: SlowPages) -> None:
    pages = registered(node, one_group(slow.buffer))
    job = pages.store_start([(0, keys(2), IDS)], reads=False)
    slow.wait_touched()
    pid = node.pid
    job.cancel()
    assert "killed" in job.fault
    until(lambda: node.helper["pid"] not in (None, pid), "a new copier")
    until(lambda: free_slots(node), "the slots are free")


def test_without_a_copier_nothing_is_stored_and_nothing_raised(node: Node) -> None:
    pages = registered(node, one_group(bytearray(8 * PAGE)))
    node.server.stop()
    assert list(pages.store([(0, keys(2), IDS)]).statuses[0]) == [Status.UNREACHABLE] * 2
    assert pages.retrieve([(0, keys(2), IDS)]).hits == 0


# --- the engine -------------------------------------------------------------------------------------------------

ENGINE = """
import mmap, sys
from array import array
from lmcache_copier import register_pages
from lmcache_core import Client, Layout, Namespace, PageGroup, Region
sys.path.insert(0, {here!r})
from slow_pages import PAGE, SlowPages
client = Client.connect({name!r}, runtime_dir={run!r})
slow = SlowPages(8)
group = PageGroup(Namespace("slow", Layout("uint8", (2 * PAGE,))), [Region(slow.buffer, 0, PAGE, PAGE, 8)], 2)
pages = register_pages(client, [group], "server")
job = pages.store_start([(0, [bytes([n]) * 32 for n in (1, 2)], array("q", range(4)))], reads=False)
slow.wait_touched()
print("inside", flush=True)
sys.stdin.read()
"""


UNMAPPED = ENGINE.replace(
    'job = pages.store_start([(0, [bytes([n]) * 32 for n in (1, 2)], array("q", range(4)))], reads=False)',
    """
import ctypes, os
writes, ends = sys.argv[1:]
entries = [(0, [bytes([n]) * 32 for n in (1, 2)], array("q", range(4)))]
job = pages.retrieve_start(entries) if writes == "retrieve" else pages.store_start(entries, reads=False)
""",
).replace(
    "sys.stdin.read()",
    """
libc, where = ctypes.CDLL(None), (ctypes.c_void_p(slow.address), ctypes.c_size_t(8 * PAGE))
assert (libc.munmap(*where) if ends == "munmap" else libc.madvise(*where, 4)) == 0
slow.close()  # whoever waits for these pages looks again
job.wait()
print(*job.result.statuses[0], *sorted(job.result.untrusted[0]), job.fault, sep=",", flush=True)
os._exit(0)
""",
)


@pytest.mark.parametrize("ends", ["munmap", "madvise"])
@pytest.mark.parametrize("way", ["store", "retrieve"])
def test_memory_that_an_engine_takes_away_in_a_copy_fails_that_job_and_nothing_else(
    node: Node, way: str, ends: str
) -> None:
    """Unmapped: EFAULT. Given back by madvise it is zeros, which is then what that memory holds."""
    names = [bytes([1]) * 32, bytes([2]) * 32]
    if way == "retrieve":
        stored(registered(node, one_group(bytearray(b"\x09" * 8 * PAGE))), names)
    run = {"here": str(Path(__file__).parent), "name": node.client.links.target.name, "run": str(node.folder / "run")}
    command = [sys.executable, "-c", UNMAPPED.format(**run), way, ends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if not done.stdout.startswith("inside"):
        pytest.skip("this kernel gives us no userfaultfd")
    assert done.returncode == 0, done.stderr
    statuses, fault = done.stdout.splitlines()[1].split(",")[:-1], done.stdout.splitlines()[1].split(",")[-1]
    pid = node.pid
    target = bytearray(8 * PAGE)
    found = node.client.register_pages([one_group(target)]).retrieve([(0, names, IDS)], verify="always")
    if ends == "munmap":
        assert statuses == ["aborted"] * 2 + (["0", "1", "2", "3"] if way == "retrieve" else [])
        assert "register memory that is there" in fault
        assert found.hits == (2 if way == "retrieve" else 0)
    else:
        assert (statuses, fault) == ([{"store": "stored", "retrieve": "hit"}[way]] * 2, "")
        assert found.hits == 2
        assert target[: 4 * PAGE] == (b"\x09" if way == "retrieve" else b"\x00") * 4 * PAGE
    until(lambda: free_slots(node), "the slots are free")
    assert (node.pid, node.helper["restarts"]) == (pid, 0)
    stored(registered(node, one_group(bytearray(8 * PAGE))), keys(2, 50))


def test_an_engine_that_dies_in_a_copy_costs_a_failed_job(node: Node) -> None:
    script = ENGINE.format(
        here=str(Path(__file__).parent), name=node.client.links.target.name, run=str(node.folder / "run")
    )
    engine = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with engine:
        assert engine.stdout is not None
        line = engine.stdout.readline()
        if not line:
            pytest.skip("this kernel gives us no userfaultfd")
        pid = node.pid
        assert node.l1["leases_by_kind"]["write"] == 1
        engine.kill()
    until(lambda: free_slots(node), "the slots are free")
    assert node.client.lookup([bytes([1]) * 32], namespace=one_group(bytearray(8 * PAGE)).namespace).hits == 0
    assert node.pid == pid
    assert node.helper["restarts"] == 0
    until(lambda: node.figures.get("engines") == 0, "the copier has let it go")


@pytest.mark.parametrize("way", ["address", "descriptor"])
def test_memory_that_goes_away_fails_the_job_and_nothing_else(node: Node, way: str) -> None:
    """By address the kernel says EFAULT. By descriptor a truncated file would be a SIGBUS, had it been touched."""
    fd = os.memfd_create("engine")
    os.truncate(fd, 8 * PAGE)
    mapping = mmap.mmap(fd, 8 * PAGE) if way == "descriptor" else mmap.mmap(-1, 8 * PAGE)
    mapping[:] = os.urandom(8 * PAGE)
    pages = registered(node, one_group(mapping), [SharedFile(fd, mapping)] if way == "descriptor" else ())
    stored(pages, keys(1), IDS[:2])
    pid = node.pid
    link, number = pages.registration()
    if way == "address":
        protect(mapping, _PROT_NONE)
    else:
        os.truncate(fd, 0)
    # Past the engine's own checks, which see this before they ask.
    from lmcache_copier import messages as m

    entry = m.JobEntry(0, b"".join(keys(2)), array("q", [2, 3, 4, 5]).tobytes())
    reply = link.call(lambda rid: m.StorePages(rid, number, [entry], None, False), (m.JobFinished,))
    aborted = m.STATUSES[Status.ABORTED]
    exists = m.STATUSES[Status.EXISTS]
    assert list(reply.statuses[0]) == [exists, aborted]
    assert "register memory that is there" in reply.fault
    reply = link.call(
        lambda rid: m.RetrievePages(rid, number, [m.JobEntry(0, keys(1)[0], IDS[:2].tobytes())], None, 0),
        (m.JobFinished,),
    )
    assert list(reply.statuses[0]) == [aborted]
    assert sorted(array("q", reply.untrusted[0])) == [0, 1]
    assert reply.fault
    until(lambda: free_slots(node), "the slots are free")
    assert node.pid == pid
    if way == "address":
        protect(mapping, 3)
    os.close(fd)


@pytest.mark.parametrize("page_bytes", [PAGE, 64 * PAGE])
def test_memory_that_is_missing_in_one_region_fails_no_object_of_another(node: Node, page_bytes: int) -> None:
    """Two regions, one behind the other, each of a group of its own; of the first one page is forbidden. Small
    objects are copied together, and large ones one by one."""
    half = 4 * page_bytes
    source, target = mmap.mmap(-1, 2 * half), mmap.mmap(-1, 2 * half)
    source[:] = os.urandom(2 * half)
    spaces = [Namespace(f"missing {page_bytes} {each}", Layout("uint8", (page_bytes,))) for each in range(2)]

    def groups(buffer: mmap.mmap) -> list[PageGroup]:
        return [PageGroup(spaces[at], [Region(buffer, at * half, page_bytes, page_bytes, 4)], 1) for at in range(2)]

    def both(first: int) -> list[messages.JobEntry]:
        return [messages.JobEntry(at, b"".join(keys(4, first)), IDS.tobytes()) for at in range(2)]

    def forbid(buffer: mmap.mmap, page: int, access: int) -> None:
        start = ctypes.c_void_p(address_of(memoryview(buffer)) + page * page_bytes)
        assert ctypes.CDLL(None).mprotect(start, ctypes.c_size_t(page_bytes), access) == 0

    def statuses(reply: messages.JobFinished) -> list[list[Status]]:
        return [[tuple(Status)[each] for each in row] for row in reply.statuses]

    out, into = (registered(node, groups(each)) for each in (source, target))
    assert out.store([(at, keys(4), IDS) for at in range(2)]).stored == 8
    # Past the engine's own checks, which see this before they ask.
    link, number = out.registration()
    forbid(source, 1, _PROT_NONE)
    done = link.call(lambda rid: messages.StorePages(rid, number, both(100), None, False), (messages.JobFinished,))
    forbid(source, 1, _PROT_READ)
    assert "register memory that is there" in done.fault
    assert statuses(done)[0] == [Status.ABORTED] * 4, "of one entry all is stored, or nothing"
    assert statuses(done)[1] == [Status.STORED] * 4
    link, number = into.registration()
    forbid(target, 3, _PROT_READ)
    done = link.call(lambda rid: messages.RetrievePages(rid, number, both(0), None, 0), (messages.JobFinished,))
    assert statuses(done) == [[Status.HIT] * 3 + [Status.ABORTED], [Status.HIT] * 4]
    assert [list(array("q", row)) for row in done.untrusted] == [[3], []]
    assert target[: 3 * page_bytes] + target[half:] == source[: 3 * page_bytes] + source[half:]
    until(lambda: free_slots(node), "the slots are free")


def test_a_job_that_is_cancelled_while_it_waits_touches_nothing(start: Callable[..., Node]) -> None:
    node = start(l1={"size_bytes": 16 << 20})
    target = bytearray(8 * PAGE)
    pages = registered(node, one_group(target))
    stored(pages, keys(2))
    target[:] = b"\x01" * len(target)
    job = pages.retrieve_start([(0, keys(2), IDS)])
    job.cancel()
    assert job.result is not None
    for at, status in enumerate(job.result.statuses[0]):
        assert status in (Status.HIT, Status.ABORTED)
        if status is Status.ABORTED and not job.result.untrusted[0]:
            assert target[2 * at * PAGE : 2 * (at + 1) * PAGE] == b"\x01" * 2 * PAGE
    until(lambda: node.l1["leases_by_kind"]["read"] == 0, "its lease has ended")


def test_a_cancelled_store_is_not_called_aborted_where_the_pool_has_it(node: Node) -> None:
    """The copy under way ends after the cancel, and all is whole then: it is committed."""
    for turn in range(6):
        with closing(SlowPages(8)) as slow:
            pages = registered(node, one_group(slow.buffer, model=f"cancelled {turn}"))
            job = pages.store_start([(0, keys(2), IDS)], reads=False)
            slow.wait_touched()
            job.leave()
            slow.give(0, 8, b"abcd")
            assert job.wait(60)
            assert job.result is not None
            for name, status in zip(keys(2), job.result.statuses[0], strict=True):
                if status is Status.ABORTED:
                    assert node.client.lookup([name], namespace=pages.groups[0].namespace).hits == 0
    until(lambda: free_slots(node), "the slots are free")


def test_a_clear_dooms_what_is_being_copied(node: Node, slow: SlowPages) -> None:
    pages = registered(node, one_group(slow.buffer))
    job = pages.store_start([(0, keys(2), IDS)], reads=False)
    slow.wait_touched()
    node.client.clear(namespace=pages.groups[0].namespace)
    slow.give(0, 8, b"abcd")
    assert job.wait(60)
    assert job.result is not None
    assert list(job.result.statuses[0]) == [Status.CLEARED] * 2


def test_readers_never_see_half_of_a_store(node: Node) -> None:
    """Each object is of one number. Writers replace it, an operator clears, and engines read through the copier."""
    ends = threading.Event()
    faults: list[str] = []

    def write(number: int) -> None:
        source = bytearray(8 * PAGE)
        pages = registered(node, one_group(source, model="torn"))
        turn = number
        while not ends.is_set():
            source[:] = bytes([turn % 251 + 1]) * len(source)
            pages.store([(0, keys(4), array("q", range(8)))])
            node.client.clear(namespace=pages.groups[0].namespace)
            turn += 2

    def read() -> None:
        target = bytearray(8 * PAGE)
        pages = registered(node, one_group(target, model="torn"))
        hits = 0
        while hits < 200 and not faults:
            target[:] = bytes(len(target))
            result = pages.retrieve([(0, keys(4), array("q", range(8)))])
            for at, status in enumerate(result.statuses[0]):
                piece = target[2 * at * PAGE : 2 * (at + 1) * PAGE]
                if status is Status.HIT:
                    hits += 1
                    if len(set(piece)) != 1 or not piece[0]:
                        faults.append(f"{sorted(set(piece))}")
                elif any(piece) and not {2 * at, 2 * at + 1} & set(result.untrusted[0]):
                    faults.append("a miss was written")

    writers = [threading.Thread(target=write, args=(each,)) for each in range(2)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for each in [*writers, *readers]:
        each.start()
    for each in readers:
        each.join()
    ends.set()
    for each in writers:
        each.join()
    assert not faults


# --- who may ----------------------------------------------------------------------------------------------------


def test_memory_of_another_process_is_refused(node: Node) -> None:
    """A forked child that went on with its parent's connection, or a pid that has another owner: the mark is not
    there."""
    from lmcache_copier import messages as m

    pages = registered(node, one_group(bytearray(8 * PAGE)))
    link, _ = pages.registration()
    piece = m.MemoryPiece(0x1000, PAGE, -1, False)
    for at in (address_of(memoryview(bytearray(64))), 8):
        with pytest.raises(UsageError, match=f"memory of pid {os.getpid()}"):
            link.call(lambda rid, at=at: m.RegisterMemory(rid, at, b"x" * 16, [piece], []), (m.MemoryRegistered,))


TWO = """
import ctypes, sys
from array import array
from lmcache_copier import messages as m
from lmcache_copier.pages import ServerPages, access_of
from lmcache_core import Client, Layout, Namespace, PageGroup, Region, Status
letter, ours, theirs = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
both, nbytes, libc = 0x7E0000000000, 8 * 4096, ctypes.CDLL(None)
number, word = ctypes.c_int, ctypes.c_size_t
libc.mmap.restype, libc.mmap.argtypes = word, [word, word, number, number, number, word]
for at in (both, both + (ours << 30)):
    assert libc.mmap(at, nbytes, 3, 0x100022, -1, 0) == at  # private, anonymous, and nowhere else
    ctypes.memset(at, letter[0], nbytes)
client = Client.connect({name!r}, runtime_dir={run!r})
def pages_at(at):
    buffer = (ctypes.c_char * nbytes).from_address(at)
    group = PageGroup(Namespace("two", Layout("uint8", (4096,))), [Region(buffer, 0, 4096, 4096, 8)], 1)
    return ServerPages(client, client.register_pages([group]))
pages = pages_at(both)
link, _ = pages.registration()
# Past our own checks, which see that it is not there.
mark = access_of(client).mark
space = Namespace("two", Layout("uint8", (4096,)))
piece = m.MemoryPiece(both + (theirs << 30), nbytes, -1, False)
group = m.GroupOf(space.id, "uint8", [4096], space.layout.memory_format, [m.RegionOf(0, 0, 4096, 4096, 8)], 1)
registered = (m.MemoryRegistered,)
number = link.call(lambda rid: m.RegisterMemory(rid, mark.at, mark.value, [piece], [group]), registered).registration
print("registered", flush=True)
sys.stdin.readline()
key, ended = letter * 32, (m.JobFinished,)
print(*pages.store([(0, [key], [0])]).statuses[0], flush=True)
entry = m.JobEntry(0, b"f" + key[1:], array("q", [0]).tobytes())
done = link.call(lambda rid: m.StorePages(rid, number, [entry], None, False), ended)
print(tuple(Status)[done.statuses[0][0]], done.fault, flush=True)
entry = m.JobEntry(0, key, array("q", [1]).tobytes())
done = link.call(lambda rid: m.RetrievePages(rid, number, [entry], None, 0), ended)
print(tuple(Status)[done.statuses[0][0]], *array("q", done.untrusted[0]), flush=True)
own = ctypes.string_at(both, nbytes) + ctypes.string_at(both + (ours << 30), nbytes)
print("own" if own == letter * len(own) else "foreign", flush=True)
sys.stdin.readline()
"""


def test_engines_that_register_each_others_addresses_reach_their_own_memory_only(node: Node) -> None:
    """One address is memory of both. One that only the other has is nobody's for this engine."""
    script = TWO.format(name=node.client.links.target.name, run=str(node.folder / "run"))
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for words in (("a", "1", "2"), ("b", "2", "1"))
    ]

    def heard(engine: subprocess.Popen[str]) -> str:
        assert engine.stdout is not None
        return engine.stdout.readline().strip()

    assert [heard(each) for each in engines] == ["registered"] * 2
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("go\n")
        engine.stdin.flush()
    for letter, engine in zip((b"a", b"b"), engines, strict=True):
        with engine:
            assert heard(engine) == "stored"
            status, fault = heard(engine).split(maxsplit=1)
            assert status == "aborted"
            assert "register memory that is there" in fault
            assert heard(engine) == "aborted 1"
            assert heard(engine) == "own"
            into = [bytearray(4096)]
            space = Namespace("two", Layout("uint8", (4096,)))
            assert node.client.retrieve([letter * 32], into, namespace=space).hits == 1
            assert into[0] == letter * 4096


def test_a_forked_child_does_not_speak_for_its_parent(node: Node) -> None:
    pages = registered(node, one_group(bytearray(8 * PAGE)))
    link, _ = pages.registration()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not link.usable else 1)
    assert os.waitpid(pid, 0)[1] == 0
    stored(pages, keys(2))


CHILD = """
import os, sys
import lmcache_core.client.client
from lmcache_copier import ServerPages, register_pages
from lmcache_core import Client, Layout, Namespace, PageGroup, Region
from lmcache_core.errors import CacheError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
client = Client.connect({name!r}, runtime_dir={run!r}, server_uid=0)
group = PageGroup(Namespace("m", Layout("uint8", (4096,))), [Region(bytearray(b"u" * 4096), 0, 4096, 4096, 1)], 1)
try:
    pages = register_pages(client, [group], "server")
    print(pages.store([(0, [bytes(32)], [0])]).stored)
except CacheError as error:
    print(error)
client.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
@pytest.mark.parametrize("uids", [[], [65534]])
def test_another_user_registers_only_where_settings_say_so(uids: list[int], tmp_path_factory: Any) -> None:
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from .copier_nodes import start_node

    with TemporaryDirectory(dir="/tmp") as folder, ExitStack() as stack:
        Path(folder).chmod(0o711)
        node = start_node(
            stack, Path(folder), l1={"access": "group", "gids": [65534]}, copier={"uids": uids, "gids": [65534]}
        )
        script = CHILD.format(name=node.client.links.target.name, run=str(node.folder / "run"))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ("name its uid in copier.uids" in done.stdout) if not uids else (done.stdout.strip() == "1"), done


def test_a_server_without_a_copier_says_what_it_needs(start: Callable[..., Node], tmp_path: Path) -> None:
    from lmcache_testing.embedded import embedded_server

    with embedded_server(tmp_path / "bare") as server:
        client = Client.connect(server.parts.settings.name, runtime_dir=tmp_path / "bare" / "run")
        with client:
            with pytest.raises(DisconnectedError, match=r"a table \[copier\]"):
                register_pages(client, [group_of(bytearray(1 << 20), 64)], "server")
            said: list[str] = []
            pages = register_pages(client, [group_of(bytearray(1 << 20), 64)], "auto", say=said.append)
            assert not isinstance(pages, ServerPages)
