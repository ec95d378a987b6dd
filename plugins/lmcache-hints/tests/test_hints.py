"""Hints to a real server with a disk tier: what they do is seen in the pool and on the disk."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from lmcache_core import Client, Layout, Namespace, UsageError
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.server.server import Server
from lmcache_core.tokens.keys import chunk_keys, keys_from_block_hashes
from lmcache_hints import executor
from lmcache_hints.delays import Delays
from lmcache_hints.envelope import ActionOutcome, HintsReply, KvHintAction, KvHintsEnvelope, Outcome, Target
from lmcache_hints.executor import Action, Executor
from lmcache_hints.holdings import Objects
from lmcache_hints.limits import DELAYS_NEEDED
from lmcache_hints.node import Node
from lmcache_hints.settings import HintsSettings
from lmcache_testing import OperationContract, PluginPackageContract
from lmcache_testing.embedded import NAMELESS, embedded_server
from lmcache_testing.waiting import WAIT_S, until

NBYTES = 64 << 10
NAMESPACE = Namespace("model", Layout("uint8", (NBYTES,)), label="model/u8")
POOL_BYTES = 16 << 20


class World:
    """A server with a disk, and a client of it."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server = server
        self.client = client
        self.numbers = iter(range(1_000_000))

    def keys(self, count: int) -> list[bytes]:
        return [next(self.numbers).to_bytes(32, "big") for _ in range(count)]

    def stored(self, count: int) -> list[bytes]:
        """In the pool and on the disk."""
        keys = self.keys(count)
        result = self.client.store(keys, [key * (NBYTES // 32) for key in keys], namespace=NAMESPACE)
        assert result.stored == count
        assert all(each.stored for each in self.client.wait_stored(keys, namespace=NAMESPACE))
        return keys

    def flood(self) -> None:
        """As many objects as the pool has room for, and half as many again."""
        for _ in range(3):
            self.stored(128)

    def on_disk(self, count: int) -> list[bytes]:
        """On the disk alone."""
        keys = self.stored(count)
        assert self.hint("kv.demote", keys).outcome is Outcome.ACCEPTED
        assert self.in_memory(keys) == 0
        return keys

    def in_memory(self, keys: Sequence[bytes]) -> int:
        return self.client.lookup(keys, namespace=NAMESPACE, prefix=False, ask=False).hits

    def send(self, *actions: KvHintAction, message_id: str = "", version: str = "0.1") -> list[ActionOutcome]:
        envelope = KvHintsEnvelope(version, message_id or f"message {next(self.numbers)}", list(actions))
        return self.client.call_operation("hints", envelope, HintsReply).outcomes

    def hint(self, name: str, keys: Sequence[bytes] = (), message_id: str = "", **payload: Any) -> ActionOutcome:
        return self.send(action(name, keys, **payload), message_id=message_id)[0]

    def done(self, name: str, keys: Sequence[bytes], **payload: Any) -> ActionOutcome:
        """Asked again until it is no longer deferred."""
        message_id = f"message {next(self.numbers)}"

        def ended() -> ActionOutcome | None:
            outcome = self.hint(name, keys, message_id, **payload)
            return None if outcome.outcome is Outcome.DEFERRED else outcome

        return until(ended, f"the end of {name}")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.status()["operations"]["hints"]
        return found


def action(name: str, keys: Sequence[bytes] = (), version: str = "1.0", **payload: Any) -> KvHintAction:
    objects = {"namespace": "model/u8", "keys": [key.hex() for key in keys]} if keys else {}
    return KvHintAction(f"{name} it", name, version, objects | payload)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    registry = load_plugins()
    tables = {
        "l1": NAMELESS | {"size_bytes": POOL_BYTES},
        "l2": {"disk": {"type": "fs", "path": str(tmp_path / "disk")}},
        "operations": {"hints": {}},
    }
    with embedded_server(tmp_path, registry, **tables) as server:
        settings = server.parts.settings
        with Client.connect(settings.name, runtime_dir=settings.runtime_dir) as client:
            assert client.register_layout(NAMESPACE)
            yield World(server, client)


def test_fetched_objects_are_in_memory(world: World) -> None:
    keys = world.on_disk(40)
    outcome = world.done("kv.fetch", keys)
    assert (outcome.outcome, outcome.done, outcome.nbytes) == (Outcome.ACCEPTED, 40, 40 * NBYTES)
    assert world.in_memory(keys) == 40


def test_what_no_tier_has_is_missing(world: World) -> None:
    known, unknown = world.on_disk(2), world.keys(2)
    assert world.done("kv.fetch", unknown).outcome is Outcome.MISSING
    outcome = world.done("kv.fetch", [*known, *unknown])
    assert (outcome.outcome, outcome.done) == (Outcome.CLIPPED, 2)


def test_a_prefetch_waits_for_its_time(world: World) -> None:
    keys = world.on_disk(4)
    outcome = world.hint("kv.prefetch", keys, "later", after_s=3600)
    assert outcome.outcome is Outcome.DEFERRED
    assert "3600" in outcome.reason
    assert world.done("kv.prefetch", keys, after_s=0.2).outcome is Outcome.ACCEPTED
    assert world.in_memory(keys) == 4
    assert world.hint("kv.prefetch", keys, "later", after_s=3600).outcome is Outcome.DEFERRED


def test_the_same_message_does_nothing_twice(world: World) -> None:
    keys = world.stored(4)
    first = world.hint("kv.demote", keys, "once")
    assert first.outcome is Outcome.ACCEPTED
    assert world.done("kv.fetch", keys).outcome is Outcome.ACCEPTED
    assert world.hint("kv.demote", keys, "once") == first
    assert world.in_memory(keys) == 4


def test_a_message_id_for_other_actions_is_rejected(world: World) -> None:
    keys = world.stored(4)
    world.hint("kv.pin", keys, "id")
    outcome = world.hint("kv.demote", keys, "id")
    assert outcome.outcome is Outcome.REJECTED
    assert "message_id" in outcome.reason
    assert world.in_memory(keys) == 4


def test_pinned_objects_outlive_a_flood_and_released_ones_do_not(world: World) -> None:
    keys = world.stored(8)
    assert world.hint("kv.pin", keys, "pin", ttl_s=3600).outcome is Outcome.ACCEPTED
    world.flood()
    assert world.in_memory(keys) == 8
    released = world.send(KvHintAction("end", "kv.release", "1.0", {"message_id": "pin"}))[0]
    assert released.outcome is Outcome.ACCEPTED
    until(lambda: world.flood() or world.in_memory(keys) == 0, "the end of the term")


def test_what_two_hints_pin_stays_until_both_have_ended(world: World) -> None:
    keys = world.stored(8)
    world.hint("kv.pin", keys, session="a")
    world.hint("kv.pin", keys[:4], session="b")
    world.hint("kv.release", session="a")
    until(lambda: world.flood() or world.in_memory(keys[4:]) == 0, "the end of the term")
    assert world.in_memory(keys[:4]) == 4
    assert world.status()["pinned_objects"] == 4


def test_a_release_leaves_what_others_pinned(world: World) -> None:
    keys = world.stored(8)
    world.client.pin(keys, namespace=NAMESPACE, ttl_s=3600)
    world.hint("kv.pin", keys, session="a", ttl_s=1)
    world.hint("kv.release", session="a")
    until(lambda: world.status()["pinned_objects"] == 0, "the end of the pins")
    world.flood()
    assert world.in_memory(keys) == 8


def test_hundreds_of_objects_are_pages_for_the_pool(world: World) -> None:
    keys = world.on_disk(200)
    assert world.done("kv.prefetch", keys, keep_s=0).outcome is not Outcome.REJECTED
    assert world.hint("kv.demote", keys).outcome is not Outcome.REJECTED


def test_a_session_s_actions_end_no_others_of_one_message(world: World) -> None:
    keys = world.on_disk(2)
    envelope = action("kv.prefetch", keys[:1], session="s"), action("kv.fetch", keys[1:], session="s")
    until(lambda: all(each.outcome is Outcome.ACCEPTED for each in world.send(*envelope, message_id="m")), "both")


def test_a_prefetch_of_what_no_tier_has_holds_nothing(world: World) -> None:
    assert world.done("kv.prefetch", world.keys(40)).outcome is Outcome.MISSING
    assert world.status()["retained_bytes"] == 0


def test_what_was_cleared_is_no_longer_held(world: World) -> None:
    world.hint("kv.retain", world.stored(40), ttl_s=3600)
    world.hint("kv.pin", world.stored(8), ttl_s=3600)
    world.client.clear()
    until(lambda: world.status()["retained_bytes"] == 0 == world.status()["pinned_bytes"], "the budgets")


def test_a_layout_other_than_the_namespace_s_is_rejected(world: World) -> None:
    outcome = world.hint("kv.retain", world.stored(4), layout={"dtype": "uint8", "shape": [1]})
    assert outcome.outcome is Outcome.REJECTED
    assert "has the layout" in outcome.reason


def test_a_wrong_layout_of_an_unused_namespace_keeps_no_engine_out(world: World) -> None:
    later = Namespace("later", Layout("uint8", (4096,)))
    layout = {"dtype": "uint8", "shape": [8192]}
    world.done("kv.fetch", world.keys(2), namespace=f"{later.id:016x}", layout=layout)
    assert world.client.register_layout(later)


def test_what_is_retained_twice_is_charged_once(world: World) -> None:
    keys = world.stored(16)
    for _ in range(20):
        world.hint("kv.retain", keys, ttl_s=3600)
    assert world.status()["retained_bytes"] == 16 * NBYTES


def test_too_many_tokens_are_rejected(world: World) -> None:
    payload = {"namespace_digest": NAMESPACE.digest.hex(), "token_ids": list(range(9000)), "chunk_tokens": 1}
    outcome = world.send(KvHintAction("a", "kv.fetch", "1.0", payload))[0]
    assert outcome.outcome is Outcome.REJECTED
    assert "more than 8192 objects" in outcome.reason


def test_a_label_of_an_engine_that_came_back_names_one_namespace(world: World) -> None:
    keys = world.stored(2)
    world.client.end_session()
    assert world.client.register_layout(NAMESPACE)
    assert world.hint("kv.pin", keys).outcome is Outcome.ACCEPTED


def test_pins_are_clipped_to_the_budget(world: World) -> None:
    keys = world.stored(64)  # 4 MiB of a pool of 16; a tenth may be pinned
    outcome = world.hint("kv.pin", keys)
    assert (outcome.outcome, outcome.done) == (Outcome.CLIPPED, POOL_BYTES // 10 // NBYTES)
    assert "pinned_share" in outcome.reason
    rejected = world.hint("kv.pin", world.stored(4))
    assert rejected.outcome is Outcome.REJECTED
    assert "pinned_share" in rejected.reason


def test_retained_objects_are_evicted_last(world: World) -> None:
    keys = world.stored(16)
    assert world.hint("kv.retain", keys, ttl_s=3600).outcome is Outcome.ACCEPTED
    for _ in range(6):
        others = world.stored(128)  # half of the pool, and so more than all of it by now
        before = world.status()["touched"]
        until(lambda before=before: world.status()["touched"] > before, "a touch")
    assert world.in_memory(keys) == 16
    assert world.in_memory(others) == 128
    world.flood()  # all of the pool at once: they give way
    assert world.in_memory(keys) < 16


def test_demoted_objects_stay_on_their_tier_and_what_no_tier_has_stays_in_memory(world: World) -> None:
    keys = world.stored(4)
    world.client.tiers_remove("disk")
    outcome = world.hint("kv.demote", keys)
    assert outcome.outcome is Outcome.MISSING
    assert "on no tier" in outcome.reason
    assert world.in_memory(keys) == 4


def test_shared_objects_are_on_a_tier(world: World) -> None:
    keys = world.stored(4)
    assert world.done("kv.share", keys, tiers=["disk"]).outcome is Outcome.ACCEPTED
    assert world.done("kv.share", world.keys(2)).outcome is Outcome.MISSING
    unknown = world.hint("kv.share", keys, tiers=["elsewhere"])
    assert unknown.outcome is Outcome.REJECTED
    assert "elsewhere" in unknown.reason


def test_a_waiting_session_finds_its_objects_again(world: World) -> None:
    """Until delays are known, everything is loaded at once; then just before the shortest of them."""
    keys = world.on_disk(4)
    outcome = world.done("kv.wait", keys, session="s", session_class="tool")
    assert outcome.outcome is Outcome.ACCEPTED
    assert world.in_memory(keys) == 4


def test_a_delay_is_learned_from_those_who_came_back(world: World) -> None:
    sessions = [f"session {number}" for number in range(8)]
    for session in sessions:
        world.hint("kv.wait", world.keys(1), session=session, session_class="build")
    time.sleep(1.5)  # this is the delay
    for session in sessions:
        assert world.hint("kv.release", session=session).outcome is Outcome.ACCEPTED
    outcome = world.hint("kv.wait", world.on_disk(1), session="s", session_class="build")
    assert outcome.outcome is Outcome.DEFERRED
    begins = re.fullmatch(r"it begins in (.*) s", outcome.reason)
    assert begins is not None
    assert float(begins[1]) >= 1.0  # longer where the machine is slow: that was their delay, too
    assert world.done("kv.wait", world.on_disk(1), session="t", session_class="other").outcome is Outcome.ACCEPTED


def test_a_session_that_came_back_is_not_prefetched_for(world: World) -> None:
    keys = world.on_disk(2)
    world.hint("kv.prefetch", keys, "wait", session="s", after_s=0.5)
    world.hint("kv.release", session="s")
    until(lambda: world.status()["waiting"] == 0, "the job")
    assert world.in_memory(keys) == 0


@pytest.mark.parametrize(
    ("name", "version", "payload", "reason"),
    [
        ("kv.evaporate", "1.0", {}, "is no known action: use one of kv.fetch"),
        ("kv.fetch", "2.0", {}, "kv.fetch has no version '2.0' here: send 1.0"),
        ("kv.fetch", "1.0", {"block_hashes": [12345], "source_control_endpoint": "tcp://a"}, "payload of kv.fetch"),
        ("kv.fetch", "1.0", {"namespace": "model/u8"}, "names its objects by nothing"),
        ("kv.fetch", "1.0", {"namespace": "model/u8", "token_ids": [1]}, "token_ids need namespace_digest"),
        ("kv.fetch", "1.0", {"namespace": "nobody", "keys": ["00" * 32]}, "no namespace here has the label 'nobody'"),
        ("kv.fetch", "1.0", {"namespace": "00" * 8, "keys": ["00" * 32]}, "send its layout"),
        ("kv.fetch", "1.0", {"keys": ["00" * 32]}, "it names no namespace"),
        ("kv.pin", "1.0", {"namespace": "model/u8", "keys": ["00" * 32], "ttl_s": -1}, "ttl_s"),
        ("kv.pin", "1.0", {"namespace": "model/u8", "keys": ["0" * 63]}, "keys"),
        ("kv.release", "1.0", {}, "neither a message_id nor a session"),
    ],
)
def test_what_is_not_understood_is_rejected_with_its_reason(
    world: World, name: str, version: str, payload: dict[str, Any], reason: str
) -> None:
    outcome = world.send(KvHintAction("a", name, version, payload))[0]
    assert outcome.outcome is Outcome.REJECTED
    assert reason in outcome.reason


def test_an_unknown_version_of_the_envelope_is_rejected_action_by_action(world: World) -> None:
    outcomes = world.send(action("kv.fetch", world.keys(1)), version="0.2")
    assert [each.outcome for each in outcomes] == [Outcome.REJECTED]
    assert "0.2" in outcomes[0].reason


def test_an_envelope_with_unknown_fields_is_refused(world: World) -> None:
    import msgspec

    class Later(msgspec.Struct):
        protocol_version: str = "0.1"
        message_id: str = "m"
        actions: list[Any] = []
        more: int = 1

    with pytest.raises(UsageError, match="more"):
        world.client.call_operation("hints", Later(), HintsReply)


def test_tokens_and_block_hashes_name_the_objects_that_an_engine_stored(world: World) -> None:
    digest = NAMESPACE.digest.hex()
    tokens = list(range(64))
    hashes = [bytes([n]) * 32 for n in range(4)]
    for keys, payload in (
        (chunk_keys(tokens, NAMESPACE, 16), {"token_ids": tokens, "chunk_tokens": 16}),
        (keys_from_block_hashes(hashes, NAMESPACE), {"block_hashes": [each.hex() for each in hashes]}),
    ):
        world.client.store(keys, [key * (NBYTES // 32) for key in keys], namespace=NAMESPACE)
        outcome = world.send(KvHintAction("pin", "kv.pin", "1.0", {"namespace_digest": digest, **payload}))[0]
        assert (outcome.outcome, outcome.done) == (Outcome.ACCEPTED, 4)


def test_a_namespace_that_nobody_uses_is_named_by_id_and_layout(world: World) -> None:
    keys = world.on_disk(2)
    world.client.clear()
    layout = {"dtype": "uint8", "shape": [NBYTES]}
    outcome = world.done("kv.fetch", keys, namespace=f"{NAMESPACE.id:016x}", layout=layout)
    assert outcome.outcome is Outcome.ACCEPTED


def test_a_tenant_takes_its_share_of_the_budget_at_most(world: World) -> None:
    world.client.quota_set("t", {"l1": {"limit_bytes": POOL_BYTES}}, [NAMESPACE.id])
    outcome = world.hint("kv.pin", world.stored(64))
    assert (outcome.outcome, outcome.done) == (Outcome.CLIPPED, POOL_BYTES // 20 // NBYTES)
    assert "tenant_share" in outcome.reason


def test_the_command_sends_a_hint_and_shows_its_outcome(world: World) -> None:
    keys = world.stored(2)
    settings = world.server.parts.settings
    command = [sys.executable, "-m", "lmcache_core", "hint", "pin", "--namespace", "model/u8"]
    command += ["--name", settings.name, "--runtime-dir", str(settings.runtime_dir)]
    done = subprocess.run([*command, "--key", keys[0].hex(), "--key", keys[1].hex()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "accepted" in done.stdout
    assert "2 of 2" in done.stdout
    missing = subprocess.run([*command, "--key", "ff" * 32], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "missing" in missing.stdout


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=WAIT_S).close()
        return True
    return False


def test_a_hint_comes_over_http(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_http")
    token = tmp_path / "token"
    token.write_text("secret-of-the-test\n")
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tables = {"http": {"host": "127.0.0.1", "port": port, "token_file": str(token)}}
    with embedded_server(tmp_path, load_plugins(), **tables):
        until(lambda: answers(port), "the HTTP helper")
        envelope = {
            "protocol_version": "0.1",
            "message_id": "m",
            "actions": [{"action_id": "a", "action_type": "kv.nothing", "action_version": "1.0", "payload": {}}],
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/operations/hints",
            json.dumps(envelope).encode(),
            {"Authorization": "Bearer secret-of-the-test", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            reply = json.load(answer)
    assert reply["message_id"] == "m"
    assert reply["outcomes"][0]["outcome"] == "rejected"


def test_the_server_ends_while_loads_are_scheduled(world: World) -> None:
    world.hint("kv.prefetch", world.on_disk(2), after_s=3600)
    world.server.stop()


class TestPackage(PluginPackageContract):
    distribution = "lmcache-hints"


class TestHints(OperationContract):
    component = "hints"

    @pytest.fixture
    def sample_request(self) -> KvHintsEnvelope:
        return KvHintsEnvelope("0.1", "m", [action("kv.release", session="nobody")])


def test_a_second_wait_without_a_return_is_no_delay() -> None:
    delays = Delays()
    for number in range(DELAYS_NEEDED):
        delays.left(f"{number}", "build", 0.0)
        delays.returned(f"{number}", 10.0 + number)
    assert (delays.shortest("build"), delays.most("build")) == (10.0, 10.0 + DELAYS_NEEDED - 2)
    delays.left("s", "build", 100.0)
    delays.left("s", "build", 900.0)  # it was back in between, and nobody knows when
    delays.returned("s", 905.0)
    assert (delays.shortest("build"), delays.most("build")) == (5.0, 10.0 + DELAYS_NEEDED - 2)


def test_a_session_that_waits_again_teaches_no_delay(world: World) -> None:
    keys = world.on_disk(1)
    for _ in range(2 * DELAYS_NEEDED):
        world.hint("kv.wait", keys, session="s", session_class="build")
    assert world.status()["classes"] == 0


@pytest.fixture
def collector() -> Iterator[None]:
    """A server collects no cycles that have lived for long."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_what_is_forgotten_stays_with_no_session_and_in_no_cycle(
    world: World, monkeypatch: pytest.MonkeyPatch, collector: None
) -> None:
    monkeypatch.setattr(executor, "ACTIONS_REMEMBERED", 60)
    (key,) = world.stored(1)
    for number in range(100):
        demote = action("kv.demote", [key], session=f"s{number}")
        world.send(*(msgspec.structs.replace(demote, action_id=f"{at}") for at in range(5)))
    assert world.status()["remembered"] <= 11
    assert sum(type(each) is Action for each in gc.get_objects()) <= 5 * 11


def test_hints_are_rejected_while_too_many_hold_something_and_taken_again_after_a_release(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "ACTIONS_REMEMBERED", 20)
    keys = world.stored(1)
    sent = [f"pin {number}" for number in range(11)]
    outcomes = [world.hint("kv.pin", keys, message_id, ttl_s=60.0).outcome for message_id in sent]
    assert set(outcomes) == {Outcome.ACCEPTED}
    refused = world.hint("kv.pin", keys, ttl_s=60.0)
    assert refused.outcome is Outcome.REJECTED
    assert refused.reason.startswith("too many hints have not ended yet")
    assert world.hint("kv.pin", keys, sent[0], ttl_s=60.0).outcome is Outcome.ACCEPTED, "what became of it"
    assert world.send(action("kv.release", message_id=sent[0]))[0].outcome is Outcome.ACCEPTED
    assert world.hint("kv.pin", keys, ttl_s=60.0).outcome is Outcome.ACCEPTED


class Still:
    """A node whose memory has whatever is named."""

    def pool_bytes(self) -> int:
        return POOL_BYTES

    def objects_of(self, target: Target) -> Objects:
        return Objects(NAMESPACE.id, NAMESPACE.layout, (bytes(32),), "", known=True)

    def there(self, namespace: int, keys: Sequence[bytes]) -> list[bytes]:
        return list(keys)

    def used(self, namespace: int, keys: Sequence[bytes], _term_s: float) -> list[bytes]:
        return list(keys)

    pin_again = used


def test_status_waits_for_no_hint() -> None:
    takes, goes_on = threading.Event(), threading.Event()

    def clock() -> float:
        if threading.current_thread() is sender:  # while it has what it changes for itself
            takes.set()
            assert goes_on.wait(WAIT_S)
        return 0.0

    hints = Executor(HintsSettings(), cast("Node", Still()), clock)
    envelope = KvHintsEnvelope("0.1", "m", [action("kv.retain", [bytes(32)], session="s")])
    sender = threading.Thread(target=hints.take, args=(envelope,))
    sender.start()
    try:
        assert takes.wait(WAIT_S)
        assert hints.status()["waiting"] == 0
    finally:
        goes_on.set()
        sender.join(WAIT_S)
        hints.close()


def test_a_load_larger_than_the_budget_is_rejected_at_once(world: World) -> None:
    layout = {"dtype": "uint8", "shape": [POOL_BYTES]}
    outcome = world.send(
        KvHintAction("a", "kv.fetch", "1.0", {"namespace": "00000000000000ab", "layout": layout, "keys": ["00" * 32]})
    )[0]
    assert outcome.outcome is Outcome.REJECTED
    assert "loading_share" in outcome.reason
