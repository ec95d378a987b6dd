"""Nobody takes all of what everybody takes from one table, and who is alone has nearly all of it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.client.results import Status
from lmcache_core.clock import Clock
from lmcache_core.errors import LimitError
from lmcache_core.kernel.answers import Grant, Reason
from lmcache_core.limits import (
    LAYOUTS_MAX,
    LOOKUPS_WAITING_MAX,
    NAMESPACES_MAX,
    NAMESPACES_PER_SESSION_KEPT,
    NAMESPACES_PER_SESSION_MAX,
    ROWS_RETURNING_MAX,
    SHARE_FEW,
    SHARED_FRACTION_PER_HOLDER_MAX,
    STORES_WAITING_MAX,
    WORKERS_MAX,
)
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.pool.layout import Layout
from lmcache_core.pool.segment import Segment
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import join_keys
from lmcache_core.server.peers.session import Peer, Session
from lmcache_core.server.peers.session_states import SessionState
from lmcache_core.server.peers.shares import Share
from lmcache_core.server.pool.l1 import L1
from lmcache_core.server.pool.opening import build_kernel
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import server_settings
from lmcache_testing.waiting import WAIT_S

from .conftest import keys_of, payload

MINE = f"uid {os.geteuid()}"
ROWS_MAX = WORKERS_MAX - ROWS_RETURNING_MAX
ROWS_ALONE = int(SHARED_FRACTION_PER_HOLDER_MAX * ROWS_MAX)
LAYOUTS_ALONE = int(SHARED_FRACTION_PER_HOLDER_MAX * (LAYOUTS_MAX - 1))


class Caller(Peer):
    """A far end of some holder, which keeps what it is sent."""

    carrier = "zmq"
    uid = 4242
    pid = 0
    can_pass_fd = True

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.frames: list[bytes] = []

    def send(self, frame: bytes, fd: int = -1) -> None:
        self.frames.append(frame)

    def close(self) -> None:
        pass


V = TypeVar("V")


def on_loop(server: Server, ask: Callable[[], V]) -> V:
    """What a call gives on the loop's own thread."""
    answers: list[object] = []
    done = threading.Event()

    def run() -> None:
        try:
            answers.append(ask())
        except LimitError as error:
            answers.append(error)
        done.set()

    server.parts.loop.call(run)
    assert done.wait(WAIT_S)
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def join(server: Server, origin: str, *, wants_pool: bool = False, client_id: bytes = b"") -> Session:
    """A session of that holder. On the loop."""
    client_id = client_id or os.urandom(16)
    return server.parts.sessions.open(
        Caller(origin), client_id, "test", 0, server.parts.clock.now, wants_pool=wants_pool
    )


# --- the rule --------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 200),
    st.floats(0.5, 1.0),
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=300),
)
def test_no_holder_has_more_than_its_share_and_counts_are_exact(
    total: int, fraction: float, steps: list[tuple[str, bool]]
) -> None:
    share, has = Share(total, fraction), Counter[str]()
    for holder, takes in steps:
        if not takes:
            if has[holder]:
                share.free(holder)
                has[holder] -= 1
        elif not share.full_for(holder):
            share.take(holder)
            has[holder] += 1
            others = has.total() - has[holder]
            assert has[holder] <= max(1, total // SHARE_FEW, fraction * (total - others) + 1e-9)
        assert share.taken == has.total() <= total
        assert {name: share.of(name) for name in "abcd"} == {name: has[name] for name in "abcd"}


def test_who_is_alone_has_nearly_all_and_who_comes_later_finds_room() -> None:
    share = Share(1024, 0.875)
    while not share.full_for("first"):
        share.take("first")
    assert share.of("first") == 896
    while not share.full_for("second"):
        share.take("second")
    assert share.of("second") == 112
    for name in ("third", "fourth", "fifth"):
        assert not share.full_for(name)
        share.take(name)
    assert share.full_for("first"), "who has most is refused first"
    share.free("first", 300)
    assert not share.full_for("second")
    assert not share.full_for("third")


def test_the_last_places_go_to_who_has_few_and_then_there_is_no_more() -> None:
    share = Share(SHARE_FEW * 2, 0.875)
    for number in range(SHARE_FEW):
        share.take(f"holder {number}")
    share.take("first", SHARE_FEW - 2)
    assert share.full_for("first")
    for _ in range(2):
        assert not share.full_for("another")
        share.take("another")
    assert share.full_for("somebody else")


def test_in_a_small_table_the_first_place_is_anybodys_and_the_second_a_matter_of_its_share() -> None:
    share = Share(2, 0.5)
    share.take("first")
    assert share.full_for("first")
    assert not share.full_for("second")
    share.take("second")
    assert share.full_for("third")


def test_who_has_exactly_its_share_after_one_more_is_given_that() -> None:
    share = Share(8, 0.75)  # at most three times what is free then
    share.take("first", 5)
    assert not share.full_for("first"), "six, and two are free"
    share.take("first")
    assert share.full_for("first")
    assert not share.full_for("first", beyond=1)
    share.take("first")
    assert share.full_for("first", beyond=1)


# --- each table ------------------------------------------------------------------------------------------------


def test_one_user_has_most_worker_rows_and_leaves_some_to_others(server: Server, namespace: Namespace) -> None:
    keys = keys_of("a")
    with server.connect() as mine:
        mine.store(keys, [payload(namespace, 1)], namespace=namespace)

        def crowd() -> list[Session]:
            sessions = [join(server, "key A", wants_pool=True) for _ in range(ROWS_ALONE - 1)]  # and one is mine
            for session in sessions:
                server.parts.kernel.lookup(session.id, namespace.id, keys, server.parts.clock.now, hold=True)
            return sessions

        crowded = on_loop(server, crowd)
        assert {session.state for session in crowded} == {SessionState.SEATED}
        with pytest.raises(LimitError, match=f"{ROWS_ALONE} of {ROWS_MAX} worker rows.* {ROWS_ALONE - 1} of them"):
            on_loop(server, lambda: join(server, "key A", wants_pool=True))
        with server.connect() as another:  # of mine
            assert another.store(keys_of("b"), [payload(namespace, 2)], namespace=namespace).stored == 1
            assert another.status()["l1"]["holders"]["key A"]["rows"] == ROWS_ALONE - 1
        assert on_loop(server, lambda: join(server, "key B", wants_pool=True)).state is SessionState.SEATED
        assert on_loop(server, lambda: join(server, "key A")).state is SessionState.OPEN, "it may look up"
        on_loop(server, lambda: [server.parts.sessions.goodbye(each, server.parts.clock.now) for each in crowded[:8]])
        assert on_loop(server, lambda: join(server, "key A", wants_pool=True)).state is SessionState.SEATED


def test_at_its_share_of_rows_a_user_loses_one_that_was_never_used(server: Server) -> None:
    crowded = on_loop(server, lambda: [join(server, "key A", wants_pool=True) for _ in range(ROWS_ALONE)])
    one_more = on_loop(server, lambda: join(server, "key A", wants_pool=True))
    assert one_more.state is SessionState.SEATED
    assert crowded[0].state is SessionState.ENDED


def test_who_says_to_come_back_again_and_again_has_few_rows_more(server: Server, namespace: Namespace) -> None:
    keys = keys_of("a")
    with server.connect() as mine:
        mine.store(keys, [payload(namespace, 1)], namespace=namespace)

        def crowd() -> None:
            for number in range(WORKERS_MAX):
                session = join(server, "key A", wants_pool=True, client_id=b"%016d" % (number % 4))
                server.parts.kernel.lookup(session.id, namespace.id, keys, server.parts.clock.now, hold=True)

        on_loop(server, crowd)  # who comes back takes its promises along: what it had holds nothing
        assert on_loop(server, lambda: server.parts.shares.rows.of("key A")) <= ROWS_ALONE + ROWS_RETURNING_MAX
        assert on_loop(server, lambda: join(server, "key B", wants_pool=True)).state is SessionState.SEATED


def test_where_all_rows_are_taken_who_comes_back_gets_one(server: Server, namespace: Namespace) -> None:
    keys = keys_of("a")
    with server.connect() as mine:
        mine.store(keys, [payload(namespace, 1)], namespace=namespace)

        def crowd() -> None:
            for number in range(ROWS_MAX - 1):
                session = join(server, f"key {number}", wants_pool=True, client_id=b"%016d" % number)
                server.parts.kernel.lookup(session.id, namespace.id, keys, server.parts.clock.now, hold=True)

        on_loop(server, crowd)
        with pytest.raises(LimitError, match=f"{ROWS_MAX} of {ROWS_MAX} worker rows"):
            on_loop(server, lambda: join(server, "another", wants_pool=True))
        for number in range(ROWS_RETURNING_MAX):
            session = on_loop(
                server, lambda at=number: join(server, f"key {at}", wants_pool=True, client_id=b"%016d" % at)
            )
            assert session.state is SessionState.SEATED


def test_one_user_has_most_layouts_and_leaves_some_to_others(server: Server) -> None:
    def register(session: Session, number: int) -> int:
        return server.parts.namespaces.register(session, number, Layout("uint8", (number,)))

    def crowd() -> Session:
        session = join(server, "key A")
        for number in range(1, LAYOUTS_ALONE + 1):
            register(session, number)
        return session

    first = on_loop(server, crowd)
    second, stranger = on_loop(server, lambda: (join(server, "key A"), join(server, "key B")))
    with pytest.raises(LimitError, match=f"{LAYOUTS_ALONE} of these belong to key A"):
        on_loop(server, lambda: register(second, 5000))
    on_loop(server, lambda: register(second, 7))  # one that is there costs nothing
    on_loop(server, lambda: register(stranger, 6000))
    assert len(first.namespaces) == LAYOUTS_ALONE, "nobody else loses any"
    assert server.parts.shares.layouts.of("key A") == LAYOUTS_ALONE
    on_loop(server, lambda: server.parts.sessions.goodbye(first, server.parts.clock.now))
    on_loop(server, lambda: register(second, 5000))
    assert server.parts.shares.layouts.of("key A") == 2  # 7, which the second uses, and its new one


def test_adopted_layouts_are_whose_who_registers_them(tmp_path: Path) -> None:
    layouts = [Layout("uint8", (number,)) for number in range(1, 4)]
    adopted = {at: (layout.fingerprint, layout.nbytes) for at, layout in enumerate(layouts, 1)}
    share = Share(LAYOUTS_MAX - 1)
    with Segment.create("shares", 4 << 20, "memfd", runtime_dir=tmp_path) as segment:
        kernel = build_kernel(server_settings(tmp_path), load_plugins(), segment)
        l1 = L1(kernel, segment, Clock(), lambda effect: None, share, former_layouts=adopted)
        assert (share.taken, share.of("")) == (3, 3)
        layout_id = l1.layout_id(layouts[1], frozenset, "key A")
        l1.add_layout(layout_id, layouts[1], "key A")
        if l1.index is not None:
            l1.index.close()
    assert layout_id == 2
    assert (share.taken, share.of(""), share.of("key A")) == (3, 2, 1)


def test_a_user_with_very_many_namespaces_forgets_its_own_and_nobody_elses(server: Server) -> None:
    layout = Layout("uint8", (64,))

    def register(session: Session, numbers: range) -> None:
        for number in numbers:
            server.parts.namespaces.register(session, number, layout)

    mine, stranger = on_loop(server, lambda: (join(server, "key A"), join(server, "key B")))
    on_loop(server, lambda: register(stranger, range(100)))
    most = int(SHARED_FRACTION_PER_HOLDER_MAX * (NAMESPACES_MAX - 100))
    # As many as some hundred other sessions of it would have.
    on_loop(server, lambda: server.parts.shares.namespaces.take("key A", most - 200))
    on_loop(server, lambda: register(mine, range(1000, 1500)))
    assert len(mine.namespaces) == 200
    assert 1499 in mine.namespaces
    late = on_loop(server, lambda: join(server, "key A"))
    on_loop(server, lambda: register(late, range(1000, 1500)))
    assert len(late.namespaces) == NAMESPACES_PER_SESSION_KEPT, "it can go on working"
    on_loop(server, lambda: register(stranger, range(100, 300)))
    assert len(stranger.namespaces) == 300
    on_loop(server, lambda: [server.parts.sessions.goodbye(each, server.parts.clock.now) for each in (mine, late)])
    assert server.parts.shares.namespaces.of("key A") == most - 200
    assert most > NAMESPACES_PER_SESSION_MAX * 100, "a node of a hundred busy workers is nowhere near"


def test_lookups_of_one_user_leave_room_for_those_of_others(
    start: Callable[..., Server], tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = pytest.importorskip("lmcache_fs.adapter").FsAdapter
    over, exists = threading.Event(), adapter.exists

    def silent(self: Session, keys: Sequence[bytes], deadline: float) -> object:
        over.wait(WAIT_S)
        return exists(self, keys, deadline)

    monkeypatch.setattr(adapter, "exists", silent)
    server = start(l2={"disk": {"type": "fs", "path": str(tmp_path / "disk")}})
    share = server.parts.shares.lookups

    def ask(origin: str, sessions: int, each: int) -> list[m.LookupReply | None]:
        answers = []
        for _ in range(sessions):
            session = join(server, origin)
            server.parts.namespaces.register(session, namespace.id, namespace.layout)
            for rid in range(each):
                request = m.LookupRequest(rid, namespace.id, join_keys(keys_of(rid)), m.LookupOptions(wait_s=WAIT_S))
                answers.append(server.parts.lookups.lookup(session, request, keys_of(rid)))
        return answers

    try:
        most = int(SHARED_FRACTION_PER_HOLDER_MAX * LOOKUPS_WAITING_MAX)
        answers = on_loop(server, lambda: ask("key A", 5, 200))
        waiting, refused = answers[:most], answers[most:]
        assert waiting == [None] * most
        assert all(each is not None and each.reasons == bytes([Reason.LATE]) for each in refused)
        assert share.of("key A") == most
        assert on_loop(server, lambda: ask("key B", 1, 10)) == [None] * 10
    finally:
        over.set()
    on_loop(
        server, lambda: [server.parts.sessions.goodbye(each, server.parts.clock.now) for each in server.parts.sessions]
    )
    assert on_loop(server, lambda: (share.taken, share.of("key A"))) == (0, 0)


def test_a_store_of_a_user_that_has_its_share_of_those_that_wait_is_full_at_once(server: Server) -> None:
    small, large = Namespace("small", Layout("uint8", (4096,))), Namespace("large", Layout("uint8", (8 << 20,)))
    keys = [number.to_bytes(32, "big") for number in range(server.parts.segment.info.data_bytes // 4096)]
    with server.connect() as client:
        assert client.store(keys, [bytes(4096)] * len(keys), namespace=small).stored == len(keys)
        share = server.parts.shares.stores_preparing
        on_loop(server, lambda: share.take(MINE, STORES_WAITING_MAX))
        assert client.store([b"x" * 32], [bytes(8 << 20)], namespace=large).statuses == [Status.FULL]
        on_loop(server, lambda: share.free(MINE, STORES_WAITING_MAX))
        assert client.store([b"x" * 32], [bytes(8 << 20)], namespace=large).statuses == [Status.STORED]
        assert on_loop(server, lambda: share.taken) == 0


def test_the_part_of_one_user_is_a_setting(start: Callable[..., Server]) -> None:
    server = start(holding={"shared_fraction_per_holder_max": 0.5})
    session = on_loop(server, lambda: join(server, "key A"))
    sizes = range(1, LAYOUTS_MAX)
    with pytest.raises(LimitError):  # of those that hold objects: others are forgotten
        on_loop(server, lambda: _fill(server, session, sizes))
    assert server.parts.shares.layouts.of("key A") == (LAYOUTS_MAX - 1) // 2


def _fill(server: Server, session: Session, sizes: range) -> None:
    """One object of each size. On the loop."""
    row_of_nobody = 0
    server.parts.kernel.attach_session(session.id, row_of_nobody)
    for nbytes in sizes:
        layout_id = server.parts.namespaces.register(session, nbytes, Layout("uint8", (nbytes,)))
        grants = server.parts.kernel.prepare_store(session.id, nbytes, layout_id, [b"k" * 32], server.parts.clock.now)
        assert list(grants.statuses) == [Grant.GRANTED]
        server.parts.kernel.commit_store(session.id, grants.lease_id, server.parts.clock.now, [0])
