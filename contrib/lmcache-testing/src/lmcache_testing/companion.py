"""The contract of companions, as tests: each runs in a real server, embedded in the test's process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.contract import Contract
from lmcache_testing.embedded import NAMELESS, embedded_server
from lmcache_testing.waiting import until

if TYPE_CHECKING:
    from lmcache_core import Client
    from lmcache_core.server.server import Server

OFFER_BYTES_MAX = 4096  # it travels with every hello
_KEYS = [bytes([number]) * 32 for number in range(1, 9)]


class CompanionContract(Contract):
    """For a companion whose package is installed. `component` is its name, and the fixture `companion_settings` gives
    the settings in its table (none by default). `layout`: of the objects that the tests store; choose one that the
    companion acts on, so that the tests cover more."""

    @pytest.fixture
    def companion_settings(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def layout(self) -> Layout:
        return Layout("uint8", (4096,))

    @pytest.fixture
    def companion_server(self, tmp_path: Path, companion_settings: dict[str, Any]) -> Iterator[Server]:
        """A server with only this companion."""

        with embedded_server(tmp_path, l1=NAMELESS, **{self.component: companion_settings}) as server:
            yield server

    @pytest.fixture
    def companion_client(self, companion_server: Server) -> Iterator[Client]:
        with companion_server.connect(use_index=False) as client:
            yield client

    def _figures(self, client: Client) -> dict[str, Any]:
        shown: dict[str, Any] = client.status()["companions"][self.component]
        return shown

    def _expect_at_work(self, client: Client, done: str) -> None:
        figures = self._figures(client)
        assert "disabled" not in figures, f"{done}, the server has disabled it: {figures['disabled']}"

    def test_what_it_offers_is_plain_and_small(self, companion_client: Client) -> None:
        companion_client.noop()
        offered = (companion_client.companions() or {})[self.component]
        nbytes = len(msgspec.msgpack.encode(offered))
        assert nbytes <= OFFER_BYTES_MAX, (
            f"its offer has {nbytes:,} bytes: at most {OFFER_BYTES_MAX:,} travel with a hello"
        )

    def test_it_outlives_stores_reads_and_clears(self, companion_client: Client, layout: Layout) -> None:
        namespace, client = Namespace("kit", layout), companion_client
        for turn in range(3):
            sources = [bytes([turn]) * layout.nbytes for _ in _KEYS]
            stored = client.store(_KEYS, sources, namespace=namespace).stored
            assert stored == len(_KEYS), (
                f"turn {turn}: {stored} of {len(_KEYS)} objects were stored beside the companion"
            )
            for _ in range(5):
                into = [bytearray(layout.nbytes) for _ in _KEYS]
                hits = client.retrieve(_KEYS, into, namespace=namespace).hits
                assert hits == len(_KEYS), f"turn {turn}: {hits} of {len(_KEYS)} objects were hits"
                same = [bytes(each) for each in into] == sources
                assert same, f"turn {turn}: other bytes were read than were stored"
            cleared = client.clear(namespace).objects
            assert cleared == len(_KEYS), f"turn {turn}: {cleared} of {len(_KEYS)} objects were cleared"
        self._expect_at_work(client, "after stores, reads and clears")

    def test_an_operation_that_it_does_not_have_is_refused(self, companion_client: Client) -> None:
        try:
            companion_client.operate(self.component, "no_such_operation")
        except UsageError as error:
            assert "no_such_operation" in str(error), f"an unknown operation is refused without its name: {error}"  # noqa: PT017
        else:
            raise AssertionError("an operation that it does not have was answered, and is a UsageError")
        self._expect_at_work(companion_client, "asked for an operation that it does not have")

    def test_it_does_not_keep_the_loop_busy(self, companion_server: Server, companion_client: Client) -> None:
        """When idle, its next step is due some time ahead, or never."""
        companion_client.noop()

        def idle() -> bool:
            due = companion_server.parts.companions.next_step()
            return due is None or due > time.monotonic()

        until(idle, "a next_step that is due later: it is due all the time, though nothing happens")

    def test_it_ends_in_order(self, companion_server: Server, caplog: pytest.LogCaptureFixture) -> None:
        companion_server.stop()
        assert "failed while closing" not in caplog.text, "the server stopped, and the companion did not end in order"
