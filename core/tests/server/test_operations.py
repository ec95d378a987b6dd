"""Request types that a package adds: on the loop, in a lane, and what becomes of those that fail or take long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import pytest

from lmcache_core import ComponentSpec, Kind, hookimpl
from lmcache_core.client.client import Client
from lmcache_core.errors import CacheError, LimitError, SettingsError, UsageError
from lmcache_core.limits import OPERATION_SAMPLE_BYTES_MAX, OPERATIONS_PER_SESSION_MAX
from lmcache_core.native import native
from lmcache_core.plugins.discovery import ALLOW_LIST
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.pool.layout import Layout
from lmcache_core.server.operation import AnsweredRequest, OperationContext, PoolView, ServerOperation
from lmcache_core.server.server import Server
from lmcache_core.settings.compose import make_settings
from lmcache_core.settings.model import Section
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing import OperationContract
from lmcache_testing.embedded import Json, embedded_server, server_settings
from lmcache_testing.waiting import until

SPACE = Namespace("operations", Layout("uint8", (4096,)))
KEY = bytes(range(32))
entered, leave = threading.Event(), threading.Event()


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    """What the operation below is asked."""

    namespace: int
    key: bytes
    what: str = "look"


class Told(msgspec.Struct):
    """What it answers."""

    nbytes: int
    sample: bytes
    thread: str
    padding: bytes = b""


class LookSettings(Section):
    """Of the operation below."""

    size: int = 4


class Look(ServerOperation):
    """On the loop."""

    request, reply = Ask, Told
    runs: ClassVar[Literal["loop", "lane"]] = "loop"

    def __init__(self, settings: LookSettings, context: OperationContext) -> None:
        self.settings, self.context = settings, context

    def handle(self, request: Any) -> Told:
        if request.what == "hang":
            entered.set()
            leave.wait(60)
        if request.what == "raise":
            raise RuntimeError("a bug")
        if request.what == "another":
            return Ask(1, b"")  # type: ignore[return-value]
        if request.what == "refuse":
            raise UsageError("ask for something else")
        if request.what == "name":
            raise UsageError("no such file: \udcff")
        return self.context.on_loop(lambda view: self.look(view, request))

    def look(self, view: PoolView, request: Any) -> Told:
        (info,) = view.describe(request.namespace, [request.key])
        size = OPERATION_SAMPLE_BYTES_MAX + 1 if request.what == "much" else self.settings.size
        sample = view.sample(request.namespace, request.key, 0, size) or b""
        padding = bytes(1 << 20) if request.what == "flood" else b""
        return Told(0 if info is None else info.nbytes, sample, threading.current_thread().name, padding)


class SlowLook(Look):
    """In a lane."""

    runs: ClassVar[Literal["loop", "lane"]] = "lane"


class Odd(Look):
    """Its figures are none, or too many, by its size; its close hangs."""

    def status(self) -> Any:
        return {1: 7, 2: {"a": object()}, 3: {"a": 10**30}, 4: {"a": "x" * 100_000}}[self.settings.size]

    def close(self) -> None:
        leave.wait(60)


class Counting(Look):
    """Remembers what others have asked, in other servers, too."""

    asked: ClassVar[list[str]] = []

    def handle(self, request: Any) -> Told:
        self.asked.append(request.what)
        return super().handle(request)


class Watching(Look):
    """Watches what others ask, between two calls; from the start with size 1, and with size 2 it has a bug."""

    runs: ClassVar[Literal["loop", "lane"]] = "lane"

    def __init__(self, settings: LookSettings, context: OperationContext) -> None:
        super().__init__(settings, context)
        self.seen: list[AnsweredRequest] = []
        self.end = context.watch(self.answered) if settings.size == 1 else None

    def answered(self, request: AnsweredRequest) -> None:
        self.seen.append(request)
        if self.settings.size == 2:
            raise RuntimeError("a bug")

    def handle(self, request: AnsweredRequest) -> Told:
        if self.end is None:
            self.end = self.context.watch(self.answered)
        else:
            self.end()
            self.end = None
        return Told(len(self.seen), b"", ",".join(f"{each.kind} {each.hits}" for each in self.seen))

    def status(self) -> Json:
        return {"watches": self.end is not None}


class Plugin:
    @hookimpl
    def lmcache_components(self) -> list[ComponentSpec]:
        here = __name__
        return [
            ComponentSpec(Kind.OPERATION, "look", f"{here}:Look", f"{here}:LookSettings", "looks"),
            ComponentSpec(Kind.OPERATION, "slow_look", f"{here}:SlowLook", f"{here}:LookSettings", "looks slowly"),
            ComponentSpec(Kind.OPERATION, "odd", f"{here}:Odd", f"{here}:LookSettings", "odd"),
            ComponentSpec(Kind.OPERATION, "counting", f"{here}:Counting", f"{here}:LookSettings", "remembers"),
            ComponentSpec(Kind.OPERATION, "watching", f"{here}:Watching", f"{here}:LookSettings", "", always=True),
        ]


@pytest.fixture
def registry() -> Registry:
    found = load_plugins({ALLOW_LIST: ""})
    found.register(Plugin(), "looks")
    return found


@pytest.fixture
def client(registry: Registry, tmp_path: Path) -> Iterator[Client]:
    entered.clear()
    leave.clear()
    operations = {"look": {"size": 6}, "slow_look": {}}
    with embedded_server(tmp_path, registry, l1={"backing": "memfd"}, operations=operations) as server:
        with server.connect() as made:
            yield made
        leave.set()


def asked_by(client: Client) -> None:
    """A hit of the index, where that is open, a miss and a store."""
    client.store([KEY], [bytes(4096)], namespace=SPACE)
    assert client.lookup([KEY], namespace=SPACE).hits == 1
    client.lookup([bytes(32)], namespace=SPACE)


def test_an_operation_that_is_always_there_may_watch_all_requests_with_their_answers(client: Client) -> None:
    asked_by(client)
    assert not client.call_operation("watching", Ask(1, b""), Told).nbytes
    assert client.status()["operations"]["watching"]["watches"]
    asked_by(client)
    assert client.call_operation("watching", Ask(1, b""), Told).thread == "store 0,lookup 1,lookup 0"
    asked_by(client)
    assert client.call_operation("watching", Ask(1, b""), Told).nbytes == 3, "nothing after its end"


@pytest.mark.parametrize(("size", "seen"), [(1, "store 1,lookup 1,lookup 0"), (2, "store 1")])
def test_it_may_watch_from_the_start_and_ends_where_it_fails(
    registry: Registry, tmp_path: Path, size: int, seen: str
) -> None:
    with embedded_server(
        tmp_path, registry, l1={"backing": "memfd"}, operations={"watching": {"size": size}}
    ) as server:
        with server.connect() as client:
            if size == 2:
                client.call_operation("watching", Ask(1, b""), Told)
            asked_by(client)
            assert client.call_operation("watching", Ask(1, b""), Told).thread == seen
            asked_by(client)
            before = client.status()["traffic"]["lookups"]
            assert client.lookup([KEY], namespace=SPACE).hits == 1
            after = client.status()["traffic"]["lookups"]
            if native is not None:  # who reads the index
                assert after["calls_by_index"] == before["calls_by_index"] + 1, "the index is open again"


@pytest.mark.parametrize(("name", "size"), [("look", 6), ("slow_look", 4)])
def test_an_operation_sees_what_is_in_the_pool(client: Client, name: str, size: int) -> None:
    assert client.call_operation(name, Ask(SPACE.id, KEY), Told).nbytes == 0
    client.store([KEY], [b"\x05" * 4096], namespace=SPACE)
    told = client.call_operation(name, Ask(SPACE.id, KEY), Told)
    assert (told.nbytes, told.sample, told.thread) == (4096, b"\x05" * size, "lmcache-server")
    assert client.status()["operations"][name]["calls"] == 2


def test_one_in_a_lane_keeps_nobody_waiting_but_its_like(client: Client) -> None:
    answers: list[object] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(client.call_operation("slow_look", Ask(SPACE.id, KEY, "hang"), Told))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    for _ in range(50):
        client.noop()
    assert client.call_operation("look", Ask(SPACE.id, KEY), Told).nbytes == 0
    assert answers == []
    leave.set()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 3


def test_calls_of_one_session_leave_room_for_those_of_others(registry: Registry, tmp_path: Path) -> None:
    entered.clear()
    leave.clear()
    ask, answers = Ask(SPACE.id, KEY, "hang"), []
    with embedded_server(tmp_path, registry, operations={"slow_look": {}}) as server, server.connect() as busy:

        def call(client: Client) -> None:
            answers.append(client.call_operation("slow_look", ask, Told))

        threads = [threading.Thread(target=call, args=(busy,)) for _ in range(OPERATIONS_PER_SESSION_MAX)]
        for thread in threads:
            thread.start()
        until(lambda: busy.status()["operations"]["slow_look"]["calls"] == OPERATIONS_PER_SESSION_MAX)
        with pytest.raises(LimitError, match="operations of this session wait already"):
            call(busy)
        with server.connect() as other:
            threads.append(threading.Thread(target=call, args=(other,)))
            threads[-1].start()
            until(lambda: busy.status()["operations"]["slow_look"]["calls"] == OPERATIONS_PER_SESSION_MAX + 2)
            leave.set()
            for thread in threads:
                thread.join(60)
        assert len(answers) == OPERATIONS_PER_SESSION_MAX + 1
        call(busy)


@pytest.mark.parametrize("name", ["look", "slow_look"])
def test_an_operations_error_reaches_its_client_and_the_server_goes_on(client: Client, name: str) -> None:
    with pytest.raises(UsageError, match="ask for something else"):
        client.call_operation(name, Ask(SPACE.id, KEY, "refuse"), Told)
    with pytest.raises(CacheError, match="log has the traceback"):
        client.call_operation(name, Ask(SPACE.id, KEY, "raise"), Told)
    client.store([KEY], [bytes(4096)], namespace=SPACE)
    with pytest.raises(LimitError, match="at most 4096"):
        client.call_operation(name, Ask(SPACE.id, KEY, "much"), Told)
    with pytest.raises(LimitError, match="ask for less"):
        client.call_operation(name, Ask(SPACE.id, KEY, "flood"), Told)
    figures = client.status()["operations"][name]
    assert (figures["calls"], figures["failed"]) == (4, 1)


def test_requests_and_names_that_are_not_known_are_refused_with_words(client: Client) -> None:
    class Other(msgspec.Struct):
        colour: str

    with pytest.raises(UsageError, match="colour"):
        client.call_operation("look", Other("red"), Told)
    with pytest.raises(UsageError, match="it has watching, look, slow_look"):
        client.call_operation("touch", Ask(SPACE.id, KEY), Told)
    with pytest.raises(UsageError, match="is not a Other"):
        client.call_operation("look", Ask(SPACE.id, KEY), Other)


def test_settings_of_an_operation_are_checked_like_all_others(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="size"):
        make_settings(registry, operations={"look": {"sizes": 3}}, state_dir=str(tmp_path))
    with pytest.raises(CacheError, match="nothing_such"):
        make_settings(registry, operations={"nothing_such": {}}, state_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["look", "slow_look"])
def test_an_answer_that_is_no_reply_of_its_is_a_fault(
    client: Client, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CacheError, match="failed; the server's log has the traceback"):
        client.call_operation(name, Ask(SPACE.id, KEY, "another"), Told)
    assert "it returned a Ask instead of a Told" in caplog.text
    assert client.status()["operations"][name]["failed"] == 1


def test_the_contract_catches_what_an_operation_keeps_beyond_its_server(registry: Registry, tmp_path: Path) -> None:
    settings = server_settings(tmp_path, registry, l1={"backing": "memfd"}, operations={"look": {}, "counting": {}})
    with Server(settings, registry) as server:
        for component, operation in (("look", Look), ("counting", Counting)):
            contract = type("Contract", (OperationContract,), {"component": component})()
            if operation is Look:
                contract.test_it_keeps_nothing_beyond_its_server(server, operation, Ask(SPACE.id, KEY))
            else:
                with pytest.raises(AssertionError, match=r"it has changed Counting\.asked of its class"):
                    contract.test_it_keeps_nothing_beyond_its_server(server, operation, Ask(SPACE.id, KEY))


@pytest.mark.parametrize("operation", ["look", "slow_look"])
def test_a_refusal_with_a_name_that_is_no_utf8_reaches_its_caller(client: Client, operation: str) -> None:
    with pytest.raises(UsageError, match=r"no such file: \\udcff"):
        client.call_operation(operation, Ask(SPACE.id, KEY, "name"), Told)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_figures_that_cannot_be_sent_cost_only_their_own(registry: Registry, tmp_path: Path, size: int) -> None:
    leave.clear()
    tables: Json = {"l1": {"backing": "memfd"}, "operations": {"odd": {"size": size}}}
    with embedded_server(tmp_path, registry, **tables) as server, server.connect() as client:
        assert "error" in client.status()["operations"]["odd"]
        server.stop()  # although its close hangs
    leave.set()


def test_a_request_that_cannot_be_encoded_is_refused_at_the_caller(client: Client) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        client.call_operation("look", {"namespace": 1 << 80}, Told)
