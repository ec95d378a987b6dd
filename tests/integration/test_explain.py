"""Why did it miss? Each reason is brought about on a server, and asked for by another process, over the wire."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lmcache_core.cli.main import main
from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.client.why import explaining, stored
from lmcache_core.errors import LimitError, UsageError
from lmcache_core.kernel.sessions import SERVER_SESSION
from lmcache_core.limits import EXPLAINS_PER_SESSION_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.waiting import wait_stored as stored_waits
from lmcache_core.tiers.flow import whereabouts
from lmcache_core.tokens.keys import chunk_keys
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json, embedded_server
from lmcache_testing.waiting import until

pytest.importorskip("lmcache_mock")

MIB = 1 << 20
NS = Namespace("model", Layout("uint8", (65536,)))
NBYTES = NS.layout.nbytes
SLOTS = 4 * MIB // NBYTES
TIER = {"cold": {"type": "mock", "deadline_s": 0.3}}
NO_HEADROOM = {"size_bytes": 4 * MIB, "backing": "memfd", "watermark": 1.0}


def key(name: object) -> bytes:
    return str(name).encode().rjust(32, b"\0")


class World:
    """A server in this process, a client of it, and a way to ask from another process."""

    def __init__(self, folder: Path, stack: ExitStack, **settings: object) -> None:
        self.run = folder / "run"
        self.stack = stack
        self.server = stack.enter_context(embedded_server(folder, **{"l1": NO_HEADROOM, "drain_s": 0.2, **settings}))
        self.name = self.server.parts.settings.name
        self.client = self.another()
        self.client.register_layout(NS)

    def another(self, **options: Any) -> Client:
        return self.stack.enter_context(Client.connect(self.name, runtime_dir=self.run, **options))

    def store(self, *names: object) -> list[bytes]:
        keys = [key(name) for name in names]
        self.client.store(keys, [bytes(NBYTES)] * len(keys), namespace=NS)
        return keys

    def overflow(self) -> None:
        """Push out everything that may go."""
        self.store(*(uuid4().hex[:16] for _ in range(2 * SLOTS)))

    def faults(self, *rules: str) -> None:
        assert self.server.tiering is not None
        first, *_ = self.server.tiering.tiers
        adapter: Any = first.adapter
        adapter.set_faults(*rules)

    def tier(self) -> Json:
        tier: Json = self.client.status()["tiers"]["tiers"][0]
        return tier

    def holds(self, objects: int) -> None:
        until(lambda: self.tier()["objects"] >= objects, f"{objects} objects in the tier")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "lmcache_core.cli.main", "explain", "--name", self.name]
        argv += ["--runtime-dir", str(self.run), "--dtype", "uint8", "--shape", str(NBYTES), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=dict(os.environ))

    def ask(self, name: object) -> Json:
        """The answer that another process gets about one key."""
        done = self.command("--model", "model", "--json", key(name).hex())
        assert done.returncode == 0, done.stderr
        (told,) = json.loads(done.stdout)
        assert told["key"] == key(name).hex()
        return dict(told)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:
        yield lambda **settings: World(tmp_path, stack, **settings)


# --- one function for each reason: it loses the key "k" ------------------------------------------------------------


def never_stored(at: World) -> None:
    at.store("another")


def evicted(at: World) -> None:
    at.store("k")
    at.overflow()


def cleared(at: World) -> None:
    at.store("k")
    assert at.client.clear(NS).objects == 1


def cleared_while_written(at: World) -> None:
    lease = at.client.prepare_store([key("k")], namespace=NS)
    assert at.client.clear(NS).doomed == 1
    lease.abort()


def expired(at: World) -> None:
    lease = at.client.prepare_store([key("k")], namespace=NS)
    until(lambda: at.client.status()["l1"]["bytes_by_state"]["quarantined"], "the expiry")
    lease.abort()


def being_written(at: World) -> None:
    at.stack.callback(at.client.prepare_store([key("k")], namespace=NS).abort)


def aborted(at: World) -> None:
    at.client.prepare_store([key("k")], namespace=NS).abort()


def writer_died(at: World) -> None:
    code = (
        "import sys; from lmcache_core.client.client import Client\n"
        "from lmcache_core.pool.layout import Layout; from lmcache_core.tokens.namespace import Namespace\n"
        f"ns = Namespace('model', Layout('uint8', ({NBYTES},)))\n"
        "client = Client.connect(sys.argv[1], runtime_dir=sys.argv[2])\n"
        f"lease = client.prepare_store([bytes.fromhex('{key('k').hex()}')], namespace=ns)\n"
        "print('granted', flush=True); sys.stdin.readline()\n"
    )
    argv = [sys.executable, "-c", code, at.name, str(at.run)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "granted\n"
        worker.kill()
        worker.wait()
    until(lambda: not at.client.status()["l1"]["leases_by_kind"]["write"], "its death")


def no_room(at: World) -> None:
    kept = at.store(*range(SLOTS))
    lease = at.client.prepare_retrieve(kept, namespace=NS)
    at.stack.callback(lease.finish)
    assert at.client.store([key("k")], [bytes(NBYTES)], namespace=NS).statuses == [Status.FULL]


def quota(at: World) -> None:
    lease = at.client.prepare_store([key(number) for number in range(4)], namespace=NS)
    at.stack.callback(lease.abort)
    until(lambda: at.client.status()["l1"]["bytes_by_state"]["quarantined"], "the expiry")
    assert at.client.store([key("k")], [bytes(NBYTES)], namespace=NS).statuses == [Status.QUOTA]


def other_layout(at: World) -> None:
    """As after an adoption, before the namespace was used again: nobody can register a second layout for it."""
    wide = Layout("uint8", (2 * NBYTES,))
    at.client.register_layout(Namespace("wide", wide))
    server, stored = at.server, threading.Event()

    def store() -> None:
        layout_id, now = server.parts.l1.layout_id(wide, frozenset), server.parts.clock.now
        granted = server.parts.kernel.prepare_store(SERVER_SESSION, NS.id, layout_id, [key("k")], now)
        server.parts.kernel.commit_store(SERVER_SESSION, granted.lease_id, now)
        stored.set()

    server.parts.loop.call(store)
    assert stored.wait(60)


def throttled(at: World) -> None:
    def lost() -> int:
        return int(at.client.status()["tiers"]["stores"]["counts"].get("lost_throttled", 0))

    at.faults("store hang")
    while not lost():
        at.store(uuid4().hex[:16])  # until the lanes are full, and so is what waits for them
    at.store("k")
    before = lost()
    while lost() < before + 6:  # the oldest goes first, and no more than four wait
        at.store(uuid4().hex[:16])
    at.overflow()


def tier_error_at_lookup(at: World) -> None:
    at.faults("exists gone")


def tier_error_at_store(at: World) -> None:
    at.faults("store error")
    at.store("k")
    until(lambda: at.client.status()["tiers"]["stores"]["counts"].get("lost_tier_error"), "the failure")
    at.overflow()


def tier_hangs(at: World) -> None:
    at.faults("exists hang")


def damaged(at: World) -> None:
    at.store("k")
    at.holds(1)
    at.client.clear(NS)
    at.faults("load flipped_bits")
    assert at.client.lookup([key("k")], namespace=NS, wait_s=10.0).hits == 0
    assert at.tier()["damage"]["suspect"] == 1


def evicted_from_tier(at: World) -> None:
    for number in range(12):
        at.store(number or "k")
        until(lambda: not any(at.client.status()["tiers"]["stores"]["dirty"].values()), "the store")
    until(lambda: at.tier()["deletes"]["evicted"], "an eviction there")
    at.client.clear(NS)


def outrun(at: World) -> None:
    """A slow tier, whose queue is not full."""
    at.faults("store hang")
    at.store(*range(20))  # its lanes have some of these
    at.store("k")
    at.overflow()
    until(lambda: at.client.explain([key("k")], namespace=NS)[0].reason == "throttled", "its turn")


def gone_from_tier(at: World) -> None:
    """The store policy keeps objects on the tier alone, and somebody emptied it."""
    at.store("k")
    at.holds(1)
    assert at.server.tiering is not None
    (only,) = at.server.tiering.tiers
    adapter: Any = only.adapter
    until(lambda: not at.client.status()["l1"]["objects_by_state"]["ready"], "the L1 to drop it")
    for found in adapter.scan(None, time.monotonic() + 10).entries:
        adapter.memory.delete([found.key], time.monotonic() + 10)


@pytest.mark.parametrize(
    ("lose", "reason", "words", "settings"),
    [
        (never_stored, "never_stored", "it was never stored", {}),
        (evicted, "evicted", "evicted from the pool .* ago by lru to make room for session", {}),
        (cleared, "cleared", "cleared .* ago by session", {}),
        (cleared_while_written, "cleared", "cleared .* ago by session", {}),
        (expired, "expired", "did not commit in time: its lease expired .* ago", {"lease": {"write_ttl_s": 0.2}}),
        (being_written, "being_written", "being written now", {}),
        (aborted, "aborted", r"its writer \(session \d+.*gave up .* ago", {}),
        (writer_died, "writer_died", r"its writer \(session \d+\) died before the commit .* ago", {}),
        (no_room, "no_room", "the pool was full and nothing could be evicted",
         {"holding": {"read_fraction_max": 1.0, "read_fraction_per_session_max": 1.0}}),
        (quota, "quota", "quota", {"lease": {"write_ttl_s": 0.2}, "quarantine": {"fraction_per_uid_max": 0.03}}),
        (other_layout, "other_layout", "another layout", {}),
        (throttled, "throttled", "tier cold: dropped by its full queue .* ago",
         {"l2": {"cold": {"type": "mock", "deadline_s": 600}}}),
        (tier_error_at_lookup, "tier_error", r"tier cold: did not answer \(tier_error\): .+", {"l2": TIER}),
        (tier_error_at_store, "tier_error", "tier cold: failed .* ago: .+", {"l2": TIER}),
        (tier_hangs, "late", r"tier cold: did not answer \(late\)", {"l2": TIER}),
        (damaged, "damaged", "tier cold: damaged there, found .* ago: .+", {"l2": TIER}),
        (evicted_from_tier, "cleared", "tier cold: evicted .* ago by lru",
         {"l2": {"cold": {**TIER["cold"], "capacity_bytes": 8 * NBYTES}}}),
        (gone_from_tier, "gone", "removed from the pool .* ago.*; tier cold: gone from it .* ago",
         {"l2": TIER, "store_policy": "skip_l1"}),
        (outrun, "throttled", "evicted from the pool .* ago.*; tier cold: it left the pool before it was stored there",
         {"l2": {"cold": {"type": "mock", "deadline_s": 600}}}),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)  # fmt: skip
def test_every_miss_has_its_reason(
    make: Callable[..., World],
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[World], None],
    reason: str,
    words: str,
    settings: dict[str, object],
) -> None:
    monkeypatch.setattr("lmcache_core.tiers.flow.store.DIRTY_OBJECTS_MAX", 4 if lose is throttled else 1 << 18)
    monkeypatch.setattr("lmcache_core.tiers.flow.whereabouts.TIER_LOOKUP_S", 0.3 if lose is tier_hangs else 5.0)
    at = make(**settings)
    before = time.time()
    lose(at)
    told = at.ask("k")
    assert (told["hit"], told["where"]) == (False, [])
    assert told["reason"] == reason, told
    assert re.search(words, told["why"]), told["why"]
    if told["at_unix_s"] is not None:
        assert before - 0.1 <= told["at_unix_s"] <= time.time() + 0.1
        assert 0 <= told["age_s"] <= time.time() - before + 0.1
    elif reason not in ("never_stored", "being_written", "other_layout"):
        assert told["tiers"][0]["found"] is None, "what has no time is happening now"
    if "l2" in settings:
        at.faults()


def test_a_hit_says_all_the_places_that_have_it(make: Callable[..., World]) -> None:
    at = make(l2={**TIER, "colder": {"type": "mock"}}, l2_order=["cold", "colder"])
    at.store("k")
    at.holds(1)
    until(lambda: at.client.status()["tiers"]["tiers"][1]["objects"], "the other tier")
    told = at.ask("k")
    assert (told["hit"], told["where"], told["reason"]) == (True, ["l1", "cold", "colder"], "")
    at.client.clear(NS)
    assert at.ask("k")["where"] == ["cold", "colder"]
    at.faults("exists gone")
    told = at.ask("k")
    assert told["where"] == ["colder"], "a tier in trouble does not hide what another has"
    assert [word["found"] for word in told["tiers"]] == [None, True]


def test_an_unknown_namespace_is_called_so_and_those_that_are_known_are_listed(make: Callable[..., World]) -> None:
    at = make()
    labelled = Namespace("other", Layout("float16", (2, 64)), label="llama-3-8b/bf16")
    at.client.register_layout(labelled)
    at.store("k")
    wrong = at.command("--model", "modle", key("k").hex())
    assert wrong.returncode == 0
    assert "nobody else uses this namespace, and the pool has nothing of it" in wrong.stdout
    *_, title, columns, _, one, other = wrong.stdout.splitlines()
    assert title.startswith("nobody else uses this namespace: compare")
    assert columns.split() == ["known", "namespace", "layout", "sessions", "id"]
    assert sorted(line.split() for line in (one, other)) == [
        ["llama-3-8b/bf16", "float16[2×64]", "1", f"{labelled.id:016x}"],
        ["model", f"uint8[{NBYTES}]", "1", f"{NS.id:016x}"],
    ]
    assert "known" not in at.command("--model", "model", key("not here").hex()).stdout
    told = json.loads(at.command("--namespace", "5d1c", "--json", key("k").hex()).stdout)
    assert [each["namespace_known"] for each in told] == [False]
    assert [
        each["namespace_known"] for each in json.loads(at.command("--model", "model", "--json", key("k").hex()).stdout)
    ] == [True]


def test_explaining_changes_nothing(make: Callable[..., World]) -> None:
    at = make()
    keys = [at.store(number)[0] for number in range(SLOTS)]
    at.client.explain(keys[:1], namespace=NS)  # were this a use, it would not be the coldest any more
    at.store("one more")
    assert at.client.lookup(keys[:1], namespace=NS, tiers=[]).hits == 0
    before = at.client.status()["l1"]
    at.client.explain(keys, namespace=NS)
    assert at.client.status()["l1"] == before
    assert not any(before["leases_by_kind"].values())


# --- who may ask ---------------------------------------------------------------------------------------------------


def test_only_namespaces_that_the_session_has_registered_are_explained(make: Callable[..., World]) -> None:
    at = make()
    at.store("k")
    stranger = at.another(maps_pool=False)
    stranger.register_layout(Namespace("another model", NS.layout))
    with pytest.raises(UsageError, match=r"not registered in this session.*register_layout"):
        stranger.links.current().channel.call(m.Explain(0, NS.id, key("k")))


def test_a_new_client_that_can_say_the_namespace_needs_no_other_call_before_it_asks(make: Callable[..., World]) -> None:
    at = make(chunk_tokens=16)
    tokens = list(range(32))
    keys = chunk_keys(tokens, NS, 16)
    at.client.store(keys[:1], [bytes(NBYTES)], namespace=NS)
    assert [each.hit for each in at.another().explain(tokens=tokens, namespace=NS)] == [True, False]
    assert [each.hit for each in at.another(maps_pool=False).explain(keys, namespace=NS)] == [True, False]


def test_tokens_are_explained_chunk_by_chunk_with_the_servers_chunk_size(make: Callable[..., World]) -> None:
    at = make(chunk_tokens=16)
    tokens = list(range(16 * 300 + 5))
    keys = chunk_keys(tokens, NS, 16)
    at.client.store(keys[:2], [bytes(NBYTES)] * 2, namespace=NS)
    told = at.client.explain(tokens=tokens, namespace=NS)
    assert [each.key for each in told] == keys
    assert [each.hit for each in told] == [True, True] + [False] * 298
    with pytest.raises(UsageError, match="one of them"):
        at.client.explain(keys, tokens=tokens, namespace=NS)
    with pytest.raises(UsageError, match="one of them"):
        at.client.explain(namespace=NS)


def test_what_was_registered_before_a_reconnect_is_explained_after_it(make: Callable[..., World]) -> None:
    at = make()
    keys = at.store("k")
    link = at.client.links.current()
    link.channel.close("a broken connection")
    assert at.client.explain(keys, namespace=NS)[0].hit
    assert at.client.links.current() is not link


def test_explanations_that_wait_for_tiers_are_bounded_for_each_session(make: Callable[..., World]) -> None:
    at = make(l2=TIER)
    at.faults("exists hang")
    link = at.client.links.current()
    ask = m.Explain(0, NS.id, key("k"))
    waiting = [link.channel.start(ask) for _ in range(EXPLAINS_PER_SESSION_MAX)]
    with pytest.raises(LimitError, match=f"{EXPLAINS_PER_SESSION_MAX} explanations of this session"):
        link.channel.call(ask)
    other = at.another()
    other.register_layout(NS)
    pending = other.links.current().channel.start(ask)
    at.faults()
    for each in waiting:
        assert isinstance(link.channel.wait(each, 60.0), m.Explained)
    assert isinstance(other.links.current().channel.wait(pending, 60.0), m.Explained)
    assert at.client.explain([key("k")], namespace=NS)


def interrupted(call: Callable[[], object], waits: Callable[[], bool]) -> None:
    """Make a call and interrupt it, as Ctrl-C does, once the server waits for others."""
    main_thread = threading.get_ident()

    def interrupt() -> None:
        until(waits, "the server to wait")
        signal.pthread_kill(main_thread, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def patient_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to a tier takes as long as the tier does, and so does an answer that waits for one."""
    for module, limit in (
        (whereabouts, "TIER_LOOKUP_S"),
        (explaining, "TIER_LOOKUP_S"),
        (stored_waits, "STORED_WAIT_S_MAX"),
        (stored, "STORED_WAIT_S_MAX"),
    ):
        monkeypatch.setattr(module, limit, 600.0)


def test_an_interrupted_explanation_gives_its_place_back_at_once(
    make: Callable[..., World], patient_tiers: None
) -> None:
    at = make(l2=TIER)
    at.faults("exists hang")
    share = at.server.parts.shares.explains
    for _ in range(EXPLAINS_PER_SESSION_MAX + 1):
        interrupted(lambda: at.client.explain([key("k")], namespace=NS), lambda: share.taken > 0)
        until(lambda: share.taken == 0, "the place")
    at.faults()
    assert [each.reason for each in at.client.explain([key("k")], namespace=NS)]


def test_an_interrupted_wait_for_stores_gives_its_place_back_at_once(
    make: Callable[..., World], patient_tiers: None
) -> None:
    at = make(l2={"cold": {"type": "mock", "deadline_s": 600}})
    at.faults("store hang")
    keys = at.store("k")
    share = at.server.parts.shares.stored_waits
    for _ in range(2):
        interrupted(lambda: at.client.wait_stored(keys, namespace=NS, timeout_s=600), lambda: share.taken > 0)
        until(lambda: share.taken == 0, "the place")
    at.faults()


def test_the_places_of_a_session_that_ends_are_free_at_once(make: Callable[..., World], patient_tiers: None) -> None:
    at = make(l2={"cold": {"type": "mock", "deadline_s": 600}})
    at.faults("exists hang", "store hang")
    keys = at.store("k")
    shares = (at.server.parts.shares.explains, at.server.parts.shares.stored_waits)
    going = at.another()
    going.register_layout(NS)
    channel = going.links.current().channel
    kept = [
        channel.start(m.Explain(0, NS.id, keys[0])),
        channel.start(m.WaitStored(0, NS.id, keys[0], 600.0)),
    ]
    until(lambda: [share.taken for share in shares] == [1, 1], "both to wait")
    going.close()
    until(lambda: [share.taken for share in shares] == [0, 0], "both places")
    del kept
    at.faults()


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_explains_keys_and_tokens_by_description_and_by_id(make: Callable[..., World]) -> None:
    at = make(chunk_tokens=4)
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    keys = chunk_keys(tokens, NS, 4)
    at.client.store(keys[:1], [bytes(NBYTES)], namespace=NS)
    listed = at.run.parent / "tokens.json"
    listed.write_text(json.dumps(tokens))
    table = at.command("--model", "model", "--tokens-file", str(listed))
    assert table.returncode == 0, table.stderr
    lines = table.stdout.splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [[keys[0].hex()[:16], "yes"], [keys[1].hex()[:16], "no"]]
    assert "never_stored" in lines[1]
    by_id = at.command("--namespace", f"{NS.id:016x}", "--json", *(each.hex() for each in keys))
    assert [each["hit"] for each in json.loads(by_id.stdout)] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "m"], "give either keys"),
        (["--model", "m", "--tokens", "1,2", "ab" * 32], "give either keys"),
        (["--tokens", "1"], "--model"),
        (["--namespace", "1", "--tokens", "1"], "not enough to derive the keys of tokens"),
        (["--namespace", "x", "ab" * 32], "hexadecimal"),
        (["--model", "m", "abc"], "64 hexadecimal digits"),
        (["--model", "m", "--tokens", "1;2"], "whole numbers"),
        (["--model", "m", "--tokens", "1", "--kv-shard", "2"], "I/N"),
        (["--model", "m", "--tokens-file", "/nowhere"], "cannot be read"),
        (["--model", "m", "--tokens", "1", "--tenant-salt-file", "/nowhere"], "cannot be read"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_what_is_wrong(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fixed = ["--runtime-dir", str(tmp_path), "--dtype", "uint8", "--shape", "8"]
    assert main(["explain", *fixed, *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_without_a_server_the_command_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--dtype", "uint8", "--shape", "8", "--model", "m", "ab" * 32]
    assert main(["explain", "--name", f"t{uuid4().hex[:10]}", "--runtime-dir", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err.startswith("lmcache-core: ")


def test_tokens_are_explained_in_chunks_of_the_clients_own_length(make: Callable[..., World]) -> None:
    """As an engine stores them with blocks of 16, beside a server that is set to 256."""
    world, prompt = make(), list(range(64))
    keys = chunk_keys(prompt, NS, 16)
    world.client.store(keys, [bytes(NBYTES)] * 4, namespace=NS)
    assert world.client.explain(tokens=prompt, namespace=NS) == []  # less than one chunk of the server's
    assert [each.hit for each in world.client.explain(tokens=prompt, namespace=NS, chunk_tokens=16)] == [True] * 4
    with Client.connect(world.name, runtime_dir=world.run, chunk_tokens=16) as declared:
        assert [each.key for each in declared.explain(tokens=prompt, namespace=NS)] == keys
    command = ["explain", "--model", NS.model, "--dtype", "uint8", "--shape", "65536", "--name", world.name]
    command += ["--runtime-dir", str(world.run), "--tokens", ",".join(map(str, prompt)), "--json"]
    told = subprocess.run(
        [sys.executable, "-m", "lmcache_core.cli.main", *command, "--chunk-tokens", "16"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [each["key"] for each in json.loads(told.stdout)] == [each.hex() for each in keys]
    other = [sys.executable, "-m", "lmcache_core.cli.main", *command[:-1], "--chunk-tokens", "32"]
    said = subprocess.run(other, capture_output=True, text=True, check=True).stdout
    assert "the first chunk was never stored: does the engine make keys of as many tokens (--chunk-tokens)" in said


@pytest.mark.parametrize("chunk_tokens", [0, -1, (1 << 20) + 1])
def test_a_chunk_length_that_cannot_be_is_refused(chunk_tokens: int) -> None:
    with pytest.raises(UsageError, match="chunk_tokens"):
        Client.connect("a", chunk_tokens=chunk_tokens)
