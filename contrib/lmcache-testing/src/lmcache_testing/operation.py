"""The contract of operations, as tests: each runs in a real server, embedded in the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from lmcache_core.clock import Clock
from lmcache_core.errors import UsageError
from lmcache_core.plugins.components import Kind
from lmcache_core.protocol import messages as m
from lmcache_core.server.operation import OperationContext, PoolView, ServerOperation
from lmcache_testing.contract import Contract, not_claimed, raised
from lmcache_testing.embedded import NAMELESS, embedded_server
from lmcache_testing.held import expect_level
from lmcache_testing.watch import NotBackError, watched

if TYPE_CHECKING:
    from lmcache_core.plugins.registry import Registry
    from lmcache_core.server.server import Server

_CALLERS, _CALLS = 4, 5
_WAIT_S = 30.0  # a safety net
_QUICK_S = 0.002
_TRIES = 50


def _kept(operation: type[ServerOperation]) -> dict[str, str]:
    """The state of its classes, as text, without methods and other constants."""
    return {
        f"{each.__name__}.{name}": repr(value)
        for each in operation.__mro__
        for name, value in vars(each).items()
        if not name.startswith(("__", "_abc")) and not callable(value)
    }


class OperationContract(Contract):
    """For an operation whose package is installed. `component` is its name, `operation_settings` gives the settings in
    its table (none by default), and `sample_request` is a request that it answers even in an empty server."""

    settle_s: ClassVar[float] = 5.0  # for a thread that must end

    @pytest.fixture
    def operation_settings(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def sample_request(self) -> msgspec.Struct:
        pytest.fail("bring a fixture `sample_request`: a request that the operation answers", pytrace=False)

    @pytest.fixture
    def operation_registry(self) -> Registry:
        """Everything that is installed."""
        from lmcache_core.plugins.loader import load_plugins

        return load_plugins()

    @pytest.fixture
    def operation_server(
        self, tmp_path: Path, operation_settings: dict[str, Any], operation_registry: Registry
    ) -> Iterator[Server]:
        """A server with only this operation."""
        with embedded_server(
            tmp_path, operation_registry, l1=NAMELESS, operations={self.component: operation_settings}
        ) as server:
            yield server

    @pytest.fixture
    def operation(self, operation_registry: Registry) -> type[ServerOperation]:
        """Its class."""
        factory: type[ServerOperation] = operation_registry.factory(Kind.OPERATION, self.component)
        return factory

    def test_it_is_an_operation_with_structs_of_its_own(self, operation: type[ServerOperation]) -> None:
        assert issubclass(operation, ServerOperation), f"{operation.__name__} is no ServerOperation"
        assert operation.runs in ("loop", "lane"), f"runs is {operation.runs!r}: loop or lane"
        for what in ("request", "reply"):
            found = getattr(operation, what, None)
            struct = isinstance(found, type) and issubclass(found, msgspec.Struct)
            assert struct, f"its {what} is {found!r:.80}, and has to be a msgspec.Struct of its own"
        config = operation.request.__struct_config__
        assert config.forbid_unknown_fields, "its request takes any field: a misspelt one would be ignored"

    def test_it_answers_with_its_reply(
        self, operation_server: Server, operation: type[ServerOperation], sample_request: msgspec.Struct
    ) -> None:
        with operation_server.connect() as client:
            reply = client.call_operation(self.component, sample_request, operation.reply)
            assert isinstance(reply, operation.reply), f"it answered with a {type(reply).__name__}"
            figures = client.status()["operations"][self.component]
        message = f"asked once, it has {figures['calls']} calls in the status, {figures['failed']} of them failed"
        assert (figures["calls"], figures["failed"]) == (1, 0), message

    def test_it_keeps_nothing_beyond_its_server(
        self, operation_server: Server, operation: type[ServerOperation], sample_request: msgspec.Struct
    ) -> None:
        before = _kept(operation)
        with operation_server.connect() as client:
            client.call_operation(self.component, sample_request, operation.reply)
        changed = ", ".join(sorted(name for name, value in _kept(operation).items() if before.get(name) != value))
        message = f"asked once, it has changed {changed} of its class, which the next server in this process has, too"
        assert not changed, f"{message}: keep it in the instance"

    def test_what_is_no_request_is_refused_with_words(self, operation_server: Server) -> None:
        with operation_server.connect() as client:
            for body in (b"", b"\xc1", msgspec.msgpack.encode({"no_such_field_of_any": 1}), bytes(1000)):
                sent = f"sent {len(body)} bytes that are no request"
                channel = client.links.current(patient=True).channel
                try:
                    channel.call(m.CallOperation(0, self.component, body))
                except UsageError as error:
                    text = str(error)
                    assert self.component in text, f"{sent}, the refusal does not name it: {text}"
                else:
                    raise AssertionError(f"{sent}, it answered, and a UsageError is due")
            client.noop()
            failed = client.status()["operations"][self.component]["failed"]
            assert failed == 0, f"sent four times what is no request, the status says that {failed} calls failed"

    def test_on_the_loop_it_is_quick(
        self, operation_server: Server, operation: type[ServerOperation], sample_request: msgspec.Struct
    ) -> None:
        if operation.runs != "loop":
            not_claimed('runs = "loop"')
        with operation_server.connect() as client:
            for _ in range(_TRIES):
                client.call_operation(self.component, sample_request, operation.reply)
            slow = client.status()["operations"][self.component]["slow"]
        assert slow < _TRIES // 2, f"{slow} of {_TRIES} calls took more than {1e3 * _QUICK_S:g} ms: say runs = 'lane'"

    def test_many_callers_are_all_answered(
        self, operation_server: Server, operation: type[ServerOperation], sample_request: msgspec.Struct
    ) -> None:
        """Two lanes call it at once. State of a request that it keeps in the instance may be overwritten by another
        request. The kit does not know the right answers, so it cannot tell whether they are mixed up."""
        faults: list[str] = []

        def work() -> None:
            try:
                with operation_server.connect() as client:
                    for _ in range(_CALLS):
                        client.call_operation(self.component, sample_request, operation.reply)
            except Exception as error:  # noqa: BLE001 - of a thread: raised by the test
                faults.append(raised(error))

        threads = [threading.Thread(target=work, name="kit-caller", daemon=True) for _ in range(_CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_WAIT_S)
        assert not any(thread.is_alive() for thread in threads), f"{_CALLERS} callers at once, and one was not answered"
        assert not faults, f"{_CALLERS} callers at once, and {len(faults)} of them failed, the first with {faults[0]}"

    def test_it_looks_at_the_pool_on_the_loop_alone(
        self,
        operation_server: Server,
        operation: type[ServerOperation],
        sample_request: msgspec.Struct,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A view of the pool may be used only within `on_loop`: elsewhere the loop may change it during the read."""
        elsewhere: list[str] = []

        def noting(name: str) -> Any:
            method = getattr(PoolView, name)

            def noted(view: PoolView, *arguments: Any) -> Any:
                if threading.current_thread().name.startswith("operation-"):
                    elsewhere.append(name)
                return method(view, *arguments)

            return noted

        for name in ("describe", "sample"):
            monkeypatch.setattr(PoolView, name, noting(name))
        with operation_server.connect() as client:
            client.call_operation(self.component, sample_request, operation.reply)
        assert not elsewhere, f"asked once, it called {elsewhere[0]} of the pool's view in its lane, and not in on_loop"

    def test_it_is_made_and_closed_without_a_trace(
        self, tmp_path: Path, operation_settings: dict[str, Any], operation_registry: Registry
    ) -> None:
        from lmcache_core.settings.compose import make_settings

        settings = make_settings(operation_registry, name="kit", state_dir=str(tmp_path / "state"))
        context = OperationContext(settings, Clock(), _no_server, _no_server)

        def cycle() -> None:
            made = operation_registry.build(Kind.OPERATION, self.component, operation_settings, context)
            made.close()

        expect_level(cycle, 0, "made and closed", self.settle_s)

    def test_it_ends_in_order(
        self,
        operation_server: Server,
        operation: type[ServerOperation],
        sample_request: msgspec.Struct,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with operation_server.connect() as client:
            client.call_operation(self.component, sample_request, operation.reply)
        try:
            watched(operation_server.stop, _WAIT_S)
        except NotBackError as error:
            raise AssertionError(f"asked once, and then the server was stopped: {error}") from None
        assert "failed while closing" not in caplog.text, "the server stopped, and the operation did not end in order"

    def test_one_that_was_never_asked_ends_in_order(
        self, operation_server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        operation_server.stop()
        assert "failed while closing" not in caplog.text, "the server stopped, and the operation did not end in order"


def _no_server(call: Any) -> Any:
    raise UsageError("no server is behind this operation")
