"""Real servers in network namespaces of their own, joined by veth pairs: what a partition, a pause and a death in the
middle of a transfer cost a reader, and what is left of them afterwards.

A link that is set down loses everything both ways; a neighbour entry with a wrong address loses what one side sends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_core import Client, Layout, Namespace
from lmcache_core.errors import CacheError
from lmcache_testing.processes import ServerProcess
from lmcache_testing.waiting import WAIT_S, until

from .conftest import key

PORT = 7600
OBJECTS = 5
LARGE = Namespace("large", Layout("uint8", (16 << 20,)))
SMALL = Namespace("small", Layout("uint8", (100_000,)))
POOL_BYTES = 176 << 20  # half of it may be under way to others: all objects at once
MIDDLE_BYTES = 12 << 20  # of 80 MiB
_WRONG = "02:00:00:00:00:01"  # nobody's link address


def content(namespace: Namespace, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, namespace.layout.shape, dtype=torch.uint8, generator=generator)


class Network:
    """A namespace for each name, and a veth pair between each two of them: `to-b` in a is the end of its link to b."""

    def __init__(self, names: str) -> None:
        self._run = secrets.token_hex(3)
        self.names = names
        self._addresses: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            for name in self.names:
                stack.callback(subprocess.run, ["ip", "netns", "del", self.of(name)], capture_output=True, check=False)
                _ip("netns", "add", self.of(name))
                self.at(name, "link", "set", "lo", "up")
            for number, (one, other) in enumerate(itertools.combinations(self.names, 2)):
                peer = ("peer", "name", f"to-{one}", "netns", self.of(other))
                # Segments go one by one, as on a slow link: a transfer has a middle that can be met.
                self.at(one, "link", "add", f"to-{other}", "mtu", "1500", "type", "veth", *peer)
                for last, (here, there) in enumerate(((one, other), (other, one)), 1):
                    self._addresses[here, there] = f"10.77.{number}.{last}"
                    self.at(here, "addr", "add", f"{self._addresses[here, there]}/30", "dev", f"to-{there}")
                    self.at(here, "link", "set", f"to-{there}", "gso_max_segs", "1", "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, name: str) -> str:
        return f"lmcache-{self._run}-{name}"

    def address(self, name: str, seen_by: str) -> str:
        return self._addresses[name, seen_by]

    def at(self, name: str, *words: str) -> None:
        _ip("-n", self.of(name), *words)

    @contextmanager
    def cut(self, one: str, other: str) -> Iterator[None]:
        """Nothing passes between these two."""
        self.at(one, "link", "set", f"to-{other}", "down")
        try:
            yield
        finally:
            self.at(one, "link", "set", f"to-{other}", "up")

    @contextmanager
    def lost(self, sender: str, receiver: str) -> Iterator[None]:
        """What `sender` sends to `receiver` is lost; what comes back arrives."""
        entry = (self.address(receiver, sender), "dev", f"to-{receiver}")
        self.at(sender, "neigh", "replace", *entry, "lladdr", _WRONG, "nud", "permanent")
        try:
            yield
        finally:
            self.at(sender, "neigh", "del", *entry)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=WAIT_S)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class NetNode(ServerProcess):
    """A server in its namespace, which serves its pool and loads from all others there are."""

    def __init__(self, network: Network, name: str, secret: Path) -> None:
        super().__init__(POOL_BYTES)
        self._network, self.node, self._secret = network, name, secret

    def _command(self) -> list[str]:
        others = [each for each in self._network.names if each != self.node]
        nodes = ",".join(f"{self._network.address(each, self.node)}:{PORT}" for each in others)
        both = {"node": self.node, "plaintext": "trusted_network", "secret_file": str(self._secret)}
        flags = {f"peer.{name}": value for name, value in {**both, "host": "0.0.0.0", "port": str(PORT)}.items()}
        tier = {**both, "type": "peer", "nodes": nodes, "patience_s": "0.3"}
        flags |= {f"l2.peers.{name}": value for name, value in tier.items()}
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        return ["ip", "netns", "exec", self._network.of(self.node), *super()._command(), *words]

    def __enter__(self) -> NetNode:
        super().__enter__()
        self.door: Client = self.client()
        return self

    def __exit__(self, *error: Any) -> None:
        self.door.close()
        super().__exit__(*error)

    # --- what it has and sees -------------------------------------------------------------------------------
    def store(self, namespace: Namespace, *numbers: int) -> None:
        contents = [content(namespace, each) for each in numbers]
        assert self.door.store([key(each) for each in numbers], contents, namespace=namespace).stored == len(numbers)

    def load(self, namespace: Namespace, *numbers: int, wait_s: float = 30.0) -> list[int]:
        """Those of these that are hits, after the tiers have loaded them; their bytes are right."""
        keys = [key(each) for each in numbers]
        self.door.lookup(keys, namespace=namespace, wait_s=wait_s, prefix=False)
        return self.read(namespace, *numbers)

    def read(self, namespace: Namespace, *numbers: int) -> list[int]:
        """Those that are in its pool now; their bytes are right."""
        targets = [torch.zeros(namespace.layout.shape, dtype=torch.uint8) for _ in numbers]
        got = self.door.retrieve([key(each) for each in numbers], targets, namespace=namespace, prefix=False)
        hits = [number for number, status in zip(numbers, got.statuses, strict=True) if status.name == "HIT"]
        for number, target in zip(numbers, targets, strict=True):
            assert number not in hits or torch.equal(target, content(namespace, number)), f"{number} has wrong bytes"
        return hits

    def peer(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = self.door.status()["tiers"]["tiers"][0]["adapter"]["parts"].get(name, {})
        return row

    def sees(self, name: str, objects: int) -> None:
        self.door.lookup([key(1 << 40)], namespace=LARGE, wait_s=5.0)
        until(lambda: self.peer(name).get("objects") == objects, f"{self.node} sees {objects} objects of {name}")

    @property
    def helper(self) -> int:
        until(lambda: self.door.status()["helpers"]["peer"]["pid"] is not None, "a helper")
        return int(self.door.status()["helpers"]["peer"]["pid"])

    def holds_nothing(self) -> bool:
        """Whether nothing of its pool is held for others, or by a load that will not end."""
        status = self.door.status()
        serving, leases = status["operations"]["peer"]["serving"], status["l1"]["leases_by_kind"]
        return not serving.get("locked_objects", 0) and not any(leases.values())

    @property
    def received_bytes(self) -> int:
        """From all others."""
        rows = [line.split(":") for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines() if ":" in line]
        return sum(int(figures.split()[0]) for name, figures in rows if name.strip() != "lo")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path


@contextmanager
def nodes(names: str, secret: Path) -> Iterator[tuple[Network, list[NetNode]]]:
    """A node for each name. Skips the test where there are no namespaces to be had."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed (Debian: apt-get install iproute2)")
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(names))
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield network, [stack.enter_context(NetNode(network, name, secret)) for name in names]


def _two_with_objects(a: NetNode, b: NetNode) -> Sequence[int]:
    numbers = range(OBJECTS)
    a.store(LARGE, *numbers)
    b.sees("a", OBJECTS)
    return numbers


def _in_the_middle(b: NetNode, numbers: Sequence[int], action: Callable[[], object]) -> None:
    """Have b load these, do this in the middle of the transfer, and wait until whoever asked for them is free."""
    before, free = b.received_bytes, threading.Event()

    def ask() -> None:
        with contextlib.suppress(CacheError):  # its server may be killed
            b.door.lookup([key(each) for each in numbers], namespace=LARGE, wait_s=2 * WAIT_S, prefix=False)
        free.set()

    threading.Thread(target=ask, daemon=True).start()
    until(lambda: b.received_bytes - before > MIDDLE_BYTES, "the middle of a transfer")
    assert not free.is_set()
    action()
    assert free.wait(WAIT_S), "whoever asked waits for ever"


def _whole_again(a: NetNode, b: NetNode, numbers: Sequence[int]) -> None:
    """Both are as if nothing had been: unaided, all are hits, and nobody holds anything."""
    until(lambda: b.peer("a").get("usable") and b.peer("a")["objects"] >= len(numbers), "a probe that succeeds")
    until(lambda: b.load(LARGE, *numbers) == [*numbers], "all to be hits")
    until(a.holds_nothing, "the owner to hold nothing")
    until(b.holds_nothing, "the reader to hold nothing")


def test_three_nodes_on_three_links_have_each_others_objects(secret: Path) -> None:
    with nodes("abc", secret) as (_, three):
        for number, each in enumerate(three):
            each.store(SMALL, 10 + number)
        for each in three:
            for other in three:
                if other is not each:
                    each.sees(other.node, 1)
        assert [each.load(SMALL, 10, 11, 12) for each in three] == [[10, 11, 12]] * 3
        for each in three:
            until(each.holds_nothing, "nothing to be held")


def test_of_three_nodes_two_go_on_when_each_has_lost_the_third(secret: Path) -> None:
    with nodes("abc", secret) as (network, (a, b, c)):
        a.store(SMALL, 1, 2)
        c.store(SMALL, 2, 3)
        b.sees("a", 2)
        b.sees("c", 2)
        with network.cut("a", "b"):
            assert b.load(SMALL, 1, 2, 3) == [2, 3], "what c has, too, comes from there"
            until(lambda: not b.peer("a")["usable"], "the breaker of the one that is away")
            assert c.load(SMALL, 1) == [1], "c reaches both"
        until(lambda: b.peer("a")["usable"], "a probe that succeeds")
        assert b.load(SMALL, 1) == [1]
        for each in (a, b, c):
            until(each.holds_nothing, "nothing to be held")


@pytest.mark.parametrize(
    "lost", ["both ways", *(pytest.param(each, marks=pytest.mark.slow) for each in ("answers", "requests"))]
)
def test_a_partition_in_the_middle_of_a_transfer_frees_both_ends(secret: Path, lost: str) -> None:
    with nodes("ab", secret) as (network, (a, b)), ExitStack() as partition:
        numbers = _two_with_objects(a, b)
        way = {
            "both ways": lambda: network.cut("a", "b"),
            "answers": lambda: network.lost("a", "b"),
            "requests": lambda: network.lost("b", "a"),  # and acknowledgements: its owner's window closes
        }[lost]
        _in_the_middle(b, numbers, lambda: partition.enter_context(way()))
        assert len(b.read(LARGE, *numbers)) < OBJECTS
        until(lambda: not b.peer("a")["usable"], "its breaker")
        until(a.holds_nothing, "the owner to give up a reader that takes nothing")
        assert b.load(LARGE, 1 << 20) == [], "the reader serves on"
        partition.close()
        _whole_again(a, b, numbers)


@pytest.mark.parametrize(
    "who",
    [
        "the owner's helper",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("the owner's server", "the reader")),
    ],
)
def test_whoever_is_paused_in_the_middle_of_a_transfer_goes_on_unaided(secret: Path, who: str) -> None:
    with nodes("ab", secret) as (_, (a, b)):
        numbers = _two_with_objects(a, b)
        pid = {"the owner's helper": a.helper, "the owner's server": a.pid, "the reader": b.pid}[who]

        def pause() -> None:
            os.kill(pid, signal.SIGSTOP)
            if who == "the reader":  # nobody is free while it is paused: its owner must be
                try:
                    until(a.holds_nothing, "the owner to give up a reader that takes nothing")
                finally:
                    os.kill(pid, signal.SIGCONT)

        try:
            _in_the_middle(b, numbers, pause)
        finally:
            os.kill(pid, signal.SIGCONT)
        if who == "the owner's helper":
            assert b.peer("a")["late"] > 0
        _whole_again(a, b, numbers)


def test_a_helper_that_is_killed_in_the_middle_of_a_transfer_leaves_nothing(secret: Path) -> None:
    with nodes("ab", secret) as (_, (a, b)):
        numbers = _two_with_objects(a, b)
        helper = a.helper
        _in_the_middle(b, numbers, lambda: os.kill(helper, signal.SIGKILL))
        assert len(b.read(LARGE, *numbers)) < OBJECTS
        until(lambda: a.door.status()["helpers"]["peer"]["pid"] not in (None, helper), "another helper")
        _whole_again(a, b, numbers)


@pytest.mark.slow
def test_an_owner_that_is_killed_in_the_middle_of_a_transfer_is_another_when_it_is_back(secret: Path) -> None:
    with nodes("ab", secret) as (network, (a, b)):
        numbers = _two_with_objects(a, b)
        _in_the_middle(b, numbers, lambda: os.kill(a.pid, signal.SIGKILL))
        until(b.holds_nothing, "the reader to hold nothing")
        until(lambda: not b.peer("a").get("usable"), "its breaker")
        with NetNode(network, "a", secret) as again:
            again.store(LARGE, *numbers, 100)
            until(lambda: b.peer("a").get("usable") and b.peer("a")["objects"] == OBJECTS + 1, "the new one is asked")
            assert b.load(LARGE, 100) == [100]
            until(again.holds_nothing, "the owner to hold nothing")


@pytest.mark.slow
def test_a_reader_that_is_killed_in_the_middle_of_a_transfer_leaves_nothing_at_its_owner(secret: Path) -> None:
    with nodes("ab", secret) as (network, (a, b)):
        numbers = _two_with_objects(a, b)
        _in_the_middle(b, numbers, lambda: os.kill(b.pid, signal.SIGKILL))
        until(a.holds_nothing, "the owner to hold nothing")
        b.__exit__(None, None, None)
        with NetNode(network, "b", secret) as again:
            again.sees("a", OBJECTS)
            _whole_again(a, again, numbers)
