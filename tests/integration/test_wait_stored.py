"""`client.wait_stored`: a call that is answered when the tiers have it, or says why they never will."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.why.stored import StoredKey
from lmcache_core.errors import DisconnectedError, LimitError, UnknownNamespaceError, UsageError
from lmcache_core.limits import EXPLAIN_KEYS_MAX, STORED_WAITS_PER_SESSION_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.waiting import until

from ..conftest import Node

pytest.importorskip("lmcache_mock")

NS = Namespace("model", Layout("uint8", (65536,)))
NBYTES = NS.layout.nbytes
NEVER_LATE = {"type": "mock", "deadline_s": 600}


def keys(*names: object) -> list[bytes]:
    return [str(name).encode().rjust(32, b"\0") for name in names]


class At:
    """A server in this process, and a client of it."""

    def __init__(self, folder: Path, stack: ExitStack, **settings: Any) -> None:
        settings = {"l1": {"size_bytes": "16MiB", "backing": "memfd"}, "drain_s": 0.2, **settings}
        where = {"runtime_dir": str(folder / "run"), "state_dir": str(folder / "state")}
        self.server = stack.enter_context(Server(make_settings(name=f"t{uuid4().hex[:10]}", **where, **settings)))
        assert self.server.parts.populator.wait(60)
        self.stack = stack
        tiering = self.server.tiering
        cold = next((each for each in tiering.tiers if each.name == "cold"), None) if tiering is not None else None
        self.adapter: Any = cold.adapter if cold is not None else None
        stack.callback(self.faults)  # nothing hangs at the end
        self.client = self.another()

    def another(self) -> Client:
        return self.stack.enter_context(self.server.connect())  # type: ignore[no-any-return]

    def store(self, wanted: Sequence[bytes], byte: int = 1) -> None:
        assert self.client.store(wanted, [bytes([byte]) * NBYTES] * len(wanted), namespace=NS).stored == len(wanted)

    def faults(self, *rules: str) -> None:
        """Of the tier `cold`, where there is one."""
        if self.adapter is not None:
            self.adapter.set_faults(*rules)

    def wait(self, wanted: Sequence[bytes], timeout_s: float = 60.0) -> list[StoredKey]:
        return self.client.wait_stored(wanted, namespace=NS, timeout_s=timeout_s)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., At]]:
    with ExitStack() as stack:
        yield lambda **settings: At(tmp_path, stack, **settings)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(call())
        except Exception as error:  # noqa: BLE001 - of a thread: told by the test
            told.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, told


# --- it is stored ---------------------------------------------------------------------------------------------------


def test_what_it_calls_stored_is_on_every_tier(make: Callable[..., At], tmp_path: Path) -> None:
    pytest.importorskip("lmcache_fs")
    (tmp_path / "disk").mkdir()
    at = make(
        l2={"disk": {"type": "fs", "path": str(tmp_path / "disk")}, "cold": NEVER_LATE}, l2_order=["disk", "cold"]
    )
    wanted = keys(*range(100))
    at.store(wanted)
    told = at.wait(wanted)
    assert [each.key for each in told] == wanted
    assert {each.tiers for each in told} == {("disk", "cold")}
    assert all(each.stored for each in told)
    at.client.clear(NS)
    assert at.client.lookup(wanted, namespace=NS, wait_s=60).hits == 100  # the media themselves


def test_any_number_of_keys_is_asked_for_by_any_client(make: Callable[..., At]) -> None:
    at = make(l2={"cold": NEVER_LATE}, l1={"size_bytes": "64MiB", "backing": "memfd"})
    wanted = keys(*range(3 * EXPLAIN_KEYS_MAX + 7))
    at.store(wanted)
    told = at.another().wait_stored(wanted, namespace=NS, timeout_s=60)
    assert [each.key for each in told if each.stored] == wanted
    assert at.wait([]) == []


def test_the_server_holds_its_answer_back_and_nobody_asks_twice(make: Callable[..., At]) -> None:
    at = make(l2={"cold": NEVER_LATE})
    at.faults("store hang")
    at.store(keys("k"))
    asked: list[float] = []
    waits = at.server.parts.stored_waits
    wait = waits.wait
    at.server.dispatch.handlers[m.WaitStored] = lambda session, request: (
        asked.append(request.wait_s) or wait(session, request)
    )
    thread, told = in_thread(lambda: at.wait(keys("k"), 20.0))
    until(lambda: at.client.status()["stored_waits"] == 1, "a call that waits")
    at.faults()
    thread.join(60)
    assert told[0][0].stored
    assert len(asked) == 1
    assert at.client.status()["stored_waits"] == 0


# --- it is not, or not yet ------------------------------------------------------------------------------------------


def test_a_tier_that_hangs_is_named_and_the_other_one_has_it(make: Callable[..., At]) -> None:
    at = make(l2={"warm": NEVER_LATE, "cold": NEVER_LATE}, l2_order=["warm", "cold"])
    at.faults("store hang")
    at.store(keys("k"))
    until(lambda: at.wait(keys("k"), 0.0)[0].tiers == ("warm",), "the tier that is well")
    (told,) = at.wait(keys("k"), 0.05)
    assert (told.stored, told.tiers, told.waiting, told.lost) == (False, ("warm",), ("cold",), ())
    assert "tier warm: has it" in told.why
    assert "tier cold: it is on its way" in told.why
    at.faults()
    assert at.wait(keys("k"))[0].stored


def test_what_a_tier_lost_is_told_with_its_reason(make: Callable[..., At]) -> None:
    at = make(l2={"warm": NEVER_LATE, "cold": {"type": "mock", "deadline_s": 600}}, l2_order=["warm", "cold"])
    at.faults("store full")
    at.store(keys("k"))
    (told,) = at.wait(keys("k"))
    assert (told.stored, told.tiers, told.waiting) == (False, ("warm",), ())
    (lost,) = told.lost
    assert (lost.tier, lost.reason) == ("cold", "no_room")
    assert "tier cold: it had no room" in told.why
    at.faults()
    at.client.drop(
        keys("k"), namespace=NS, incarnations=at.client.lookup(keys("k"), namespace=NS, identify=True).incarnations
    )
    at.store(keys("k"))
    assert at.wait(keys("k"))[0].stored


def test_what_left_the_pool_before_its_turn_is_told(make: Callable[..., At]) -> None:
    at = make(
        l2={"cold": NEVER_LATE},
        l1={"size_bytes": "4MiB", "backing": "memfd", "watermark": 1.0},
        store_in_flight_bytes_max="1MiB",  # or what hangs may fill the pool, and nothing has to leave it
    )
    at.faults("store hang")
    many = [keys(*(f"{turn}-{each}" for each in range(16))) for turn in range(40)]
    for each in many:
        at.client.store(each, [bytes(NBYTES)] * 16, namespace=NS)
    at.faults()
    told = [each for some in many for each in at.wait(some)]
    assert not any(each.waiting for each in told)
    gone = [each for each in told if not each.stored]
    assert gone
    assert {lost.reason for each in gone for lost in each.lost} == {"throttled"}
    assert all("evicted" in each.why for each in gone)


def test_a_tier_that_hangs_with_all_bytes_in_flight_keeps_none_from_another(make: Callable[..., At]) -> None:
    at = make(
        l2={"cold": {"type": "mock", "deadline_s": 0.2}, "good": NEVER_LATE},
        l2_order=["cold", "good"],
        store_in_flight_bytes_max="1MiB",
    )
    at.faults("store hang")
    for turn in range(3):
        wanted = keys(*(f"{turn}-{each}" for each in range(32)))
        at.store(wanted)
        until(lambda: all(each.tiers == ("good",) for each in at.wait(wanted, 0.01)), "the tier that is well")  # noqa: B023


def test_the_last_line_counts_what_a_call_that_hangs_had(
    make: Callable[..., At], caplog: pytest.LogCaptureFixture
) -> None:
    at = make(l2={"cold": NEVER_LATE})
    at.faults("store hang")
    at.store(keys(*range(20)))
    until(lambda: at.client.status()["tiers"]["tiers"][0]["lanes"]["cold-store"]["running"], "a call that hangs")
    caplog.set_level("INFO", logger="lmcache_core")
    at.client.close()
    at.server.stop()
    assert "closes; of its objects there are 20 that tier cold does not have" in caplog.text


def test_without_a_tier_nothing_is_waited_for(make: Callable[..., At]) -> None:
    at = make()
    (told,) = at.client.wait_stored(keys("k"), namespace=NS, timeout_s=3600)
    assert (told.stored, told.tiers, told.waiting, told.lost) == (False, (), (), ())
    assert "it was never stored through this server" in told.why
    at.store(keys("k"))
    (told,) = at.client.wait_stored(keys("k"), namespace=NS, timeout_s=3600)
    assert not told.stored
    assert told.why == "this server has no tier"


def test_what_nobody_stored_is_not_waited_for(make: Callable[..., At]) -> None:
    at = make(l2={"cold": NEVER_LATE})
    (told,) = at.client.wait_stored(keys("never"), namespace=NS, timeout_s=3600)
    assert not told.stored
    assert "it was never stored through this server" in told.why
    assert "tier cold: does not have it" in told.why


def test_a_tier_that_is_full_by_its_turn_ends_the_wait(make: Callable[..., At]) -> None:
    """The key waits behind others when the medium has no room any more."""
    at = make(l2={"cold": NEVER_LATE}, store_in_flight_bytes_max="1MiB")
    at.faults("store hang")
    at.store(keys(*range(200)))
    thread, told = in_thread(lambda: at.wait(keys(199), 3600))
    until(lambda: at.client.status()["stored_waits"] == 1, "a call that waits")
    at.faults("store full")
    thread.join(60)
    (each,) = told[0]
    assert (each.stored, each.waiting) == (False, ())
    assert [lost.reason for lost in each.lost] == ["no_room"]
    assert "tier cold: it had no room" in each.why


def test_a_tier_that_evicts_meanwhile_has_the_last_ones_and_says_what_went(make: Callable[..., At]) -> None:
    """It holds some of what is waited for: the first ones have gone again when the last one is there."""
    at = make(l2={"cold": {**NEVER_LATE, "capacity_bytes": "2MiB"}}, store_in_flight_bytes_max="1MiB")
    at.faults("store hang")
    wanted = keys(*range(100))
    at.store(wanted)
    thread, told = in_thread(lambda: at.wait(wanted, 3600))
    until(lambda: at.client.status()["stored_waits"] == 1, "a call that waits")
    at.faults()
    thread.join(60)
    (found,) = told
    assert [each.key for each in found] == wanted
    assert not any(each.waiting for each in found)
    stored = {each.key for each in found if each.stored}
    assert 0 < len(stored) < 100
    assert {lost.reason for each in found if not each.stored for lost in each.lost} == {"evicted"}
    assert all("tier cold" in each.why for each in found)
    again = at.wait(wanted)
    assert {each.key for each in again if each.stored} <= stored, "nothing is stored once more by being waited for"


def test_a_clear_ends_the_wait(make: Callable[..., At]) -> None:
    at = make(l2={"cold": NEVER_LATE}, store_in_flight_bytes_max="1MiB")  # what is in flight goes on
    at.faults("store hang")
    at.store(keys(*range(200)))
    thread, told = in_thread(lambda: at.wait(keys(199), 3600))
    until(lambda: at.client.status()["stored_waits"] == 1, "a call that waits")
    at.another().clear(NS)
    thread.join(60)
    assert not told[0][0].stored
    assert "cleared" in told[0][0].why


def test_a_tier_that_is_removed_is_not_waited_for(make: Callable[..., At]) -> None:
    at = make(l2={"warm": NEVER_LATE, "cold": NEVER_LATE}, l2_order=["warm", "cold"])
    at.faults("store hang")
    at.store(keys("k"))
    thread, told = in_thread(lambda: at.wait(keys("k"), 3600))
    until(lambda: at.client.status()["stored_waits"] == 1, "a call that waits")
    at.another().tiers_remove("cold")
    thread.join(60)
    assert told[0][0].stored
    assert told[0][0].tiers == ("warm",)


def test_a_server_that_is_killed_meanwhile_ends_the_wait(node: Node) -> None:
    server = node.serve("--l2.cold.type", "mock", "--l2.cold.faults", "store hang", "--l2.cold.deadline_s", "600")
    client, asker = node.client(), node.client()
    key = node.key("k")
    assert client.store([key], [node.payload(1)], namespace=node.namespace).stored == 1
    thread, told = in_thread(lambda: client.wait_stored([key], namespace=node.namespace, timeout_s=3600))
    until(lambda: asker.status()["stored_waits"] == 1, "a call that waits")
    server.kill()
    thread.join(60)
    assert isinstance(told[0], DisconnectedError)


# --- trouble meanwhile ----------------------------------------------------------------------------------------------
def test_a_server_that_is_stopped_meanwhile_ends_the_wait_and_is_asked_again_once_it_goes_on(node: Node) -> None:
    server = node.serve("--l2.cold.type", "mock", "--l2.cold.faults", "store hang", "--l2.cold.deadline_s", "600")
    client, asker = node.client(call_timeout_s=2.0), node.client()  # of that its patience is made
    key = node.key("k")
    assert client.store([key], [node.payload(1)], namespace=node.namespace).stored == 1
    thread, told = in_thread(lambda: client.wait_stored([key], namespace=node.namespace, timeout_s=0.5))
    until(lambda: asker.status()["stored_waits"] == 1 or told, "a call that waits")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        thread.join(60)
        assert told, "it waits for a server that is stopped"
        if isinstance(told[0], list):  # it was answered before the server was stopped
            assert told[0][0].waiting
        else:
            assert isinstance(told[0], DisconnectedError)
    finally:
        os.kill(server.pid, signal.SIGCONT)

    def asked() -> list[StoredKey] | None:
        try:
            return client.wait_stored([key], namespace=node.namespace, timeout_s=0.0)
        except DisconnectedError:
            return None

    (again,) = until(asked, "the server that goes on")
    assert (again.stored, again.waiting) == (False, ("cold",))


@pytest.mark.parametrize("fault", ["store hang", "delete hang"])
def test_what_is_overwritten_meanwhile_is_stored_once_the_tier_has_what_came_last(
    make: Callable[..., At], fault: str
) -> None:
    """The tier has the former object of the key, and is to delete it and to store the new one."""
    at = make(l2={"cold": NEVER_LATE})
    wanted = keys(*range(8))
    at.store(wanted, byte=1)
    assert all(each.stored for each in at.wait(wanted))
    identified = at.client.lookup(wanted, namespace=NS, identify=True)
    at.faults(fault)
    assert at.client.drop(wanted, namespace=NS, incarnations=identified.incarnations) == len(wanted)
    at.store(wanted, byte=2)
    for told in at.wait(wanted, 0.05):
        assert (told.stored, told.waiting) == (False, ("cold",)), told.why
    at.faults()
    assert all(each.stored for each in at.wait(wanted))
    at.client.clear(NS)
    buffers = [bytearray(NBYTES) for _ in wanted]
    assert at.client.lookup(wanted, namespace=NS, wait_s=60).hits == len(wanted)
    assert at.client.retrieve(wanted, buffers, namespace=NS).hits == len(wanted)
    assert {bytes(each) for each in buffers} == {bytes([2]) * NBYTES}


@pytest.mark.parametrize("timeout_s", [0, 0.0, 1e-9, float("inf"), True])
def test_a_time_out_of_any_length_ends_when_nothing_is_on_its_way(make: Callable[..., At], timeout_s: float) -> None:
    at = make(l2={"cold": NEVER_LATE})
    at.store(keys("k"))
    until(lambda: at.wait(keys("k"), 0.0)[0].stored, "the tier")
    assert at.wait(keys("k"), timeout_s)[0].stored


def test_threads_that_wait_for_the_same_keys_are_each_told(make: Callable[..., At]) -> None:
    at = make(l2={"cold": NEVER_LATE})
    at.faults("store hang")
    at.store(keys("k"))
    waiting = [in_thread(lambda: at.wait(keys("k"), 3600)) for _ in range(4)]
    until(lambda: at.client.status()["stored_waits"] == 4, "four calls that wait")
    at.faults()
    for thread, told in waiting:
        thread.join(60)
        assert told[0][0].stored


def test_one_that_is_interrupted_leaves_the_client_as_it_was(make: Callable[..., At]) -> None:
    at = make(l2={"cold": NEVER_LATE})
    at.faults("store hang")
    at.store(keys("k"))
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: other.status()["stored_waits"] == 1, "a call that waits")
        signal.pthread_kill(main, signal.SIGINT)

    other = at.another()
    thread, told = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        at.wait(keys("k"), 3600)
    thread.join(60)
    assert told == [None]
    assert at.wait(keys("k"), 0.0)[0].waiting == ("cold",)
    at.faults()
    assert at.wait(keys("k"))[0].stored


def test_a_forked_child_waits_over_a_connection_of_its_own(node: Node) -> None:
    node.serve("--l2.cold.type", "mock", "--l2.cold.deadline_s", "600")
    client = node.client()
    key = node.key("k")
    assert client.store([key], [node.payload(1)], namespace=node.namespace).stored == 1
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            (told,) = client.wait_stored([key], namespace=node.namespace, timeout_s=60)
            status = 0 if told.stored else 2
        except UsageError:
            status = 0  # it says that a child has to connect
        finally:
            os._exit(status)
    assert client.wait_stored([key], namespace=node.namespace, timeout_s=60)[0].stored
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_asked_again_after_its_namespace_was_forgotten_it_waits_no_longer_than_it_was_to(
    make: Callable[..., At], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's answer to the first request is that it knows no such namespace, when all of its time is over."""
    at = make(l2={"cold": NEVER_LATE})
    at.faults("store hang")
    at.store(keys("k"))
    asked: list[float] = []
    waits = at.server.parts.stored_waits

    def forgets(session: Any, request: m.WaitStored) -> Any:
        asked.append(request.wait_s)
        if len(asked) > 1:
            return waits.wait(session, request)
        time.sleep(0.3)
        raise UnknownNamespaceError("this session has named many others since")

    at.server.dispatch.handlers[m.WaitStored] = forgets
    (told,) = at.wait(keys("k"), 0.3)
    assert told.waiting == ("cold",)
    assert asked[0] > 0.0
    assert asked[1] == 0.0, "the second request waits for as long as the first one did"


# --- limits ---------------------------------------------------------------------------------------------------------


def test_calls_that_wait_are_bounded_for_each_session(make: Callable[..., At]) -> None:
    at = make(l2={"cold": NEVER_LATE})
    at.faults("store hang")
    at.store(keys("k"))
    link = at.client.links.current()
    ask = m.WaitStored(0, NS.id, keys("k")[0], 600.0)
    waiting = [link.channel.start(ask, None, 60.0) for _ in range(STORED_WAITS_PER_SESSION_MAX)]
    with pytest.raises(LimitError, match=f"{STORED_WAITS_PER_SESSION_MAX} calls of this session wait for stores"):
        link.channel.call(ask)
    other = at.another()
    thread, told = in_thread(lambda: other.wait_stored(keys("k"), namespace=NS, timeout_s=60))
    until(lambda: at.client.status()["stored_waits"] == STORED_WAITS_PER_SESSION_MAX + 1, "the other session's call")
    at.faults()
    for each in waiting:
        assert isinstance(link.channel.wait(each, 60.0), m.Explained)
    thread.join(60)
    assert told[0][0].stored


def test_a_session_that_ends_leaves_no_wait_behind(make: Callable[..., At]) -> None:
    at = make(l2={"cold": NEVER_LATE})
    at.faults("store hang")
    at.store(keys("k"))
    other = at.another()
    other.register_layout(NS)
    other.links.current().channel.start(m.WaitStored(0, NS.id, keys("k")[0], 0.05), None, 60.0)
    other.close()
    until(lambda: at.client.status()["stored_waits"] == 0, "the end of its wait")


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("-inf"), "5", None])
def test_a_time_out_that_is_none_is_refused(make: Callable[..., At], timeout_s: Any) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        make().wait(keys("k"), timeout_s)
