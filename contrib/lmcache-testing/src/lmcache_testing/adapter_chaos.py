"""Minutes of random work (`--kit=soak`), with trouble and kills in between (`--kit=chaos`)."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import L2Adapter, LoadItem, Outcome, Result, StoreItem
from lmcache_testing import material
from lmcache_testing.contract import Contract, not_judged, raised
from lmcache_testing.held import held
from lmcache_testing.speeds import Kit

WORKERS = 4
KEYS = 12  # per worker: few, so that they are overwritten
REPORT_S = 30.0  # a safety net
_FAILED = "a failed"  # prefix of a failure text if a call failed, and no bytes were wrong
_REPORT = struct.Struct("<Q")


class ChaosTests(Contract):
    """Faults that only show over time."""

    def test_it_does_its_work_for_minutes(self, adapter: L2Adapter, kit: Kit) -> None:
        if kit.speed != "soak":
            not_judged("runs with --kit=soak")
        _work(adapter, kit)  # one warm-up round, so that pools are open
        before = held()
        for round_ in range(max(1, round(kit.seconds / 5))):
            _work(adapter, kit._replace(seconds=5.0, seed=kit.seed + round_))
        grown = {what: n for what, n in held().more_than(before).items() if n > WORKERS}
        assert not grown, f"{kit.seconds:.0f} s of work: the process holds more than before: {grown}"

    def test_faults_and_threads_leave_no_wrong_bytes(
        self, adapter: L2Adapter, hang: Any, stall: Any, outage: Any, lock: Any, kit: Kit
    ) -> None:
        if kit.speed != "chaos":
            not_judged("runs with --kit=chaos")
        given = {"hang": hang, "stall": stall, "outage": outage, "lock": lock}
        faults = [(name, fault) for name, fault in given.items() if fault is not None]
        if not faults:
            not_judged("one of the fixtures 'hang', 'stall', 'outage' and 'lock' unlocks it")
        part = kit._replace(seconds=kit.seconds / (2 * len(faults)), speed="chaos")
        for name, fault in faults:
            _work(adapter, part, fault, name)
            _work(adapter, part)

    def test_a_killed_process_leaves_whole_objects(self, adapter: L2Adapter, reopen: Any, kit: Kit) -> None:
        """Processes that hold an adapter are killed while they store; every store that was reported DONE survives."""
        if kit.speed != "chaos":
            not_judged("runs with --kit=chaos")
        if reopen is None or not adapter.capabilities.durable:
            not_judged("needs a fixture 'reopen', and an adapter that claims durable")
        rng, end, kills, stored = random.Random(kit.seed), time.monotonic() + kit.seconds, 0, 0
        alone = not adapter.capabilities.shared  # then the medium is the other process's, or ours
        if alone:
            adapter.close()
        while time.monotonic() < end:
            with _storing(reopen, kills) as storing:
                done = storing.until_killed(rng.randrange(1, 40), rng.random() * 0.01)
            kills, stored = kills + 1, stored + len(done)
            with reopen() if alone else nullcontext(adapter) as after:
                for number in range(max(done, default=-1) + 3):
                    outcome, found = material.load(after, _killed_key(number), 20_000)
                    message = f"process {kills} was killed while it stored: a load of object {number} said"
                    if outcome.result is Result.DONE:
                        mine = found[: outcome.nbytes] == _killed_content(kills - 1, number)
                        former = any(found[: outcome.nbytes] == _killed_content(n, number) for n in range(kills))
                        assert former, f"{message} DONE with bytes that nobody stored"
                        assert mine or number not in done, f"{message} the former object, and the new one was DONE"
                    else:
                        assert outcome.result in (Result.MISS, Result.DAMAGED), f"{message} {material.seen(outcome)}"
                        assert number not in done, f"{message} {material.seen(outcome)}, and its store was DONE"
        assert stored, f"{kills} processes were killed, and none got DONE for a store"


class _KnownObjects:
    """What may be under each key of one worker. A call that failed may still take effect later."""

    def __init__(self) -> None:
        self.now: dict[bytes, set[bytes]] = {}
        self.late: dict[bytes, set[bytes]] = {}

    def may_be(self, key: bytes) -> set[bytes]:
        """Possible contents; b"": nothing."""
        return self.now.get(key, {b""}) | self.late.get(key, set())

    def ended(self, key: bytes, content: bytes, outcome: Outcome | None) -> None:
        """A store of this content has ended; with b"", a delete."""
        if outcome is not None and outcome.result is Result.DONE:
            self.now[key] = {content}
        else:
            self.late.setdefault(key, set()).add(content)


_rounds = itertools.count()


def _work(adapter: L2Adapter, kit: Kit, fault: Any = None, name: str = "") -> None:
    """For the given seconds, workers store, load, look up and delete at random, each under keys of its own; the context
    manager `fault` is active for part of that. Everything DONE is checked."""
    wrong: list[str] = []
    round_ = next(_rounds)
    end = time.monotonic() + kit.seconds
    pause = threading.Event()

    def worker(me: int) -> None:
        rng, known = random.Random(f"{kit.seed}/{round_}/{me}"), _KnownObjects()
        keys = [material.key(number, f"work {round_} {me} ") for number in range(KEYS)]
        while time.monotonic() < end and not wrong:
            deadline = time.monotonic() + (1.0 if fault is not None else 60.0)
            try:
                seen = _step(adapter, rng, rng.choice(keys), known, deadline)
            except TierError as error:
                seen = "" if error.retryable or fault is not None else f"a call raised {error}, and it is well"
            except Exception as error:  # noqa: BLE001 - of a thread: raised by the test
                seen = f"a call raised {raised(error)}"
            if seen and not (fault is not None and seen.startswith(_FAILED)):
                wrong.append(seen)

    count = WORKERS if adapter.capabilities.thread_safe else 1
    threads = [threading.Thread(target=worker, args=(me,), name="kit-work", daemon=True) for me in range(count)]
    for thread in threads:
        thread.start()
    pause.wait(kit.seconds / 4)
    with fault if fault is not None else nullcontext():
        pause.wait(kit.seconds / 4)
    for thread in threads:
        thread.join(kit.seconds + 60.0)
    when = f" while the medium is in trouble ({name})" if name else ""
    late = sum(thread.is_alive() for thread in threads)
    assert not late, f"{late} workers did not come back{when}"
    assert not wrong, f"random work{when}: {wrong[0]}"


def _step(adapter: L2Adapter, rng: random.Random, key: bytes, known: _KnownObjects, deadline: float) -> str:
    """One call. Returns what is wrong, in words; "": nothing. A retryable failure is not wrong."""
    what = rng.choice(["store", "store", "load", "load", "load", "exists", "delete"])
    if what == "store":
        content = material.content(rng.randrange(1 << 30), material.fitting(adapter, rng.randrange(1, 60_000)))
        known.late.setdefault(key, set()).add(content)
        (outcome,) = adapter.store([StoreItem(key, [memoryview(content)])], deadline)
        if outcome.result is Result.DONE:
            known.late[key].discard(content)
        known.ended(key, content, outcome)
        return _failure("store", outcome)
    if what == "delete" and adapter.capabilities.delete:
        known.late.setdefault(key, set()).add(b"")
        (outcome,) = adapter.delete([key], deadline)
        known.ended(key, b"", outcome)
        return _failure("delete", outcome)
    if what == "exists":
        (there,) = adapter.exists([key], deadline)
        possible = {content != b"" for content in known.may_be(key)}
        forgotten = adapter.capabilities.evicts and not there
        return "" if bool(there) in possible or forgotten else f"exists said {there}, which cannot be"
    target = bytearray(60_000)
    (outcome,) = adapter.load([LoadItem(key, [memoryview(target)])], deadline)
    if outcome.result is Result.DONE:
        right = bytes(target[: outcome.nbytes]) in known.may_be(key)
        return "" if right else "a load said DONE with bytes that nobody stored there last"
    if outcome.result is Result.MISS:
        right = b"" in known.may_be(key) or adapter.capabilities.evicts
        return "" if right else "a load said MISS for what was stored"
    return _failure("load", outcome)


def _failure(what: str, outcome: Outcome) -> str:
    may_fail = outcome.result in (Result.DONE, Result.THROTTLED) or outcome.retryable
    return "" if may_fail else f"{_FAILED} {what} was answered {material.seen(outcome)}"


# --- processes that are killed --------------------------------------------------------------------------------------
def _killed_key(number: int) -> bytes:
    return material.key(number, "killed")


def _killed_content(turn: int, number: int) -> bytes:
    return material.content(1000 * turn + number, 4096 + 97 * number)


class _Storing(NamedTuple):
    """A process that stores one object after another, and reports each store that is DONE."""

    pid: int
    reports: int

    def until_killed(self, count: int, more_s: float) -> set[int]:
        """Kill it a moment after this many reports. Returns the objects that it reported."""
        done: set[int] = set()
        while len(done) < count:
            packed = os.read(self.reports, _REPORT.size)
            if len(packed) < _REPORT.size:
                break
            done.add(_REPORT.unpack(packed)[0])
        time.sleep(more_s)
        os.kill(self.pid, signal.SIGKILL)
        while len(packed := os.read(self.reports, _REPORT.size)) == _REPORT.size:
            done.add(_REPORT.unpack(packed)[0])
        return done


@contextmanager
def _storing(reopen: Callable[[], L2Adapter], turn: int) -> Iterator[_Storing]:
    reports, report = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the kit: the child uses none of them
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(int(REPORT_S))
            with reopen() as mine:
                for number in range(60):
                    outcome = material.store(mine, _killed_key(number), _killed_content(turn, number))
                    if outcome.result is Result.DONE:
                        os.write(report, _REPORT.pack(number))
            status = 0
        finally:
            os._exit(status)
    os.close(report)
    try:
        yield _Storing(pid, reports)
    finally:
        os.close(reports)
        os.waitpid(pid, 0)
