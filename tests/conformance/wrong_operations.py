"""Operations with one realistic fault each, and the contract test that has to notice it (`caught_by`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec
import pytest

from lmcache_core import ComponentSpec, Kind, hookimpl
from lmcache_core.errors import UsageError
from lmcache_core.plugins.discovery import ALLOW_LIST
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.server.operation import ObjectInfo, OperationContext, PoolView, ServerOperation
from lmcache_core.server.server import Server
from lmcache_testing import OperationContract

KEY = bytes(range(32))


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    """What the operations below are asked."""

    key: bytes


class Told(msgspec.Struct):
    """What they answer."""

    there: bool


class Look(ServerOperation):
    """Correct: whether an object is there. The faults below are changes to it."""

    request: ClassVar[type[msgspec.Struct]] = Ask
    reply: ClassVar[type[msgspec.Struct]] = Told
    runs: ClassVar[Literal["loop", "lane"]] = "lane"

    def __init__(self, settings: object, context: OperationContext) -> None:
        self.context = context

    def handle(self, request: Ask) -> Told:
        return Told(self.context.on_loop(lambda view: self.look(view, request)) is not None)

    def look(self, view: PoolView, request: Ask) -> ObjectInfo | None:
        return view.describe(1, [request.key])[0]


class Wrong(OperationContract):
    component = "look"
    caught_by: ClassVar[str]
    faulty: ClassVar[object] = Look

    @pytest.fixture
    def operation_registry(self) -> Registry:
        cls = type(self)
        where = f"wrong_operations:{cls.__name__}.faulty" if "faulty" in vars(cls) else "wrong_operations:Look"

        class Plugin:
            @hookimpl
            def lmcache_components(self) -> list[ComponentSpec]:
                return [ComponentSpec(Kind.OPERATION, "look", where, summary="looks")]

        found = load_plugins({ALLOW_LIST: ""})
        found.register(Plugin(), "looks")
        return found

    @pytest.fixture
    def sample_request(self) -> Ask:
        return Ask(KEY)


class Loose(msgspec.Struct):
    key: bytes = b""


class TestTakesAnyField(Wrong):
    caught_by = "test_it_is_an_operation_with_structs_of_its_own"

    class faulty(Look):
        request = Loose


class TestAnswersWithAMapping(Wrong):
    caught_by = "test_it_answers_with_its_reply"

    class faulty(Look):
        def handle(self, request: Ask) -> Told:
            return {"here": super().handle(request).there}


class TestIsNoOperation(Wrong):
    caught_by = "test_it_is_an_operation_with_structs_of_its_own"

    class faulty:
        request, reply, runs = Ask, Told, "loop"


class TestRunsNowhere(Wrong):
    caught_by = "test_it_is_an_operation_with_structs_of_its_own"

    class faulty(Look):
        runs: Any = "thread"


class TestSleepsOnTheLoop(Wrong):
    caught_by = "test_on_the_loop_it_is_quick"

    class faulty(Look):
        runs = "loop"

        def handle(self, request: Ask) -> Told:
            time.sleep(0.005)
            return super().handle(request)


class TestRaisesWhenItCloses(Wrong):
    caught_by = "test_it_ends_in_order"

    class faulty(Look):
        def close(self) -> None:
            raise RuntimeError("the database is closed already")


class TestClosesWhatItOpensAtItsFirstCall(Wrong):
    caught_by = "test_one_that_was_never_asked_ends_in_order"

    class faulty(Look):
        def handle(self, request: Ask) -> Told:
            self.opened = threading.Event()
            return super().handle(request)

        def close(self) -> None:
            self.opened.set()


class TestNeverEnds(Wrong):
    caught_by = "test_it_ends_in_order"
    limit_s = 2.0

    class faulty(Look):
        waits = threading.Event()

        def close(self) -> None:
            self.waits.wait()

    @pytest.fixture(autouse=True)
    def _released(self, operation_server: Server, operation: Any) -> Iterator[None]:
        yield
        operation.waits.set()  # the test has seen it, and the server may end


class TestIsAskedOneAtATime(Wrong):
    caught_by = "test_many_callers_are_all_answered"

    class faulty(Look):
        busy = False

        def handle(self, request: Ask) -> Told:
            if self.busy:
                raise UsageError("busy")
            self.busy = True
            time.sleep(0.01)
            self.busy = False
            return super().handle(request)


class TestKeepsTheViewOfThePool(Wrong):
    caught_by = "test_it_looks_at_the_pool_on_the_loop_alone"

    class faulty(Look):
        def handle(self, request: Ask) -> Told:
            view: PoolView = self.context.on_loop(lambda each: each)
            return Told(self.look(view, request) is not None)


class TestLeavesItsThreadBehind(Wrong):
    caught_by = "test_it_is_made_and_closed_without_a_trace"
    settle_s = 0.3

    class faulty(Look):
        def __init__(self, settings: object, context: OperationContext) -> None:
            super().__init__(settings, context)
            threading.Thread(target=time.sleep, args=(1000.0,), name="refresher", daemon=True).start()
