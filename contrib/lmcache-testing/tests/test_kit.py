"""What the kit itself is made of: its watchdog, its scheduler, its proxy, its words and its card."""

from __future__ import annotations

import ast
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lmcache_testing
from lmcache_core.tiers.contract import AdapterContext
from lmcache_mock.memory import MemoryAdapter
from lmcache_testing import FaultyAdapter, StallingProxy, material
from lmcache_testing.card import FAILED, HELD, JUDGED_NOT, Card, Line
from lmcache_testing.contract import claim_of
from lmcache_testing.stepping import Stepped, own_modules
from lmcache_testing.watch import NotBackError, watched

KIT = Path(lmcache_testing.__file__).parent


def test_every_assertion_of_the_kit_says_what_was_seen() -> None:
    silent = [
        f"{path.name}:{node.lineno}"
        for path in sorted(KIT.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert silent == []


def test_no_contract_test_leaves_its_words_to_pytest() -> None:
    """`pytest.raises` says "DID NOT RAISE", and not of what."""
    assert [path.name for path in sorted(KIT.glob("*.py")) if "pytest.raises" in path.read_text()] == []


# --- watchdog -------------------------------------------------------------------------------------------------------
def test_a_call_that_does_not_come_back_is_left_where_it_is() -> None:
    gate = threading.Event()
    with pytest.raises(NotBackError, match=r"0\.1 s, and was in wait"):
        watched(gate.wait, 0.1)
    gate.set()
    assert watched(gate.wait, 60.0) is True


def test_a_call_that_is_late_says_which_knob_gives_it_more_time() -> None:
    gate = threading.Event()
    with pytest.raises(NotBackError, match=r"more time by the class attribute hang_slack_s"):
        watched(gate.wait, 0.1, "hang_slack_s")
    gate.set()


def test_what_a_watched_call_raises_is_raised() -> None:
    with pytest.raises(KeyError, match="words"):
        watched(lambda: {}["words"], 60.0)


# --- scheduler ------------------------------------------------------------------------------------------------------
def test_a_call_stands_at_each_of_its_lines_while_somebody_looks() -> None:
    steps: list[int] = []
    seen: list[int] = []

    def call() -> int:
        steps.append(1)
        steps.append(2)
        return len(steps)

    stepped = Stepped(call, frozenset({__name__}), lambda: seen.append(len(steps)))
    assert stepped.run(60.0) == 2
    assert stepped.stops == 3
    assert seen == [0, 1, 2]


def test_a_look_that_waits_for_the_call_goes_on_beside_it() -> None:
    lock = threading.Lock()
    looks: list[bool] = []

    def call() -> None:
        with lock:
            time.time()

    def look() -> None:
        with lock:
            looks.append(True)

    Stepped(call, frozenset({__name__}), look).run(60.0)
    assert looks


def test_what_a_look_finds_wrong_is_raised_after_the_call() -> None:
    ended: list[bool] = []

    def call() -> None:
        time.time()
        ended.append(True)

    def look() -> None:
        raise AssertionError("seen")

    with pytest.raises(AssertionError, match="seen"):
        Stepped(call, frozenset({__name__}), look).run(60.0)
    assert ended


def test_an_adapters_own_modules_are_its_package_and_none_of_the_cores() -> None:
    mine = type("Mine", (FaultyAdapter,), {"__module__": "acme.adapter"})
    assert own_modules(mine(MemoryAdapter())) == {"acme", "lmcache_mock"}


def test_requests_of_a_stepped_call_stay_on_its_thread(adapter_context: AdapterContext) -> None:
    idents: list[set[int]] = []

    def call() -> None:
        idents.append(set(adapter_context.parallel([threading.get_ident] * 4)))

    Stepped(call, frozenset({__name__}), lambda: None).run(60.0)
    assert len(idents[0]) == 1


# --- proxy ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def echo() -> Iterator[Callable[[], socket.socket]]:
    """Connections, through a proxy, to a server that says everything twice."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(near: socket.socket) -> None:
        with near:
            while piece := near.recv(100):
                near.sendall(2 * piece)

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(near,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    made: list[socket.socket] = []
    with StallingProxy("127.0.0.1", listener.getsockname()[1]) as proxy:

        def connect() -> socket.socket:
            made.append(socket.create_connection(("127.0.0.1", proxy.port), timeout=60.0))
            return made[-1]

        connect.proxy = proxy  # type: ignore[attr-defined]
        yield connect
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for each in made:
        each.close()


def _answer(link: socket.socket, nbytes: int) -> bytes:
    said = b""
    while len(said) < nbytes and (piece := link.recv(nbytes - len(said))):
        said += piece
    return said


def test_a_proxy_that_hangs_answers_afterwards(echo: Callable[[], socket.socket]) -> None:
    link = echo()
    link.sendall(b"one")
    assert _answer(link, 6) == b"oneone"
    with echo.proxy.hang():  # type: ignore[attr-defined]
        time.sleep(0.1)  # a turn that had begun before may still pass something
        link.sendall(b"two")
        link.settimeout(0.2)
        with pytest.raises(TimeoutError):
            link.recv(6)
        link.settimeout(60.0)
    assert _answer(link, 6) == b"twotwo"


def test_a_proxy_that_stalls_answers_byte_by_byte(echo: Callable[[], socket.socket]) -> None:
    link = echo()
    with echo.proxy.stall():  # type: ignore[attr-defined]
        time.sleep(0.1)
        link.sendall(b"slow")
        assert link.recv(100) == b"s"
    assert _answer(link, 7) == b"lowslow"


def test_a_proxy_that_is_away_refuses_and_comes_back(echo: Callable[[], socket.socket]) -> None:
    link = echo()
    link.sendall(b"one")
    assert _answer(link, 6) == b"oneone"
    with echo.proxy.outage():  # type: ignore[attr-defined]
        assert link.recv(1) == b"", "what was connected is not any more"
        with pytest.raises(ConnectionError):
            echo()
    link = echo()
    link.sendall(b"again")
    assert _answer(link, 10) == b"againagain"


# --- words and card -------------------------------------------------------------------------------------------------
def test_bytes_that_differ_are_told_without_being_shown() -> None:
    assert material.difference(b"abcd", b"abXX") == "2 of 4 bytes are wrong, the first at 2"
    assert material.difference(b"abc", b"abXX") == "3 bytes and not 4"


def test_a_card_keeps_the_worst_of_a_claims_variants(tmp_path: Path) -> None:
    card = Card("quick")
    for verdict in (HELD, FAILED, HELD):
        card.add(Line("acme", claim_of("test_it_is_so[1]"), verdict, "seen" if verdict == FAILED else ""))
    card.add(Line("acme", "another", JUDGED_NOT, "a fixture unlocks it"))
    assert card.counts("acme") == {FAILED: 1, JUDGED_NOT: 1}
    assert card.table()[1:] == ["  FAILED        it is so: seen", "  not judged    another: a fixture unlocks it"]
    card.write(tmp_path / "card.json")
    written = json.loads((tmp_path / "card.json").read_text())
    assert (written["schemaVersion"], written["color"]) == (1, "red")
    assert written["message"] == "1 FAILED, 1 not judged"
    assert [claim["claim"] for claim in written["claims"]] == ["it is so", "another"]
