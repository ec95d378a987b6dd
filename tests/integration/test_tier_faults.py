"""A backend in every kind of trouble, under every policy: no wrong byte, no stuck lease, no growth, no restart.

The adversary is the mock tier inside an embedded server. Each case has the same four acts: all is well, the trouble,
the recovery, and the account of everything that was held.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.kernel.answers import Reason
from lmcache_core.plugins.loader import load_plugins
from lmcache_core.plugins.registry import Registry
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tiers.contract import L2Adapter
from lmcache_core.tiers.flow import writeback
from lmcache_core.tiers.tier import doubts, health
from lmcache_core.tiers.tier.breaker import Breaker
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json, embedded_server
from lmcache_testing.waiting import until

from ..conftest import Node

pytest.importorskip("lmcache_mock")

NAMESPACE = Namespace("model", Layout("uint8", (16384,)))
NBYTES = NAMESPACE.layout.nbytes
KEYS = 12
NOBODY = 65534
DEADLINE_S = 0.3  # of the tier: what hangs or is slow is given up after it

FAULTS = {
    "error": ("any", "store", "exists", "load"),
    "throttled": ("store", "load"),
    "slow": ("any", "exists"),  # 100 times slower than its deadline allows
    "hang": ("any", "store", "exists", "load", "delete"),
    "gone": ("any", "scan"),
    "full": ("store",),
    "lost": ("store",),
    "short_read": ("load",),
    "flipped_bits": ("load",),
    "neighbour": ("load",),
}
POLICIES = (
    {"store_policy": "default", "prefetch_policy": "default", "dirty": "drop"},
    {"store_policy": "default", "prefetch_policy": "retain", "dirty": "keep"},
    {"store_policy": "skip_l1", "prefetch_policy": "default", "dirty": "drop"},
    {"store_policy": "default", "prefetch_policy": "default", "dirty": "wait"},
)
CASES = [f"{operation} {fault}" for fault, operations in FAULTS.items() for operation in operations]
PAUSE_S = 0.05  # before a tier that had failed is tried again


def key(number: int) -> bytes:
    return hashlib.sha256(b"fault %d" % number).digest()


def payload(number: int) -> bytes:
    return hashlib.shake_256(b"payload %d" % number).digest(64) * (NBYTES // 64)


PAYLOADS = {key(number): payload(number) for number in range(400)}


class World:
    """One server, one client, one tier that can be told what to do."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server = server
        self.client = client
        self.wrong = 0

    @property
    def adapter(self) -> L2Adapter:
        assert self.server.tiering is not None
        (only,) = self.server.tiering.tiers
        return only.adapter

    def status(self) -> Json:
        return self.client.status()

    def store(self, first: int, count: int = KEYS) -> list[bytes]:
        keys = [key(number) for number in range(first, first + count)]
        self.client.store(keys, [PAYLOADS[each] for each in keys], namespace=NAMESPACE)
        return keys

    def read(self, keys: list[bytes], wait_s: float = 2.0) -> int:
        """How many come back; each byte of them is checked, and so is what a miss leaves untouched."""
        found = self.client.lookup(keys, namespace=NAMESPACE, hold=True, prefix=False, wait_s=wait_s)
        into = [bytearray(NBYTES) for _ in keys]
        result = self.client.retrieve(keys, into, namespace=NAMESPACE, prefix=False, promise=found.promise)
        for each, status, buffer in zip(keys, result.statuses, into, strict=True):
            assert bytes(buffer) == (PAYLOADS[each] if status is Status.HIT else bytes(NBYTES))
        assert len(result.reasons) == len(keys)
        return sum(status is Status.HIT for status in result.statuses)

    def quiet(self) -> bool:
        """Nothing is on its way anywhere."""
        status = self.status()
        tiers = status["tiers"]
        return (
            not tiers["stores"]["in_flight_bytes"]
            and not tiers["stores"]["arrived"]
            and not any(tiers["stores"]["dirty"].values())
            and not tiers["lookups"]["loads_out"]
            and not status["lookups_waiting"]
            and not any(lane["running"] for tier in tiers["tiers"] for lane in tier["lanes"].values())
        )

    def round_trip(self, first: int) -> bool:
        """Store to the tier, forget, and get it back from there."""
        keys = self.store(first)
        until(self.quiet, "quiet")
        self.client.clear(NAMESPACE)
        return self.read(keys) == KEYS

    def account(self) -> None:
        """Everything that was held is accounted for."""
        until(self.quiet, "quiet")
        self.client.end_session()
        self.client.clear()

        def nothing_left() -> bool:
            l1 = self.status()["l1"]
            return not l1["used_bytes"] and not any(l1["leases_by_kind"].values()) and not l1["quarantine_by_session"]

        until(nothing_left, "the memory")
        status = self.status()
        assert status["counters"].get("internal_errors", 0) == 0
        assert status["tiers"]["faults"] == 0
        until(lambda: all(tier["bytes_leaving"] == 0 for tier in self.status()["tiers"]["tiers"]), "the deletes")


@contextmanager
def world(folder: Path, registry: Registry | None = None, **settings: object) -> Iterator[World]:
    settings.setdefault("l2", {"bad": {"type": "mock", "deadline_s": DEADLINE_S}})
    l1 = {"size_bytes": 4 << 20, "backing": "memfd"}
    with embedded_server(folder, registry, l1=l1, drain_s=0.2, **settings) as server, server.connect() as client:
        yield World(server, client)


@pytest.fixture(scope="module", autouse=True)
def tried_again_soon() -> Iterator[None]:
    """No recovery waits for the pauses that spare a tier in trouble."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "Breaker", partial(Breaker, pause_s=PAUSE_S))
        patch.setattr(doubts, "BREAKER_PAUSE_S", PAUSE_S)
        patch.setattr(doubts, "TIER_LOOKUP_S", DEADLINE_S)
        patch.setattr(writeback, "WRITE_BACK_PAUSE_S", PAUSE_S)
        yield


@pytest.fixture(scope="module", params=POLICIES, ids=range(len(POLICIES)))
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Each test that takes it ends with nothing held, in L1 and in the tier."""
    with world(tmp_path_factory.mktemp("shared"), **request.param) as at:
        yield at


@pytest.mark.parametrize("rule", CASES)
def test_a_fault_costs_misses_and_nothing_else(shared: World, rule: str) -> None:
    at = shared
    until(lambda: at.round_trip(0), "a first round trip")
    known = at.store(0)
    until(at.quiet, "quiet")
    at.client.clear(NAMESPACE)

    at.adapter.set_faults(f"{rule} s=30")
    reads_fail = rule.split()[0] in ("any", "exists", "load")
    if reads_fail:
        assert at.read(known, wait_s=0.2) == 0
    else:  # on a busy machine a load may miss the tier's short deadline, and is asked for again
        until(lambda: at.read(known, wait_s=30.0) == KEYS, "what the fault does not concern")
    fresh = at.store(100)
    at.client.noop()
    at.read(fresh, wait_s=0.05)
    at.client.clear(NAMESPACE)
    at.read([*fresh, *known], wait_s=0.1)

    at.adapter.set_faults()
    turns = itertools.count(200, KEYS)
    until(lambda: at.round_trip(next(turns) % 300), "the recovery without a restart")
    at.account()
    at.client.clear(tiers=True)


@pytest.mark.parametrize("seed", range(6))
def test_a_backend_that_fails_by_chance_never_gives_a_wrong_byte(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    policies = POLICIES[seed % len(POLICIES)]
    rules = [
        f"{operation} {fault} rate={rate} s=0.05"
        for fault, operations in FAULTS.items()
        for operation in operations
        for rate in (0.05, 0.5)
        if fault != "hang"
    ]
    with world(tmp_path, **policies) as at:
        for _ in range(25):
            at.adapter.set_faults(*rng.sample(rules, rng.randrange(4)))
            first = rng.randrange(300)
            keys = at.store(first, rng.randrange(1, 80))
            if rng.random() < 0.5:
                at.client.clear(NAMESPACE, tiers=rng.random() < 0.2)
            rng.shuffle(keys)
            at.read(keys, wait_s=rng.choice([0.0, 0.02, 0.3]))
        at.adapter.set_faults()
        turns = itertools.count(0, KEYS)
        until(lambda: at.round_trip(next(turns) % 300), "the recovery")
        at.account()


def test_what_is_queued_for_a_hung_tier_stays_bounded_while_stores_go_on(tmp_path: Path) -> None:
    with world(tmp_path) as at:
        at.adapter.set_faults("any hang")
        calls = []
        for turn in range(30):
            at.store(10 * turn, 10)
            at.read([key(number) for number in range(10 * turn, 10 * turn + 10)], wait_s=0.01)
            tier = at.status()["tiers"]["tiers"][0]
            calls.append(sum(lane["queued"] + lane["running"] for lane in tier["lanes"].values()))
        assert max(calls) <= 24, "threads and queues of the lanes are bounded"
        at.adapter.set_faults()
        until(lambda: at.round_trip(0), "the recovery")
        at.account()


def test_evicted_before_stored_is_counted_as_lost_or_kept_as_the_settings_say(tmp_path: Path) -> None:
    lost = {}
    for dirty in ("drop", "keep"):
        with world(tmp_path / dirty, dirty=dirty) as at:
            at.adapter.set_faults("store slow s=0.05")
            for first in range(0, 400, 20):  # one and a half times the pool, faster than the tier takes it
                at.store(first, 20)
            until(at.quiet, "quiet")
            counts = at.status()["tiers"]["stores"]["counts"]
            lost[dirty] = counts.get("lost_evicted", 0)
            at.account()
    assert lost["drop"] > 0
    assert lost["keep"] == 0


def test_the_names_of_every_reason_reach_the_client(tmp_path: Path) -> None:
    expected = {"load gone": Reason.TIER_ERROR, "load flipped_bits": Reason.DAMAGED, "load hang": Reason.LATE}
    for rule, reason in expected.items():
        with world(tmp_path / rule.replace(" ", "_")) as at:
            keys = at.store(0)
            until(at.quiet, "quiet")
            at.client.clear(NAMESPACE)
            at.adapter.set_faults(rule)
            found = at.client.lookup(keys, namespace=NAMESPACE, wait_s=5)
            assert found.hits == 0
            assert found.reasons[0] is reason, rule
            at.adapter.set_faults()


# --- the clock, and the disk ----------------------------------------------------------------------------------


def test_a_server_that_was_stopped_past_every_deadline_goes_on(node: Node, tmp_path: Path) -> None:
    server = node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"), "--l2.disk.deadline_s", "0.2")
    client = node.client()
    keys = [node.key(i) for i in range(100)]
    for _ in range(3):
        client.store(keys, [node.payload(i) for i in range(100)], namespace=node.namespace)
        handle = client.lookup_nowait([node.key(f"no {i}") for i in range(50)], namespace=node.namespace, wait_s=0.1)
        server.signal(signal.SIGSTOP)  # the clock jumps, as far as the server can tell
        time.sleep(0.6)
        server.signal(signal.SIGCONT)
        until(lambda handle=handle: handle.done, "the lookup")
        client.clear(node.namespace)

    def all_back() -> bool:
        client.store(keys, [node.payload(i) for i in range(100)], namespace=node.namespace)
        until(lambda: not client.status()["tiers"]["stores"]["in_flight_bytes"], "the stores")
        client.clear(node.namespace)
        return bool(client.lookup(keys, namespace=node.namespace, wait_s=10).hits == 100)

    until(all_back, "the recovery")


def damage_at_random(rng: random.Random, folder: Path) -> int:
    files = [path for path in (folder / "objects").rglob("*") if path.is_file()]
    chosen = rng.sample(files, len(files) // 2)
    for path in chosen:
        content = bytearray(path.read_bytes())
        match rng.randrange(4):
            case 0:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case 1:
                content = content[: rng.randrange(len(content))]
            case 2:
                content += os.urandom(rng.randrange(1, 5000))
            case 3:
                content = bytearray(rng.choice(files).read_bytes())  # a neighbour's
        path.write_bytes(content)
    return len(chosen)


@pytest.mark.parametrize("seed", range(3))
def test_files_damaged_at_random_are_misses_and_never_wrong_bytes(node: Node, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "disk"
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(folder))
    client = node.client()
    keys = [node.key(i) for i in range(60)]
    client.store(keys, [node.payload(i) for i in range(60)], namespace=node.namespace)
    until(lambda: client.status()["tiers"]["tiers"][0]["objects"] == 60, "the stores")
    client.clear(node.namespace)
    damaged = damage_at_random(rng, folder)
    found = client.lookup(keys, namespace=node.namespace, prefix=False, hold=True, wait_s=30)
    into = [bytearray(65536) for _ in keys]
    result = client.retrieve(keys, into, namespace=node.namespace, prefix=False, promise=found.promise)
    hits = [at for at, status in enumerate(result.statuses) if status is Status.HIT]
    assert 60 - damaged <= len(hits) < 60
    assert all(bytes(into[at]) == node.payload(at) for at in hits)


def test_a_directory_deleted_under_the_server_is_made_again(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(folder))
    client = node.client()

    def stored(first: int) -> bool:
        keys = [node.key(i) for i in range(first, first + 20)]
        client.store(keys, [node.payload(i) for i in range(first, first + 20)], namespace=node.namespace)
        until(lambda: not client.status()["tiers"]["stores"]["in_flight_bytes"], "the stores")
        client.clear(node.namespace)
        return bool(client.lookup(keys, namespace=node.namespace, wait_s=10).hits == 20)

    until(lambda: stored(0), "the first")
    shutil.rmtree(folder, ignore_errors=True)
    assert client.lookup([node.key(0)], namespace=node.namespace, wait_s=10).hits in (0, 1)
    numbers = itertools.count(100, 20)
    until(lambda: stored(next(numbers)), "the recovery")


def test_a_directory_without_permission_says_so_and_recovers() -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        if os.geteuid() == 0:  # who may write everywhere: the server runs as another user, in a child process
            os.chown(folder, NOBODY, NOBODY)
        # That user may not be allowed to read the interpreter's own files: what is used is imported before.
        with tempfile.TemporaryDirectory() as other, world(Path(other), **_on_disk(Path(other))) as at:
            assert at.round_trip(0)
        registry = load_plugins()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setresgid(NOBODY, NOBODY, NOBODY)
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                _without_permission(folder, registry)
                status = 0
            except BaseException:  # noqa: BLE001 - the parent says that it failed, this says why
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _on_disk(folder: Path) -> Json:
    return {"l2": {"bad": {"type": "fs", "path": str(folder / "disk")}}}


def _without_permission(folder: Path, registry: Registry) -> None:
    assert os.geteuid() != 0
    disk = folder / "disk"
    disk.mkdir(mode=0o500)
    with world(folder, registry, **_on_disk(folder)) as at:

        def tier() -> Json:
            return at.status()["tiers"]["tiers"][0]

        keys = at.store(0)
        until(lambda: "right to" in tier()["last_error"], "the words")
        assert at.read(keys) == KEYS, "the L1 serves what the tier does not take"
        disk.chmod(0o700)
        turns = itertools.count(100, KEYS)
        until(lambda: at.round_trip(next(turns) % 300), "the recovery")
        at.account()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_makes_room_by_eviction_and_goes_on(node: Node, small_disk: Path) -> None:
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(small_disk / "disk"))
    client = node.client()
    for first in range(0, 200, 10):  # 13 MiB
        keys = [node.key(i) for i in range(first, first + 10)]
        client.store(keys, [node.payload(i) for i in range(first, first + 10)], namespace=node.namespace)
        until(lambda: not client.status()["tiers"]["stores"]["in_flight_bytes"], "the stores")
    tier = client.status()["tiers"]["tiers"][0]
    assert tier["deletes"]["evicted"] > 0
    assert tier["counts"]["store_full"] > 0
    assert tier["writes"]["breaker"] == "closed", "full is an ordinary answer"
    assert client.status()["tiers"]["stores"]["counts"]["stored"] > 30


def test_a_disk_that_becomes_read_only_is_read_and_stored_to_again_once_it_can_be(node: Node, small_disk: Path) -> None:
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(small_disk / "disk"))
    client = node.client()
    keys = [node.key(i) for i in range(5)]
    client.store(keys, [node.payload(i) for i in range(5)], namespace=node.namespace)
    until(lambda: client.status()["tiers"]["tiers"][0]["objects"] == 5, "the stores")
    client.clear(node.namespace)

    where = str(small_disk)  # a second mount in front of the first: files that are open stay as they are
    subprocess.run(["mount", "--bind", where, where], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)
    client.store([node.key(10)], [node.payload(10)], namespace=node.namespace)
    until(lambda: "disk" in client.status()["tiers"]["tiers"][0]["last_error"], "the words")
    assert client.lookup(keys, namespace=node.namespace, wait_s=30).hits == 5
    subprocess.run(["umount", where], check=True)
    numbers = itertools.count(20)

    def stored() -> bool:
        number = next(numbers) % 200
        client.store([node.key(number)], [node.payload(number)], namespace=node.namespace)
        return bool(client.status()["tiers"]["stores"]["counts"]["stored"] > 5)

    until(stored, "the recovery")
