"""KV hints of requests on their way to a real server: whose objects they mean, and what happens where nobody executes
them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_core import Client
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.server import Server
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.hints import KEYS_A_MESSAGE, MESSAGES_WAITING_MAX, REFUSED_PAUSE_S, HintSender, messages_of
from lmcache_core_vllm.namespaces import GroupFacts, Hashing, RankFacts, namespaces_of
from lmcache_testing.embedded import embedded_server
from lmcache_testing.waiting import until

hints = pytest.importorskip("lmcache_hints.envelope")

NBYTES = 4096
HASHING = Hashing("sha256", "0")
GROUPS = [Group(0, Kind.FULL, 16, 1), Group(1, Kind.WINDOW, 16, 1, 32)]
RANKS = [
    namespaces_of(
        RankFacts("m", "", (rank, 2), True, (GroupFacts((), NBYTES), GroupFacts((("window", "32"),), NBYTES))), ""
    )
    for rank in range(2)
]
HASHES = [bytes([at]) * 32 for at in range(8)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def envelope(*actions: tuple[str, dict[str, Any]], message_id: str = "m") -> Any:
    made = [hints.KvHintAction(f"{kind} it", kind, "1.0", payload) for kind, payload in actions]
    return hints.KvHintsEnvelope("0.1", message_id, made)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with embedded_server(tmp_path, load_plugins()) as server:
        yield server


@pytest.fixture
def connect(server: Server) -> Iterator[Callable[..., HintSender]]:
    client = server.connect()
    made: list[HintSender] = []

    def connect(**options: Any) -> HintSender:
        made.append(HintSender(client, GROUPS, **options))
        return made[-1]

    yield connect
    for each in made:
        each.close()
    client.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.connect() as client:
        yield client


def stored(client: Client) -> list[list[bytes]]:
    """The request's blocks in the four namespaces; returns the keys in each."""
    found = []
    for group in GROUPS:
        for of_rank in RANKS:
            keys = HASHING.keys(HASHES, of_rank[group.number])
            result = client.store(keys, [bytes(NBYTES)] * len(keys), namespace=of_rank[group.number])
            assert result.stored == len(keys)
            found.append(keys)
    return found


def counts(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.status()["operations"]["hints"]
    return found


def reply_to(client: Client, message_id: str, actions: list[Any]) -> list[Any]:
    """What became of a message."""
    return client.call_operation("hints", hints.KvHintsEnvelope("0.1", message_id, actions), hints.HintsReply).outcomes


def test_an_action_without_objects_means_the_blocks_of_its_request_that_an_engine_would_load(
    connect: Callable[..., HintSender], client: Client
) -> None:
    """All of the first group, the window of the second; of both ranks."""
    stored(client)
    assert connect().send(envelope(("kv.pin", {"ttl_s": 60.0})), HASHES, HASHING, RANKS)
    until(lambda: counts(client)["pinned_objects"] == 2 * (8 + 2), "pins of four namespaces")


def test_an_action_that_names_objects_is_passed_on_as_it_is(connect: Callable[..., HintSender], client: Client) -> None:
    keys = stored(client)
    payload = {"namespace": f"{RANKS[0][0].id:016x}", "keys": [keys[0][0].hex()]}
    assert connect().send(envelope(("kv.pin", payload)), HASHES, HASHING, RANKS)
    until(lambda: counts(client)["pinned_objects"] == 1, "one pin")


def test_nothing_is_meant_of_a_request_that_may_not_be_cached(
    connect: Callable[..., HintSender], client: Client
) -> None:
    keys = stored(client)
    payload = {"namespace": f"{RANKS[0][0].id:016x}", "keys": [keys[0][0].hex()]}
    assert connect().send(envelope(("kv.pin", {}), ("kv.retain", payload)), HASHES, None, RANKS)
    until(lambda: counts(client)["retained_objects"] == 1, "what it names itself")
    assert counts(client)["pinned_objects"] == 0


def test_a_release_names_no_objects(connect: Callable[..., HintSender], client: Client) -> None:
    stored(client)
    sender = connect()
    sender.send(envelope(("kv.retain", {"session": "s"}), message_id="1"), HASHES, HASHING, RANKS)
    until(lambda: counts(client)["retained_objects"] == 20, "what it retains")
    sender.send(envelope(("kv.release", {"session": "s"}), message_id="2"), HASHES, HASHING, RANKS)
    until(lambda: counts(client)["retained_objects"] == 0, "the release")


def test_a_rejected_hint_is_logged_once(
    connect: Callable[..., HintSender], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    sender = connect()
    with caplog.at_level(logging.WARNING, "vllm.lmcache_core"):
        for number in range(3):
            sender.send(envelope(("kv.teleport", {}), message_id=f"{number}"), HASHES, HASHING, RANKS)
        sender.send(envelope(("kv.retain", {}), message_id="last"), HASHES, HASHING, RANKS)
        until(lambda: counts(client)["counts"]["missing"], "the last hint")
    assert [record.getMessage() for record in caplog.records] == [
        "the server rejects a KV hint: 'kv.teleport' is no known action: use one of "
        "kv.fetch, kv.prefetch, kv.wait, kv.pin, kv.retain, kv.demote, kv.share, kv.release"
    ]


def test_a_server_without_the_package_is_told_once_in_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    registry = load_plugins({"LMCACHE_CORE_PLUGINS": ""})
    with embedded_server(tmp_path, registry) as server, server.connect() as client:
        sender = HintSender(client, GROUPS, clock)
        with caplog.at_level(logging.WARNING, "vllm.lmcache_core"):
            assert sender.send(envelope(("kv.retain", {})), HASHES, HASHING, RANKS)
            until(lambda: caplog.records, "the refusal")
            assert not sender.send(envelope(), HASHES, HASHING, RANKS)
            clock.now += REFUSED_PAUSE_S
            assert sender.send(envelope(("kv.retain", {})), HASHES, HASHING, RANKS)
            until(lambda: not sender.send(envelope(), HASHES, HASHING, RANKS), "another refusal")
        sender.close()
    (record,) = caplog.records
    assert "install lmcache-hints where the server runs" in record.getMessage()


class SlowClient:
    """Its server answers nothing until the test lets it."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.messages: list[dict[str, Any]] = []

    def call_operation(self, operation: str, message: dict[str, Any], reply: object) -> dict[str, Any]:
        self.messages.append(message)
        self.answers.wait(60)
        return {"outcomes": []}


def test_a_slow_server_gets_a_bounded_number_of_messages_and_nobody_waits() -> None:
    client = SlowClient()
    sender = HintSender(client, GROUPS)  # type: ignore[arg-type]
    assert sender.send(envelope(message_id="first"), HASHES, HASHING, RANKS)
    until(lambda: client.messages, "the first message")
    taken = [
        sender.send(envelope(message_id=f"{at}"), HASHES, HASHING, RANKS) for at in range(MESSAGES_WAITING_MAX + 5)
    ]
    assert taken == [True] * MESSAGES_WAITING_MAX + [False] * 5
    client.answers.set()
    until(lambda: len(client.messages) == 1 + MESSAGES_WAITING_MAX, "the others")
    sender.close()


def test_a_long_prompt_takes_several_messages() -> None:
    given = {"protocol_version": "0.1", "message_id": "m", "actions": []}
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": {"session": "s"}}
    pages = [{"keys": ["00"] * count} for count in (KEYS_A_MESSAGE, 10, 20)]
    found = list(messages_of({**given, "actions": [action, {**action, "action_id": "b"}]}, pages))
    assert [each["message_id"] for each in found] == ["m", "m/1", "m/2", "m/3"]
    assert [[action["action_id"] for action in each["actions"]] for each in found] == [
        ["a"], ["a/1", "a/2"], ["b"], ["b/1", "b/2"],
    ]  # fmt: skip
    assert all(action["payload"]["session"] == "s" for each in found for action in each["actions"])


def test_a_hint_that_is_no_envelope_costs_a_line_in_the_log(
    connect: Callable[..., HintSender], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    stored(client)
    sender = connect()
    with caplog.at_level(logging.WARNING, "vllm.lmcache_core"):
        assert sender.send({"actions": 1}, HASHES, HASHING, RANKS)
        assert sender.send(envelope(("kv.retain", {})), HASHES, HASHING, RANKS)
        until(lambda: counts(client)["retained_objects"] == 20, "the hint behind it")
    assert "was not understood" in caplog.records[0].getMessage()
