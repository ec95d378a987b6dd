"""The soak: four workers, two honest tiers and one that lies, and somebody who kills workers and the server at random.

    python tests/soak/run.py [--seconds 180] [--seed N]

Workers store, look up, read, pin and clear objects of three sizes, and check every byte; what the pool may do with what
tiers lack yet is another thing with each server. A key has other bytes each time that it is stored, as KV has that was
computed again. At the end everything that was held is accounted for, no object of the pool or of an honest tier was
ever found damaged, the server's memory is flat, and nothing is left behind. Exit status 0, or 1 with what was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import CacheError, DisconnectedError
from lmcache_core.pool.backing import segment_path
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace
from lmcache_testing.embedded import Json

MODELS = [Namespace(f"model {number}", Layout("uint8", (65536,))) for number in range(2)]
SMALL = Namespace("small", Layout("uint8", (12288,)))
LARGE = Namespace("large", Layout("uint8", (1536 * 1024,)))  # for one of these slabs of the others have to go
NAMESPACES = [*MODELS, *MODELS, SMALL, LARGE]  # as often as they are met
DIRTY = ("drop", "wait", "keep")
KEYS = 300  # few enough that a key is stored, lost and stored again all the time, with other bytes
WORKERS = 4
SETTLE_S = 60.0
HONEST = ("disk", "cold")  # slow, failing and forgetful at times, and never wrong
STAMP_BYTES, UNIT_BYTES = 16, 128
GROWTH_BYTES_MAX = 24 << 20  # of the server's own memory, from the quiet part's first third to its end


def key(number: int) -> bytes:
    return hashlib.sha256(b"soak %d" % number).digest()


def payload(namespace: Namespace, number: int, stamp: bytes) -> bytes:
    """What a key holds that was stored with this stamp. Every part of it tells which key's it is, and which store's."""
    of = b"%d of %d, " % (number, namespace.id) + stamp
    unit = stamp + hashlib.shake_256(of).digest(UNIT_BYTES - STAMP_BYTES)
    return unit * (namespace.layout.nbytes // UNIT_BYTES)


def fresh(namespace: Namespace, number: int) -> bytes:
    """Bytes that this key never had."""
    return payload(namespace, number, os.urandom(STAMP_BYTES))


def right(content: bytes, namespace: Namespace, number: int) -> bool:
    """Whether these are the bytes of one store of this key, whole."""
    return content == payload(namespace, number, content[:STAMP_BYTES])


# --- a worker -------------------------------------------------------------------------------------------------


def work(name: str, run: str, seed: int) -> int:
    """Until the parent's end of the pipe closes; says what it did, a line a second. 3: it read a wrong byte."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    said_at = time.monotonic()
    with Client.connect(name, runtime_dir=run, client_name=f"soak {seed}") as client:
        while not stop.is_set():
            namespace = rng.choice(NAMESPACES)
            first = rng.randrange(KEYS // 10 if namespace is LARGE else KEYS)
            count = rng.randrange(1, 3 if namespace is LARGE else 40)
            numbers = [(first + step) % KEYS for step in range(count)]
            keys = [key(number) for number in numbers]
            try:
                if not _turn(client, namespace, numbers, keys, rng, counts):
                    print(json.dumps(counts), flush=True)
                    return 3
            except DisconnectedError:
                counts["disconnected"] += 1
                time.sleep(0.02)
            if time.monotonic() - said_at > 1:
                said_at = time.monotonic()
                print(json.dumps(counts), flush=True)
    print(json.dumps(counts), flush=True)
    return 0


def _turn(
    client: Client,
    namespace: Namespace,
    numbers: list[int],
    keys: list[bytes],
    rng: random.Random,
    counts: Counter[str],
) -> bool:
    chance = rng.random()
    if chance < 0.35:
        sources = [fresh(namespace, number) for number in numbers]
        counts["stored"] += client.store(keys, sources, namespace=namespace).stored
        return True
    if chance < 0.93:
        prefix = rng.random() < 0.5
        found = client.lookup(
            keys, namespace=namespace, hold=rng.random() < 0.5, prefix=prefix, wait_s=rng.choice([0.0, 0.05, 2.0])
        )
        if rng.random() < 0.1:
            return True  # promises are left to expire
        into = [bytearray(namespace.layout.nbytes) for _ in keys]
        verify = rng.choice(["never", "first", "always"])
        result = client.retrieve(keys, into, namespace=namespace, prefix=prefix, promise=found.promise, verify=verify)
        for number, status, buffer in zip(numbers, result.statuses, into, strict=True):
            if status is Status.HIT:
                counts["read"] += 1
                if not right(bytes(buffer), namespace, number):
                    counts["wrong"] += 1
                    return False
        return True
    if chance < 0.95:
        client.pin(keys, namespace=namespace, ttl_s=1.0)
    elif chance < 0.97:
        client.lookup_nowait(keys, namespace=namespace, wait_s=5).cancel()
    elif chance < 0.99:
        client.end_session()
    else:
        client.clear(namespace, tiers=rng.random() < 0.2)
        counts["cleared"] += 1
    return True


# --- the one who kills ----------------------------------------------------------------------------------------


class Soak:
    """One server, its workers, and what they said."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.name = f"soak-{uuid4().hex[:8]}"
        self.rng = random.Random(seed)
        self.seeds = iter(range(seed * 1_000_000, seed * 1_000_000 + 1_000_000))
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.workers: list[tuple[subprocess.Popen[str], threading.Thread, list[str]]] = []
        self.server = self.serve()

    def serve(self) -> subprocess.Popen[str]:
        options = {
            "name": self.name,
            "runtime_dir": self.run,
            "state_dir": self.folder / "state",
            "drain_s": "5",
            "dirty": self.rng.choice(DIRTY),
            "store_wait_s": "0.3",
            "l1.size_bytes": "12MiB",
            "lease.promise_ttl_s": "5",
            "l2_order": "disk,cold,liar",
            "l2.disk.type": "fs",
            "l2.disk.path": self.folder / "disk",
            "l2.disk.capacity_bytes": "16MiB",
            "l2.cold.type": "mock",
            "l2.cold.capacity_bytes": "12MiB",
            "l2.cold.deadline_s": "1",
            "l2.cold.faults": json.dumps([
                "store error rate=0.05", "store slow rate=0.02 s=2", "exists slow rate=0.02 s=0.2",
                "load slow rate=0.02 s=2", "store lost rate=0.02",
            ]),
            "l2.liar.type": "mock",
            "l2.liar.capacity_bytes": "12MiB",
            "l2.liar.faults": json.dumps(["load flipped_bits rate=0.05", "load neighbour rate=0.02"]),
        }  # fmt: skip
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "lmcache_core.cli.main", "serve", "--log-level", "error", *flags]
        with (self.folder / "log").open("ab") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError(f"the server did not start: {(self.folder / 'log').read_text()[-2000:]}")
        return server

    def hire(self) -> None:
        command = [sys.executable, __file__, "--worker", self.name, str(self.run), str(next(self.seeds))]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        last: list[str] = []

        def listen() -> None:
            assert worker.stdout is not None
            for line in worker.stdout:
                last[:] = [line]

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        self.workers.append((worker, listener, last))

    def dismiss(self, index: int, *, kill: bool) -> None:
        worker, listener, last = self.workers.pop(index)
        if kill:
            worker.kill()
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
        status = worker.wait(SETTLE_S)
        listener.join(SETTLE_S)
        if last:
            self.counts.update(json.loads(last[0]))
        if status not in (0, -signal.SIGKILL):
            self.problems.append(f"a worker ended with status {status}")

    def client(self) -> Client:
        return Client.connect(self.name, runtime_dir=self.run, client_name="soak", maps_pool=False)

    def look_for_damage(self) -> None:
        """Ask a server, which counts for as long as it lives: nothing of an honest tier or of the pool is damaged."""
        with contextlib.suppress(DisconnectedError), self.client() as client:
            status = client.status()
            damaged = {
                tier["name"]: tier["counts"].get("load_damaged", 0)
                for tier in status["tiers"]["tiers"]
                if tier["name"] in HONEST
            }
            damaged["the pool"] = status["counters"].get("removed_damaged", 0)
            for where, count in damaged.items():
                if count:
                    self.problems.append(f"{count} objects of {where} were damaged")
            self.counts["looked_for_damage"] += 1

    def restart(self, number: int) -> None:
        self.look_for_damage()
        self.server.send_signal(number)
        status = self.server.wait(SETTLE_S)
        if number == signal.SIGTERM and status != 0:
            words = (self.folder / "log").read_text()[-2000:]
            self.problems.append(f"the server ended with status {status} after SIGTERM: {words}")
        assert self.server.stdout is not None
        self.server.stdout.close()
        self.server = self.serve()
        self.counts["server_restarts"] += 1

    def memory_bytes(self) -> int:
        """Of the server's own; the pool is not among it."""
        for line in Path(f"/proc/{self.server.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        raise RuntimeError("the server has no memory")

    def until(self, condition: Callable[[Json], bool], what: str) -> None:
        deadline = time.monotonic() + SETTLE_S
        with self.client() as client:
            while not condition(status := client.status()):
                if time.monotonic() > deadline:
                    self.problems.append(f"{what}: {json.dumps(status['l1'])}")
                    return
                time.sleep(0.05)

    # --- the acts ---------------------------------------------------------------------------------------------

    def storm(self, until_s: float) -> None:
        """Kill somebody every second or so; every tenth time it is the server."""
        while time.monotonic() < until_s and not self.problems:
            time.sleep(self.rng.uniform(0.3, 1.7))
            self.watch()
            if self.rng.random() < 0.1:
                self.restart(self.rng.choice([signal.SIGKILL, signal.SIGTERM]))
            else:
                self.dismiss(self.rng.randrange(len(self.workers)), kill=True)
                self.hire()
                self.counts["workers_killed"] += 1

    def calm(self, until_s: float) -> None:
        """The server lives on, workers go on dying: its memory must not grow."""
        began, first_bytes = time.monotonic(), 0
        third_s = (until_s - began) / 3
        while time.monotonic() < until_s and not self.problems:
            time.sleep(self.rng.uniform(0.3, 1.7))
            self.watch()
            self.dismiss(self.rng.randrange(len(self.workers)), kill=True)
            self.hire()
            self.counts["workers_killed"] += 1
            if not first_bytes and time.monotonic() > began + third_s:
                first_bytes = self.memory_bytes()
        grown = self.memory_bytes() - first_bytes if first_bytes else 0
        self.counts["server_grew_kib"] = grown >> 10
        if grown > GROWTH_BYTES_MAX:
            self.problems.append(f"the server's memory grew by {grown:,} bytes")

    def watch(self) -> None:
        for index in reversed(range(len(self.workers))):
            if self.workers[index][0].poll() is not None:
                self.dismiss(index, kill=False)
                self.hire()
        if self.server.poll() is not None:
            self.problems.append(f"the server died: {(self.folder / 'log').read_text()[-2000:]}")

    def account(self) -> None:
        """Nobody is left: everything is free again, and what was there was sound."""
        self.look_for_damage()
        aside = list((self.folder / "disk" / "damaged").glob("*"))
        if aside:  # whichever server found it
            self.problems.append(f"{len(aside)} objects of disk were set aside as damaged")
        for index in reversed(range(len(self.workers))):
            self.dismiss(index, kill=index % 2 == 0)
        if self.problems:
            return
        with self.client() as client:
            client.clear(tiers=True)
        self.until(lambda status: status["l1"]["sessions"] <= 1, "sessions are left")
        self.until(
            lambda status: (
                not any(status["l1"]["leases_by_kind"].values())
                and not status["l1"]["used_bytes"]
                and not status["l1"]["quarantine_by_holder"]
            ),
            "leases or memory are left",
        )
        self.until(
            lambda status: (
                not status["lookups_waiting"]
                and not status["tiers"]["lookups"]["loads_out"]
                and not status["tiers"]["stores"]["in_flight_bytes"]
                and not any(tier["objects"] for tier in status["tiers"]["tiers"])
            ),
            "the tiers hold what was cleared",
        )
        with self.client() as client:
            status = client.status()
        for name in ("internal_errors", "garbage"):
            if status["counters"].get(name):
                self.problems.append(f"the server counted {name}: {status['counters'][name]}")
        if status["tiers"]["faults"]:
            self.problems.append(f"the tiers counted faults: {(self.folder / 'log').read_text()[-3000:]}")
        self.server.send_signal(signal.SIGTERM)
        if self.server.wait(SETTLE_S) != 0:
            self.problems.append("the server did not end well")
        left = [path for path in (segment_path(self.name), self.run / self.name) if path.exists()]
        if left:
            self.problems.append(f"left behind: {left}")

    def end(self) -> None:
        """Whatever happened, nothing of ours runs on."""
        for worker, _, _ in self.workers:
            worker.kill()
            worker.wait()
        if self.server.poll() is None:
            self.server.kill()
            self.server.wait()
        segment_path(self.name).unlink(missing_ok=True)


def soak(seconds: float, seed: int) -> int:
    """Two thirds storm, one third calm, then the account."""
    with tempfile.TemporaryDirectory(prefix="lmc-soak-", ignore_cleanup_errors=True) as folder:
        run = Soak(Path(folder), seed)
        try:
            for _ in range(WORKERS):
                run.hire()
            began = time.monotonic()
            run.storm(began + seconds * 2 / 3)
            run.calm(began + seconds)
            run.account()
        finally:
            run.end()
    print(json.dumps({"seed": seed, "seconds": seconds, **run.counts}))
    for problem in run.problems:
        print(f"soak: {problem}", file=sys.stderr)
    if not run.counts["read"]:
        print("soak: nothing was read", file=sys.stderr)
    if not run.counts["looked_for_damage"]:
        print("soak: nobody looked for damaged objects", file=sys.stderr)
    sound = run.counts["looked_for_damage"] and not run.counts["wrong"]
    return 0 if sound and run.counts["read"] and not run.problems else 1


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="Four workers, three tiers, random kills; every byte is checked.")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1000), help="default: by chance")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, run, seed = options.worker
        return work(name, run, int(seed))
    return soak(options.seconds, options.seed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CacheError, KeyboardInterrupt) as error:
        print(f"soak: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(os.EX_SOFTWARE)
