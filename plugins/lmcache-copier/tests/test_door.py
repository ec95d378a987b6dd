"""Whoever says something senseless is dropped or refused, and nobody else notices."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_copier import check, register_pages
from lmcache_copier import messages as m
from lmcache_copier.channel import send
from lmcache_copier.limits import (
    DESCRIPTORS_MAX,
    ENTRIES_MAX,
    FILES_MAX_EACH,
    FILES_MAX_TOTAL,
    MEASURED_BYTES_MAX,
    ROWS_MAX_EACH,
    ROWS_MAX_TOTAL,
)
from lmcache_copier.link import Mark
from lmcache_copier.pages import ServerPages
from lmcache_copier.settings import CopierSettings
from lmcache_core import Status, limits
from lmcache_core.buffers import address_of
from lmcache_core.errors import LimitError, UsageError
from lmcache_testing.waiting import until

from .copier_nodes import Node, group_of, keys
from .strangers import Stranger

MARK = Mark()
MEMORY = bytearray(os.urandom(1 << 16))
START = address_of(memoryview(MEMORY))


def registration(**changes: object) -> m.RegisterMemory:
    """Eight pages of 4 KiB, two of which make an object."""
    group = m.GroupOf(7, "uint8", [8192], "", [m.RegionOf(0, 0, 4096, 4096, 8)], 2)
    made = m.RegisterMemory(1, MARK.at, MARK.value, [m.MemoryPiece(START, 8 * 4096, -1, False)], [group])
    return msgspec.structs.replace(made, **changes)


def still_serves(node: Node, pid: int) -> None:
    with Stranger(node) as good:
        assert isinstance(good.ask(registration()), m.MemoryRegistered)
    assert node.pid == pid


@given(garbage=st.binary(min_size=1, max_size=200))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_ends_its_own_connection_only(shared_node: Node, garbage: bytes) -> None:
    pid = shared_node.pid
    with Stranger(shared_node) as stranger:
        stranger.sock.sendall(struct.pack("<I", len(garbage)) + garbage)
        stranger.sock.shutdown(socket.SHUT_WR)
        while stranger.hear() is not None:
            pass
    still_serves(shared_node, pid)


def test_a_length_beyond_the_limit_and_descriptors_without_end_are_refused(shared_node: Node) -> None:
    pid = shared_node.pid
    with Stranger(shared_node) as stranger:
        stranger.sock.sendall(b"\xff\xff\xff\xff")
        assert stranger.hear() is None
    with Stranger(shared_node) as stranger, open(os.devnull, "rb") as null:
        with contextlib.suppress(BrokenPipeError):  # it has hung up by then
            for _ in range(3):
                fds = array("i", [null.fileno()] * 60)
                stranger.sock.sendmsg([b"\x01"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        assert stranger.hear() is None
    still_serves(shared_node, pid)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mark": b"\x00" * 16}, "is not that of the engine"),
        ({"mark_at": 8}, "cannot be copied"),
        ({"pieces": [m.MemoryPiece(0, 8 * 4096, -1, False)]}, "an address, page_bytes"),
        ({"pieces": []}, "by address or by descriptor"),
        ({"pieces": [m.MemoryPiece(START, 4096, -1, False)]}, "and the buffer has 4,096 bytes"),
        ({"pieces": [m.MemoryPiece(0, 8 * 4096, 0, False)]}, "did not come along"),
        ({"groups": []}, "no groups"),
        ({"groups": [m.GroupOf(7, "uint9", [8192], "", [m.RegionOf(0, 0, 4096, 4096, 8)], 2)]}, "uint9"),
        ({"groups": [m.GroupOf(7, "uint8", [8192], "", [m.RegionOf(3, 0, 4096, 4096, 8)], 2)]}, "no piece 3"),
        ({"groups": [m.GroupOf(7, "uint8", [8192], "", [m.RegionOf(0, 0, 4096, 2048, 8)], 2)]}, "overlap"),
        ({"groups": [m.GroupOf(7, "uint8", [4096], "", [m.RegionOf(0, 0, 4096, 4096, 8)], 2)]}, "object has 8,192"),
        (
            {"groups": [m.GroupOf(7, "uint8", [8192], "", [m.RegionOf(0, 0, 4096, 1 << 39, 1 << 39)], 2)]},
            "the buffer has",
        ),
        (
            {
                "pieces": [m.MemoryPiece(START, 1 << 40, -1, False)],
                "groups": [m.GroupOf(7, "uint8", [1 << 30], "", [m.RegionOf(0, 0, 1, 1, 1 << 31)], 1 << 30)],
            },
            "1,073,741,824 pages, or parts of large ones",
        ),
    ],
)
def test_a_registration_that_does_not_fit_is_refused_in_words(
    shared_node: Node, changes: dict[str, object], why: str
) -> None:
    with Stranger(shared_node) as stranger:
        reply = stranger.ask(registration(**changes))
        assert isinstance(reply, m.CopierRefused)
        assert why in reply.message


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (m.JobEntry(1, bytes(32), bytes(16)), "no group 1"),
        (m.JobEntry(0, bytes(31), bytes(16)), "32 bytes each"),
        (m.JobEntry(0, bytes(32), array("q", [0, 8]).tobytes()), "the group has pages 0 to 7"),
        (m.JobEntry(0, bytes(32), array("q", [0, -2]).tobytes()), "the group has pages 0 to 7"),
        (m.JobEntry(0, bytes(32), array("q", [3, 3]).tobytes()), "twice"),
        (m.JobEntry(0, bytes(32), array("q", [3]).tobytes()), "has 1 ids"),
        (m.JobEntry(0, bytes(32), bytes(16), bytes(7)), "promises 8"),
    ],
)
def test_pages_and_keys_that_do_not_fit_are_refused_before_anything_is_copied(
    shared_node: Node, entry: m.JobEntry, why: str
) -> None:
    before = bytes(MEMORY)
    with Stranger(shared_node) as stranger:
        assert isinstance(stranger.ask(registration()), m.MemoryRegistered)
        reply = stranger.ask(m.RetrievePages(2, 1, [entry], None, 0))
        assert isinstance(reply, m.CopierRefused)
        assert why in reply.message
        assert isinstance(stranger.ask(m.AskAlive(3)), m.CopierDone)
    assert bytes(MEMORY) == before


def test_what_is_not_registered_or_not_under_way_is_refused_or_ignored(shared_node: Node) -> None:
    with Stranger(shared_node) as stranger:
        entry = m.JobEntry(0, bytes(32), bytes(16))
        for message in (
            m.StorePages(1, 5, [entry], None, False),
            m.UnregisterMemory(1, 5),
            m.MeasurePages(1, 5, 0, b""),
        ):
            reply = stranger.ask(message)
            assert isinstance(reply, m.CopierRefused)
            assert "no memory is registered under 5" in reply.message
        send(stranger.sock, m.CancelJob(77))
        assert isinstance(stranger.ask(registration()), m.MemoryRegistered)
        assert isinstance(stranger.ask(m.UnregisterMemory(2, 1)), m.CopierDone)
        assert isinstance(stranger.ask(m.UnregisterMemory(3, 1)), m.CopierRefused)


def test_descriptors_that_are_no_memory_are_refused(shared_node: Node) -> None:
    here, there = os.pipe()
    piece = m.MemoryPiece(0, 8 * 4096, 0, False)
    short = os.memfd_create("short")
    os.truncate(short, 4096)
    try:
        for fd in (here, short):
            with Stranger(shared_node) as stranger:
                send(stranger.sock, registration(pieces=[piece], files=1), [fd])
                reply = stranger.hear()
                assert isinstance(reply, m.CopierRefused)
                assert "has no bytes 0 to 32,768" in reply.message
    finally:
        for fd in (here, there, short):
            os.close(fd)


def test_an_engine_that_ends_leaves_nothing_behind(shared_node: Node) -> None:
    until(lambda: shared_node.figures.get("engines", 0) <= 1, "others to have gone")
    descriptors = Path(f"/proc/{shared_node.pid}/fd")
    with Stranger(shared_node) as stranger:
        assert isinstance(stranger.ask(registration()), m.MemoryRegistered)
        until(lambda: shared_node.figures["engines"] >= 1, "it to be counted")
    before = len(list(descriptors.iterdir()))
    for _ in range(20):
        with Stranger(shared_node) as stranger:
            assert isinstance(stranger.ask(registration()), m.MemoryRegistered)
    until(lambda: len(list(descriptors.iterdir())) <= before + 1, "the copier closes what they had")


def test_a_killed_copier_is_there_again_at_once_and_auto_says_what_it_took(
    start: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HELPER_PAUSE_S", "HELPER_PAUSE_S_MAX"):  # of a first death nobody waits so long
        monkeypatch.setattr(limits, name, 3600.0)
    node = start()
    buffer = bytearray(os.urandom(1 << 20))
    said: list[str] = []
    group = group_of(buffer, 4096)
    pages = register_pages(node.client, [group], "auto", say=lambda line, *rest: said.append(line % rest))
    assert said
    assert ("the copier copies" in said[0]) == isinstance(pages, ServerPages)
    pages = register_pages(node.client, [group], "server")
    names = keys(4)
    assert pages.store([(0, names, list(range(8)))]).stored == 4
    node.kill(signal.SIGKILL)

    def served() -> bool:
        return list(pages.retrieve([(0, names, list(range(8)))]).statuses[0]) == [Status.HIT] * 4

    until(served, "another copier")


def test_what_engines_take_of_the_copiers_memory_is_bounded_each_and_together_and_given_back(
    shared_node: Node,
) -> None:
    large = m.GroupOf(7, "uint8", [ROWS_MAX_EACH // 2], "", [m.RegionOf(0, 0, 1, 1, 8)], ROWS_MAX_EACH // 2)
    with Stranger(shared_node) as stranger:
        for _ in range(3):  # it is free again each time
            for number in range(2):
                assert isinstance(stranger.ask(registration(rid=number, groups=[large])), m.MemoryRegistered)
            refused = stranger.ask(registration(groups=[large]))
            assert isinstance(refused, m.CopierRefused)
            assert f"this engine has {ROWS_MAX_EACH:,} already" in refused.message
            stranger.forget()
        with ExitStack() as stack:
            others = [stack.enter_context(Stranger(shared_node)) for _ in range(ROWS_MAX_TOTAL // ROWS_MAX_EACH + 1)]
            replies = [each.ask(registration(groups=[large])) for each in others for _ in range(2)]
            refusals = [each.message for each in replies if isinstance(each, m.CopierRefused)]
            assert len(refusals) == 2
            assert all("all engines have" in each for each in refusals)

    def allowed() -> bool:
        with Stranger(shared_node) as again:
            return isinstance(again.ask(registration(groups=[large])), m.MemoryRegistered)

    until(allowed, "what the others had")


def test_files_that_engines_have_mapped_are_bounded_each_and_together_and_given_back(shared_node: Node) -> None:
    until(lambda: shared_node.figures.get("engines", 0) <= 1, "others to have gone")
    descriptors = Path(f"/proc/{shared_node.pid}/fd")
    before = len(list(descriptors.iterdir()))
    memory = [os.memfd_create("engine") for _ in range(DESCRIPTORS_MAX)]
    pieces = [m.MemoryPiece(0, 4096, number, False) for number in range(DESCRIPTORS_MAX)]
    regions = [m.RegionOf(number, 0, 64, 64, 8) for number in range(DESCRIPTORS_MAX)]
    group = m.GroupOf(7, "uint8", [64 * DESCRIPTORS_MAX], "", regions, 1)
    with ExitStack() as stack:
        for fd in memory:
            stack.callback(os.close, fd)
            os.truncate(fd, 4096)

        def ask(stranger: Stranger) -> m.CopierReply | None:
            send(stranger.sock, registration(pieces=pieces, groups=[group], files=DESCRIPTORS_MAX), memory)
            return stranger.heard()

        with Stranger(shared_node) as stranger:
            for _ in range(3):  # they are free again each time
                for _ in range(FILES_MAX_EACH // DESCRIPTORS_MAX):
                    assert isinstance(ask(stranger), m.MemoryRegistered)
                refused = ask(stranger)
                assert isinstance(refused, m.CopierRefused)
                assert f"files, and this engine has {FILES_MAX_EACH} already" in refused.message
                assert len(list(descriptors.iterdir())) >= before + FILES_MAX_EACH
                stranger.forget()
        with ExitStack() as others:
            count = FILES_MAX_TOTAL // FILES_MAX_EACH + 1
            strangers = [others.enter_context(Stranger(shared_node)) for _ in range(count)]
            replies = [ask(each) for each in strangers for _ in range(FILES_MAX_EACH // DESCRIPTORS_MAX)]
            refusals = [each.message for each in replies if isinstance(each, m.CopierRefused)]
            assert len(refusals) == FILES_MAX_EACH // DESCRIPTORS_MAX
            assert all("all engines have" in each for each in refusals)
    until(lambda: len(list(descriptors.iterdir())) <= before + 1, "the copier closes what they had")


def test_descriptors_that_came_before_their_message_count_among_the_files(shared_node: Node) -> None:
    """Of a message that does not end, the copier keeps them."""
    file = os.memfd_create("engine")
    os.truncate(file, 8 * 4096)
    piece = m.MemoryPiece(0, 8 * 4096, 0, False)

    def ask(stranger: Stranger) -> m.CopierReply | None:
        send(stranger.sock, registration(pieces=[piece], files=1), [file])
        return stranger.heard()

    def refused() -> bool:
        with Stranger(shared_node) as stranger:
            reply = ask(stranger)
        return isinstance(reply, m.CopierRefused) and "files, and all engines have 1,024 already" in reply.message

    with ExitStack() as stack:
        stack.callback(os.close, file)
        with ExitStack() as others:
            for _ in range(FILES_MAX_TOTAL // DESCRIPTORS_MAX):
                stranger = others.enter_context(Stranger(shared_node))
                fds = array("i", [file] * DESCRIPTORS_MAX)
                stranger.sock.sendmsg([b"\x01"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            until(refused, "the copier to have them all")
        until(lambda: not refused(), "the copier to have closed them")
        with Stranger(shared_node) as stranger:
            assert isinstance(ask(stranger), m.MemoryRegistered)


def test_regions_and_entries_beyond_their_limits_are_refused(shared_node: Node) -> None:
    """However small they are on the wire."""
    pid, region = shared_node.pid, m.RegionOf(0, 0, 4096, 4096, 8)
    group = m.GroupOf(7, "uint8", [2 * 4096 * 8192], "", [region] * 8192, 2)
    with Stranger(shared_node) as stranger:
        reply = stranger.ask(registration(groups=[group, group]))
        assert isinstance(reply, m.CopierRefused)
        assert "16,384 regions" in reply.message
        assert isinstance(stranger.ask(registration()), m.MemoryRegistered)
        send(stranger.sock, m.StorePages(2, 1, [m.JobEntry(0, b"", b"")] * (ENTRIES_MAX + 1), None, False))
        assert stranger.hear() is None
    pages = register_pages(shared_node.client, [group_of(MEMORY, 64)], "server")
    with pytest.raises(LimitError, match="split the batch"):
        pages.store([(0, [], [])] * (ENTRIES_MAX + 1))
    assert shared_node.pid == pid


def test_a_measurement_of_more_than_is_worth_it_is_refused(shared_node: Node) -> None:
    ids = array("q", [0, 1]).tobytes() * (MEASURED_BYTES_MAX // 8192 + 1)
    with Stranger(shared_node) as stranger:
        assert isinstance(stranger.ask(registration()), m.MemoryRegistered)
        reply = stranger.ask(m.MeasurePages(2, 1, 0, ids))
        assert isinstance(reply, m.CopierRefused)
        assert "are not measured" in reply.message


# --- words ------------------------------------------------------------------------------------------------------


def test_what_keeps_the_copier_away_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = OSError(errno.EPERM, "not permitted")
    for scope, words in ((0, "run both as one user"), (1, "ptrace_scope is 1"), (2, "set kernel.yama.ptrace_scope to")):
        monkeypatch.setattr(check, "yama_scope", lambda scope=scope: scope)
        monkeypatch.setattr(check, "may_trace_all", lambda: False)
        assert words in check.why_unreachable(12, 0, denied)
        assert "a memfd" in check.why_unreachable(12, 0, denied)
    assert "hostPID" in check.why_unreachable(0, 0, denied)
    assert "memfd" not in check.why_unreachable(0, 0, denied), "it needs to see the process all the same"
    assert "seccomp" in check.why_unreachable(12, 0, OSError(errno.ENOSYS, "no"))
    (finding,) = check.check(CopierSettings())
    assert not finding.ok
    monkeypatch.setattr(check, "yama_scope", lambda: 0)
    (finding,) = check.check(CopierSettings(uids=(12345,)))
    assert not finding.ok
    (finding,) = check.check(CopierSettings())
    assert finding.ok


def test_a_transfer_that_is_not_known_is_refused(shared_node: Node) -> None:
    with pytest.raises(UsageError, match="use 'engine', 'server', 'auto'"):
        register_pages(shared_node.client, [group_of(bytearray(1 << 20), 64)], "both")  # type: ignore[arg-type]


def test_an_engine_that_reads_no_answers_for_a_while_gets_them_all(shared_node: Node) -> None:
    """More of them than its socket holds: they wait, and the copier's other work goes on."""
    pid, count = shared_node.pid, 20_000
    entry = m.JobEntry(0, b"".join(keys(count, 1 << 40)), array("q", range(count)).tobytes())
    group = m.GroupOf(7, "uint8", [1], "", [m.RegionOf(0, 0, 1, 1, count)], 1)
    with Stranger(shared_node) as stranger:
        assert isinstance(stranger.ask(registration(groups=[group])), m.MemoryRegistered)
        before = shared_node.figures["jobs"]
        for rid in range(2, 14):
            send(stranger.sock, m.RetrievePages(rid, 1, [entry], None, 0))
        until(lambda: shared_node.figures["jobs"] >= before + 12, "all jobs to have ended")
        still_serves(shared_node, pid)
        answers = [stranger.hear() for _ in range(12)]
        assert {each.rid for each in answers if isinstance(each, m.JobFinished)} == set(range(2, 14))
