"""A handler that raises leaves nothing behind: an exception at every line of every handler, and of the kernel below it.

After each of them the request is answered, the tables agree with each other and with what is there, a bystander is
served, and the same request succeeds when it is repeated. The quick run takes every eleventh line, the slow one all.
"""

from __future__ import annotations

import logging
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest

import lmcache_core
from lmcache_core.kernel.answers import Grant
from lmcache_core.kernel.states import State
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode, pack_positions, pack_u64
from lmcache_testing.embedded import Json
from lmcache_testing.waiting import until

from .desk import NAMESPACE, Desk, Mouth

# What takes back; what comes after the answer; what asks third-party code, whose errors end there; and a plain record.
UNSEEN = ("undo", "recount", "request_watch", "guard", "eviction", "tenants", "sessions")
SOURCES = Path(lmcache_core.__file__).parent
ROOMS = tuple(
    str(path)
    for room in ("server", "kernel")
    for path in sorted((SOURCES / room).rglob("*.py"))
    if path.parent.name != "process" and path.stem not in UNSEEN
)
# What a step of the undo is added with, in the same breath; the last steps of calls; the undo; and what ends the frame.
WHOLE = {
    "_take_place", "_leave_place", "_claim_row", "_unclaim_row", "_seat", "_watch", "_failed", "on_frame", "_withdraw",
    "_leave", "_remove", "apply", "_take_all", "_move", "_save", "_build", "__del__",
}  # fmt: skip
KEYS = [bytes([number]) * 32 for number in range(1, 9)]
OLD, NEW = b"".join(KEYS[:4]), b"".join(KEYS[4:])


class InjectedError(Exception):
    """No error of ours."""


class Injector:
    """Raises at the n-th line of the rooms."""

    def __init__(self, at: int, rooms: tuple[str, ...] = ROOMS) -> None:
        self.where = ""
        self._rooms = rooms
        self._left = at

    def __enter__(self) -> Injector:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(self._rooms) or code.co_name in WHOLE:
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "line" and not self.where:
            self._left -= 1
            if self._left < 0 and not _undoing(frame):
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise InjectedError(self.where)
        return self._line


def _undoing(frame: FrameType | None) -> bool:
    """Whether this is below a whole step, or in the clean-up after another error."""
    while frame is not None:
        if frame.f_code.co_name in WHOLE and frame.f_code.co_name != "on_frame":
            return True
        frame = frame.f_back
    return False


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A traceback for each line of each handler would be megabytes."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A desk with a tier."""
    pytest.importorskip("lmcache_mock")
    with ExitStack() as stack:
        made = Desk(tmp_path_factory.mktemp("tiered"), stack, l2={"m": {"type": "mock"}})
        made.step_s = 0.0  # what is written to files has deadlines in real time
        yield made


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(tmp_path_factory.mktemp("desk"), stack)


def books(desk: Desk) -> Json:
    """All that a request may reserve. Each figure is counted anew from what is there, and compared with what the kernel
    believes."""
    server, kernel = desk.server, desk.server.parts.kernel
    while kernel.working or kernel.clearing or server.parts.clears.waiting:
        server._tick()
    residents, book, usage = kernel.residents, kernel.leases, kernel.usage()
    standing = {id(item): item for table in residents.table.namespaces.values() for item in table}
    held: Counter[int] = Counter()
    for lease in book.by_id.values():
        entries = [item for item in lease.entries if item is not None]
        assert lease.pending == len(entries)
        assert lease.session.leases[lease.id] is lease
        assert len(lease.entries) == len(lease.answers)
        for item in entries:
            standing[id(item)] = item
            held[id(item)] += lease.account is not None
    for item in residents.shield.oldest(len(residents.shield)):
        held[id(item)] += 1
    for item in kernel._pins._until:
        held[id(item)] += 1
    assert {each: item.holds for each, item in standing.items() if item.holds} == +held
    states = Counter(item.state for item in standing.values())
    assert [states[state] for state in State if state] == residents.objects_by_state[1:]
    assert sum(item.nbytes for item in standing.values()) == kernel.allocator.used_bytes
    slots = {offset for slab in set(kernel.allocator.owners) if slab for offset in slab.free}
    assert slots.isdisjoint(item.offset for item in standing.values())
    assert sum(states.values()) == sum(each.slots_used for each in kernel.allocator.classes.values())
    waiting = server.parts.lookups.under_way + len(server.parts.lookups.timed)
    return {
        "states": {str(state): number for state, number in states.items() if number},
        "leases": usage.leases_by_kind,
        "pinned": usage.pinned_bytes,
        "charged": dict(residents.charged),
        "held": {name: (each.promised_bytes, each.read_bytes) for name, each in usage.holders.items()},
        "sessions": sorted(each.id for each in server.parts.sessions),
        "kernel's sessions": usage.sessions,
        "waiting": waiting
        + len(server.parts.stored_waits)
        + server.parts.stores.under_way
        + len(server.parts.tier_waits),
        "layouts": sorted(server.parts.l1.layouts),
        "rows": server.parts.sessions._rows.taken,
        "namespaces": dict(server.parts.namespaces.in_use),
    }


class Case:
    """A peer with four objects stored, and whatever the request under test needs."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.peer = desk.peer(attached=True)
        self.lease = self.promise = self.read = self.job = 0
        self.say(m.Clear(4, None))
        granted = self.say(m.PrepareStore(5, NAMESPACE, OLD))
        assert granted.statuses == bytes([Grant.GRANTED] * 4)
        self.say(m.CommitStore(6, granted.lease, 0, 4))

    def say(self, request: m.Message) -> m.Message | None:
        """Its answer, which may follow."""
        self.desk.server.parts.clock.now += self.desk.step_s
        self.desk.turn()
        before = len(self.peer.replies)
        self.desk.server.dispatch.on_frame(self.peer, memoryview(encode(request)))
        return self.answer_to(request, before)

    def answer_to(self, request: m.Message, before: int) -> m.Message:
        answers: list[m.Reply] = []

        def has_come() -> bool:
            self.desk.turn()
            answers[:] = [each for each in self.peer.replies[before:] if each.rid == request.rid]
            return bool(answers) or self.peer.closed

        until(has_come, "the answer")
        assert len(answers) == 1, (request, answers)
        return answers[0]

    def stored(self) -> None:
        self.say(m.WaitStored(12, NAMESPACE, OLD, 30.0))

    def on_the_tier(self) -> None:
        self.stored()
        self.say(m.Clear(13, NAMESPACE))

    def writing(self) -> None:
        self.lease = self.say(m.PrepareStore(7, NAMESPACE, NEW)).lease

    def reading(self) -> None:
        self.read = self.say(m.PrepareRetrieve(8, NAMESPACE, OLD)).lease

    def promised(self) -> None:
        self.promise = self.say(m.LookupRequest(9, NAMESPACE, OLD, m.LookupOptions(hold=True))).promise

    def asked(self) -> None:
        """A lookup that the tier works on."""
        self.on_the_tier()
        self.job = self.say(m.LookupRequest(14, NAMESPACE, OLD, m.LookupOptions(prefix=False))).job

    def limited(self) -> None:
        self.say(m.SetQuota(15, "t", [8], {"l1": {"limit_bytes": 4096}}))

    def pinned(self) -> None:
        self.say(m.Pin(10, NAMESPACE, OLD, 60.0))

    def seen(self) -> bytes:
        found = self.say(m.LookupRequest(9, NAMESPACE, OLD, m.LookupOptions(prefix=False, identify=True)))
        return bytes(found.incarnations)

    def end(self) -> None:
        if self.peer.session is not None:
            self.say(m.EndSession(11, goodbye=True))
        if self.peer.life_lock is not None:
            self.peer.life_lock.close()
        for _ in range(20):
            self.desk.turn()


def nothing(case: Case) -> None:
    pass


Asks = Callable[[Case], m.Message]
# name → (what comes before, the request, whether it only reserves: then nothing at all is left of a failed one)
REQUESTS: dict[str, tuple[Callable[[Case], None], Asks, bool]] = {
    "prepare_store": (nothing, lambda c: m.PrepareStore(50, NAMESPACE, NEW), True),
    "prepare_store_of_some": (nothing, lambda c: m.PrepareStore(50, NAMESPACE, OLD + NEW), True),
    "prepare_store_of_a_page": (Case.writing, lambda c: m.PrepareStore(50, NAMESPACE, bytes(32), c.lease), True),
    "commit_store": (Case.writing, lambda c: m.CommitStore(50, c.lease, 0, 4, b"", pack_u64_of(4)), False),
    "commit_store_of_some": (
        Case.writing,
        lambda c: m.CommitStore(50, c.lease, positions=pack_positions([2, 0]), checksums=pack_u64_of(2)),
        False,
    ),
    "abort_store": (Case.writing, lambda c: m.AbortStore(50, c.lease, 0, 4), False),
    "prepare_retrieve": (nothing, lambda c: m.PrepareRetrieve(50, NAMESPACE, OLD + NEW, verify=True), True),
    "prepare_retrieve_of_a_page": (Case.reading, lambda c: m.PrepareRetrieve(50, NAMESPACE, OLD, c.read), True),
    "prepare_retrieve_of_a_promise": (
        Case.promised,
        lambda c: m.PrepareRetrieve(50, NAMESPACE, OLD, 0, c.promise, identify=True),
        False,
    ),
    "finish_read": (Case.reading, lambda c: m.FinishRead(50, c.read, 0, 4), False),
    "report_damaged": (Case.reading, lambda c: m.ReportDamaged(50, c.read, 0, 2), False),
    "renew_lease": (Case.reading, lambda c: m.RenewLease(50, c.read), True),
    "lease_status": (Case.reading, lambda c: m.LeaseStatusOf(50, c.read), True),
    "lookup": (nothing, lambda c: m.LookupRequest(50, NAMESPACE, OLD + NEW), True),
    "lookup_with_hold_and_pin": (
        nothing,
        lambda c: m.LookupRequest(50, NAMESPACE, OLD, m.LookupOptions(hold=True, pin_s=9.0, identify=True)),
        True,
    ),
    "free_lookup_locks": (Case.promised, lambda c: m.FreeLookupLocks(50, [c.promise]), False),
    "redeem_promise": (Case.promised, lambda c: m.RedeemPromise(50, c.promise, NAMESPACE, OLD), False),
    "pin": (nothing, lambda c: m.Pin(50, NAMESPACE, OLD + NEW, 60.0), True),
    "unpin": (Case.pinned, lambda c: m.Unpin(50, NAMESPACE, OLD), False),
    "drop": (Case.pinned, lambda c: m.Drop(50, NAMESPACE, OLD, c.seen()), False),
    "clear": (Case.writing, lambda c: m.Clear(50, NAMESPACE), False),
    "explain": (nothing, lambda c: m.Explain(50, NAMESPACE, OLD), True),
    "wait_stored": (nothing, lambda c: m.WaitStored(50, NAMESPACE, OLD, 1.0), True),
    "register_layout": (nothing, lambda c: registering(), True),
    "end_session_of_all": (Case.writing, lambda c: m.EndSession(50), False),
    "report_blocks": (nothing, lambda c: m.ReportBlocks(50, NAMESPACE, OLD, [b"h"] * 4, None, 16), True),
    "status": (nothing, lambda c: m.StatusRequest(50), True),
    "noop": (nothing, lambda c: m.Noop(50), True),
}


TIERED: dict[str, tuple[Callable[[Case], None], Asks, bool]] = {
    "lookup_that_waits": (
        Case.on_the_tier,
        lambda c: m.LookupRequest(50, NAMESPACE, OLD + NEW, m.LookupOptions(hold=True, prefix=False, wait_s=30.0)),
        False,
    ),
    "traced_lookup": (Case.on_the_tier, lambda c: m.TracedLookup(50, NAMESPACE, OLD, traceparent="none"), False),
    "query_prefetch_status": (Case.asked, lambda c: m.QueryPrefetchStatus(50, c.job), False),
    "query_lookup_hits": (Case.asked, lambda c: m.QueryLookupHits(50, c.job), False),
    "cancel": (Case.asked, lambda c: m.Cancel(50, 14), False),
    "explain": (Case.on_the_tier, lambda c: m.Explain(50, NAMESPACE, OLD + NEW), True),
    "wait_stored": (nothing, lambda c: m.WaitStored(50, NAMESPACE, OLD, 30.0), True),
    "traced_store": (nothing, lambda c: m.TracedPrepareStore(50, NAMESPACE, NEW, traceparent="none"), True),
    "commit_store": (Case.writing, lambda c: m.CommitStore(50, c.lease, 0, 4), False),
    "clear": (Case.stored, lambda c: m.Clear(50, NAMESPACE, tiers=True), False),
    "drop": (Case.stored, lambda c: m.Drop(50, NAMESPACE, OLD, c.seen(), tiers=True), False),
    "tiers": (nothing, lambda c: m.Tiers(50), True),
    "change_tier": (nothing, lambda c: m.ChangeTier(50, "reconfigure", "m", {"deadline_s": 7.0}), True),
    "drain_tier": (nothing, lambda c: m.ChangeTier(50, "drain", "m"), True),
    "quotas": (nothing, lambda c: m.QuotasRequest(50), True),
    "set_quota": (nothing, lambda c: m.SetQuota(50, "t", [8], {"l1": {"limit_bytes": 4096}}), True),
    "remove_quota": (Case.limited, lambda c: m.RemoveQuota(50, "t"), True),
    "chunk_size": (nothing, lambda c: m.GetChunkSize(50), True),
    "config": (nothing, lambda c: m.ConfigRequest(50), True),
    "ping": (nothing, lambda c: m.Ping(50, b"x"), True),
}
# Hello and goodbye have tests of their own; the others need a companion or an operation.
ELSEWHERE = {m.Hello, m.Attach, m.AttachUnlocked, m.Operate, m.CallOperation}


def test_every_request_is_among_these(desk: Desk, tiered: Desk) -> None:
    asked = set()
    for each, requests in ((desk, REQUESTS), (tiered, TIERED)):
        for first, asks, _ in requests.values():
            case = Case(each)
            first(case)
            asked.add(type(asks(case)))
            case.end()
    assert asked | ELSEWHERE == set(get_args(m.Request))


def pack_u64_of(count: int) -> bytes:
    return pack_u64(array("Q", range(1, count + 1)))


def registering() -> m.RegisterLayout:
    layout = Layout("int8", (5000, 3))
    return m.RegisterLayout(50, 4711, layout.dtype, list(layout.shape), "", layout.fingerprint)


def attempt(desk: Desk, peer: Mouth, request: m.Message, at: int) -> tuple[str, m.Reply | None]:
    """Send it with an exception at the n-th line. Returns where that was, or "" if there are fewer lines, and the
    answer, unless it follows."""
    before = len(peer.replies)
    with Injector(at, ROOMS) as injector:
        desk.server.dispatch.on_frame(peer, memoryview(encode(request)))
    assert len(peer.replies) <= before + 1, f"one request, one answer: {injector.where}"
    return injector.where, peer.replies[-1] if len(peer.replies) > before else None


STRIDES = [pytest.param(11, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_fails_at_any_line_leaves_nothing_and_can_be_repeated(
    desk: Desk, name: str, stride: int
) -> None:
    check(desk, stride, *REQUESTS[name])


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("name", TIERED)
def test_so_does_one_where_there_is_a_tier(tiered: Desk, name: str, stride: int) -> None:
    check(tiered, stride, *TIERED[name])


def check(desk: Desk, stride: int, first: Callable[[Case], None], asks: Asks, reserves: bool) -> None:
    bystander = desk.peer(attached=True)
    faults = desk.server.dispatch.counters
    at, where = 0, "begins"
    while where:
        case = Case(desk)
        try:
            first(case)
            request = asks(case)
            before, came = books(desk), len(case.peer.replies)
            where, reply = attempt(desk, case.peer, request, at)
            if where:
                assert isinstance(reply, m.Error), where
                assert reply.code == "INTERNAL", (where, reply)
                assert not faults["undo_faults"], where
                after = books(desk)
                if reserves:
                    assert after == before, where
                assert isinstance(desk.say(bystander, m.Noop(3)), m.Done)
                reply = case.say(request)
            elif reply is None:
                reply = case.answer_to(request, came)
            assert not isinstance(reply, m.Error), (where, reply)
        except AssertionError as error:
            raise AssertionError(f"an exception at {where}: {error}") from error
        finally:
            case.end()

        def nothing_is_left(where: str = where) -> bool:
            desk.turn()
            left = books(desk)
            assert not left["states"].get(str(State.WRITING)), where
            return (left["leases"], left["charged"]) == ({"promise": 0, "read": 0, "write": 0}, {})

        until(nothing_is_left, f"nothing is left of {where}")  # tiers read what they store
        desk.say(bystander, m.Clear(4, None))
        desk.server.parts.kernel.unpin(bystander.session.id, NAMESPACE, KEYS, desk.server.parts.clock.now)  # type: ignore[union-attr]
        at += stride
    assert at > 1
    desk.say(bystander, m.EndSession(9, goodbye=True))


def test_a_quota_that_cannot_be_applied_is_answered_and_so_is_the_next(
    tiered: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tiered)
    kernel = tiered.server.parts.kernel
    set_tenant, faults = kernel.set_tenant, []

    def fails_once(tenant: str, *how: Any) -> None:
        if not faults:
            faults.append(tenant)
            raise InjectedError(tenant)
        set_tenant(tenant, *how)

    monkeypatch.setattr(kernel, "set_tenant", fails_once)
    requests = [m.SetQuota(60 + at, f"t{at}", [at], {"l1": {"limit_bytes": 4096}}) for at in range(3)]
    before = len(case.peer.replies)
    for request in requests:
        tiered.server.dispatch.on_frame(case.peer, memoryview(encode(request)))
    replies = [case.answer_to(request, before) for request in requests]
    assert [getattr(each, "code", "") for each in replies] == ["INTERNAL", "", ""], replies
    case.end()


def test_a_hello_that_fails_at_any_line_can_be_repeated(desk: Desk) -> None:
    at, where = 0, "begins"
    while where:
        peer = Mouth()
        before = books(desk)
        hello = m.Hello(1, m.PROTOCOL_VERSION_MIN, m.PROTOCOL_VERSION_MAX, os.urandom(16), "h", 0, ["maps_pool"])
        where, reply = attempt(desk, peer, hello, at)
        if where:
            assert isinstance(reply, m.Error), where
            assert peer.session is None, where
            assert books(desk) == before, where
            reply = desk.say(peer, hello)  # type: ignore[assignment]
        assert isinstance(reply, m.Welcome), where
        desk.say(peer, m.EndSession(9, goodbye=True))
        at += 1


def test_a_goodbye_that_fails_at_any_line_ends_the_session_all_the_same_or_when_repeated(desk: Desk) -> None:
    none = books(desk)
    at, where = 0, "begins"
    while where:
        case = Case(desk)
        case.writing()
        case.reading()
        with Injector(at, ROOMS) as injector:
            desk.server.dispatch.on_frame(case.peer, memoryview(encode(m.EndSession(50, goodbye=True))))
        where = injector.where
        case.end()
        left = books(desk)
        for what in ("leases", "sessions", "kernel's sessions", "charged", "rows", "namespaces"):
            assert left[what] == none[what], (where, what)
        assert case.peer.closed
        at += 1


@pytest.mark.parametrize("stride", [pytest.param(7, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_leases_that_expire_leave_nothing_behind_if_any_line_of_it_raises(desk: Desk, stride: int) -> None:
    at, where, bystander = 0, "begins", desk.peer(attached=True)
    while where:
        case = Case(desk)
        case.writing()
        case.reading()
        case.pinned()
        kernel, now = desk.server.parts.kernel, desk.server.parts.clock.now
        with Injector(at, ROOMS) as injector:
            try:
                kernel.expire(now + 700.0)
            except InjectedError as error:
                desk.server.parts.loop.on_fault(error)
        where = injector.where
        desk.server.parts.clock.now = now + 800.0
        for _ in range(3):
            desk.turn()
        books(desk)
        case.end()
        desk.say(bystander, m.Clear(4, None))
        left = books(desk)
        assert (left["states"], left["charged"], left["pinned"]) == ({}, {}, 0), where
        at += stride
    assert at > stride
