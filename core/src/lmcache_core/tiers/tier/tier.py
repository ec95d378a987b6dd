"""One configured tier: adapter, lanes, breakers, codec chain, accounting. Lives on the loop's thread."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from lmcache_core.clock import Clock
from lmcache_core.cpu_share import CpuShare
from lmcache_core.errors import SettingsError
from lmcache_core.kernel.guard import GuardedPolicy
from lmcache_core.kernel.tenants import TenantUsage
from lmcache_core.limits import (
    ERROR_EXCERPT_CHARS_MAX,
    TIER_BATCH_KEYS_MAX,
    TIER_CLOSE_S,
    TIER_LOOKUP_S,
)
from lmcache_core.policies.contracts import EvictionPolicy, TierView
from lmcache_core.pool.layout import Layout
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.contract import Serde
from lmcache_core.tiers.contract import AdapterContext, L2Adapter, Outcome, Recount, Result
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import HEADER_BYTES, TIER_KEY_BYTES, ObjectKind, object_kind, split_tier_key
from lmcache_core.tiers.object.transfer import Carrier, Loaded, NoRoom, Transfer
from lmcache_core.tiers.observer import TierObserver
from lmcache_core.tiers.tier.accounting import Accounting, Sizes
from lmcache_core.tiers.tier.breaker import Breaker
from lmcache_core.tiers.tier.breaker_states import BreakerState
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.config import TierConfig
from lmcache_core.tiers.tier.doubts import Doubts
from lmcache_core.tiers.tier.lanes import HOUSEKEEPING, WRITE_BACK, Call, Note, Priority
from lmcache_core.tiers.tier.latency import Latency
from lmcache_core.tiers.tier.medium import Medium
from lmcache_core.tiers.tier.order import KeyAccess, Watch
from lmcache_core.tiers.tier.rebuild import Rebuild
from lmcache_core.tiers.tier.reclaim import Reclaim
from lmcache_core.tiers.tier.trouble import Losses, Trouble

__all__ = ["Tier", "TierConfig"]

TENANTS_SHOWN_MAX = 50  # per tier: `status` is one frame; `quota` shows all
_LATE_COUNTS_S = 0.25  # a call with less time than this says nothing about the tier's health
_PROBE_KEY = bytes(8)  # shorter than any tier key: it is never there


class Tier:
    """Pass it to `Tiering`, which starts it.

    `eviction` is a policy object of its own (each orders one store); None: the tier evicts nothing, and answers FULL at
    its capacity. `make_eviction` makes another such object, for each tenant.
    """

    def __init__(
        self,
        name: str,
        adapter: L2Adapter,
        config: TierConfig = TierConfig(),  # noqa: B008 - frozen
        *,
        serdes: Sequence[Serde] = (),
        eviction: EvictionPolicy | None = None,
        make_eviction: Callable[[], EvictionPolicy] | None = None,
        wrap: Sequence[str] = (),
        context: AdapterContext | None = None,
    ) -> None:
        if eviction is not None and config.capacity_bytes is not None and not adapter.capabilities.delete:
            raise SettingsError(
                f"tier {name!r} has a capacity and an adapter that cannot delete: set l2.{name}.eviction to none"
            )
        if not adapter.capabilities.delete:
            eviction = None  # its victims would count as leaving, and stay
        self.name = name
        self.adapter = adapter
        self.wrap = list(wrap)  # for `status`: the adapter's wrappers
        self.medium_name = adapter.medium()  # no other tier may use it
        self._recount = Recount() if context is None else context.recount  # the one that the adapter was built with
        self.config = config
        self.chain = CodecChain(serdes)
        self.counts: Counter[str] = Counter()
        self.latencies = {what: Latency() for what in ("lookup", "load", "store")}  # of calls, including their wait
        self.trouble = Trouble(name, self.counts)
        self._clock = Clock()  # the server's, from `start` on
        guarded = None if eviction is None else GuardedPolicy(eviction, self._policy_failed)
        self.accounting = Accounting(
            config.capacity_bytes, config.watermark, config.evict_ratio, guarded, config.eviction_name
        )
        if self.accounting.tenancy is not None:
            self.accounting.tenancy.make = make_eviction
        self.hurries = False  # the server is ending: store what is owed now
        self.reads = Breaker()
        self.writes = Breaker()
        self.draining = False
        self.batch_keys_max = max(1, min(adapter.capabilities.batch_keys_max, TIER_BATCH_KEYS_MAX))
        self._kinds: dict[int, ObjectKind] = {}
        self._stored_bytes: dict[int, int] = {}
        self._sizes = Sizes()

    def start(
        self,
        post: Callable[[Call | Note], None],
        epochs: Epochs,
        clock: Clock,
        observer: TierObserver | None = None,
    ) -> None:
        """Called once, by Tiering. `observer` is told when the breaker opens and closes, and which objects the tier no
        longer has."""
        self._post = post
        self._epochs = epochs
        self._clock = clock
        self.store_cpu = CpuShare(self.config.store_cpu_share, lambda: clock.now)
        self.losses = Losses(clock)
        medium = self._medium = Medium(self.name, self.adapter, self.config, self.batch_keys_max, clock, post)
        self._carrier = Carrier(self.adapter, self.chain, medium.stopping)
        self.lanes, self.order = medium.lanes, medium.order
        self.doubts = Doubts(medium, self.accounting, self._recount, lambda found: self.reclaim.delete_former(found))
        self.reclaim = Reclaim(medium, self.accounting, self.losses, self.doubts, epochs)
        self.rebuild = Rebuild(medium, self.accounting, self.reclaim, self.doubts, self.trouble)
        if observer is not None:
            self._watch(observer)

    def _watch(self, observer: TierObserver) -> None:
        for what, breaker in (("reads", self.reads), ("writes", self.writes)):
            breaker.on_move = partial(self._told, observer, what, breaker)
        self.accounting.on_removed = partial(self._tell_removed, observer)

    def _tell_removed(self, observer: TierObserver, names: Sequence[bytes]) -> None:
        """Skips what a clear has made unreachable: later stores use other names."""
        by_namespace: dict[int, list[bytes]] = {}
        for name in names:
            if len(name) == TIER_KEY_BYTES:
                key, namespace, epoch = split_tier_key(name)
                if epoch >= self._epochs.of(namespace):
                    by_namespace.setdefault(namespace, []).append(key)
        for namespace, keys in by_namespace.items():
            observer.removed(self.name, namespace, keys)

    def _told(self, observer: TierObserver, what: str, breaker: Breaker, state: BreakerState) -> None:
        observer.breaker_moved(self.name, what, state, breaker.last_error if state is BreakerState.OPEN else "")

    # --- what the controllers ask -------------------------------------------------------------------------
    @property
    def view(self) -> TierView:
        return TierView(self.name, self.reads.state is BreakerState.CLOSED)

    def kind(self, layout: Layout) -> ObjectKind:
        """What objects of this layout share on this tier. Raises `UsageError` if the layout cannot be described."""
        kind = self._kinds.get(layout.fingerprint)
        if kind is None:
            kind = self._kinds[layout.fingerprint] = object_kind(layout, self.chain)
        return kind

    def stored_bytes(self, layout: Layout) -> int:
        """The largest size of an object of this layout on the medium. Raises what the serdes raise."""
        size = self._stored_bytes.get(layout.fingerprint)
        if size is None:
            self.kind(layout)
            size = self._stored_bytes[layout.fingerprint] = HEADER_BYTES + self.chain.encoded_bytes_max(layout)
        return size

    def bytes_to_reserve(self, layout: Layout, known: int = 0) -> tuple[int, bool]:
        """Bytes for one object of this layout, and whether they are certain. `known`: its size, if it was encoded
        before. Raises what the serdes raise.

        If nothing is known, the free room without an eviction: the object is encoded, and then its size is known.
        """
        most = self.stored_bytes(layout)
        if self.chain.is_identity:
            return most, True
        if known:
            return known, True
        capacity, seen = self.accounting.capacity_bytes, self._sizes.expected(layout.fingerprint)
        if capacity is None or (seen is not None and seen <= capacity):
            return (most if seen is None else seen), True
        return min(most, max(1, self.accounting.headroom_bytes or 0)), False

    def ask(
        self,
        keys: Sequence[bytes],
        deadline: float,
        priority: Priority,
        answer: Callable[[Sequence[bool] | None, TierReason | None], None],
    ) -> TierReason | None:
        """Ask which tier keys are there; `answer(found, None)` or `answer(None, reason)` follows, once.

        A returned reason means that nothing was asked, and no answer follows.
        """
        if self.reads.state is not BreakerState.CLOSED:
            return TierReason.TIER_ERROR
        step = max(1, self.adapter.capabilities.batch_keys_max)
        # Only keys that were known before, and that do not change while the tier is asked.
        known = list(self.accounting.known(keys))
        changed = self.order.watch(known)

        def work() -> list[bool]:
            found: list[bool] = []
            for at in range(0, len(keys), step):
                found += self._medium.exists(keys[at : at + step], deadline)
            return found

        def ended(call: Call) -> None:
            self.order.unwatch(changed, known)
            self._timed("lookup", call)
            if self._returned_late(call, self.reads):
                return
            if call.error is not None:
                self._failed(self.reads, "lookup", str(call.error) or repr(call.error))
                self.losses.note(keys, TierReason.TIER_ERROR, self.last_error)
                answer(None, TierReason.TIER_ERROR)
                return
            self._went_well(self.reads, "lookup")
            # Another server, or the medium itself, deleted these.
            expected = set(known)
            gone = [k for k, there in zip(keys, call.result, strict=True) if not there and k in expected]
            self.accounting.remove([key for key in gone if not changed.saw(key)])
            answer(call.result, None)

        def late(call: Call) -> None:
            self.order.unwatch(changed, known)
            self._late(call, self.reads, "lookup")
            self.losses.note(keys, TierReason.LATE, self.last_error)
            answer(None, TierReason.LATE)

        call = Call(work, deadline, priority, ended, late)
        refused = self._submit_lookup(call)
        if refused is not None:
            self.order.unwatch(changed, known)
        return refused

    def load(
        self,
        batch: Sequence[Transfer],
        deadline: float,
        priority: Priority,
        on_end: Callable[[Sequence[Loaded]], None],
        on_late: Callable[[bool], None],
    ) -> Call | TierReason:
        """Load objects into their views. `on_end(results)` follows for every call that ran.

        `on_late(running)` comes first if the deadline passes. If not `running`, the call never ran: no `on_end`
        follows, and no lane writes to the views.
        """
        if self.reads.state is not BreakerState.CLOSED:
            return TierReason.TIER_ERROR
        keys = [transfer.tier_key for transfer in batch]
        changed = Watch()

        def ended(call: Call) -> None:
            self._timed("load", call)
            results: Sequence[Loaded] = call.result or [
                Loaded(TierReason.TIER_ERROR, error=repr(call.error)) for _ in batch
            ]
            if not self._returned_late(call, self.reads):
                self._judge(self.reads, "load", results)
            self._note_loaded(keys, results, changed)
            on_end(results)

        def late(call: Call) -> None:
            self._late(call, self.reads, "load")
            self.losses.note(keys, TierReason.LATE, self.last_error)
            # not "is LATE": it may have returned since it was reported late, and its end still follows
            on_late(call.state is not CallState.EXPIRED)

        call = Call(partial(self._carrier.load, batch, deadline), deadline, priority, ended, late)
        call.allowed_s = deadline - self._clock.now
        return call if self.order.submit(self._medium.loads, call, keys, KeyAccess.LOAD, changed) else self._throttled()

    def store(
        self, batch: Sequence[Transfer], reserved: Sequence[int], on_end: Callable[[Sequence[Outcome]], None]
    ) -> TierReason | None:
        """Store objects of one kind; `on_end(outcomes)` follows when no lane reads their views any more. The caller has
        checked `stores_allowed` and `reserved` room, in bytes for each object; an object that turns out larger is
        `NoRoom`. A returned reason means that nothing was begun."""
        deadline = self._clock.now + self.config.deadline_s
        keys = [transfer.tier_key for transfer in batch]
        fingerprint, namespace = batch[0].kind.layout.fingerprint, batch[0].namespace
        held = guessed = 0
        used_s = 0.0

        def hold(nbytes: int, of_that_guessed: int = 0) -> None:
            nonlocal held, guessed
            self.accounting.reserve(namespace, nbytes - held)
            self.accounting.bytes_guessed += of_that_guessed - guessed
            held, guessed = nbytes, of_that_guessed

        def noted(note: Note) -> None:
            sizes, room, not_encoded = note.result
            for nbytes in sizes:
                self._sizes.learn(fingerprint, nbytes)
            hold(room, not_encoded)

        def work() -> list[Outcome]:
            nonlocal used_s
            began_s = time.thread_time()
            try:
                if self.chain.is_identity:
                    return self._carrier.store(batch, deadline)
                return self._carrier.store(batch, deadline, reserved, lambda *known: self._post(Note(noted, known)))
            finally:
                used_s = time.thread_time() - began_s

        def ended(call: Call) -> None:
            self._timed("store", call)
            self.store_cpu.charge(used_s)
            hold(0)
            outcomes: Sequence[Outcome] = call.result or [
                Outcome(Result.FAILED, nbytes, error=repr(call.error)) for nbytes in reserved
            ]
            if not self._returned_late(call, self.writes):
                self._judge(self.writes, "store", outcomes)
            self._note_stored(keys, outcomes)
            on_end(outcomes)

        def late(call: Call) -> None:
            self._late(call, self.writes, "store")
            if call.state is CallState.EXPIRED:  # otherwise the lane is still reading: wait for its end
                hold(0)
                on_end([Outcome(Result.FAILED, error="not stored in time", retryable=True)] * len(batch))

        call = Call(work, deadline, WRITE_BACK, ended, late)
        call.allowed_s = deadline - self._clock.now
        if not self.order.submit(self._medium.stores, call, keys, KeyAccess.STORE):
            return self._throttled()
        hold(sum(reserved), 0 if self.chain.is_identity else sum(reserved))
        return None

    def remove(self, keys: Sequence[bytes]) -> set[bytes]:
        """Delete tier keys, and count them as missing from now on. Returns those that were counted as present."""
        had = self.accounting.known(keys)
        self.accounting.damaged(keys)
        self.losses.note(list(had), TierReason.CLEARED)
        self.reclaim.delete(keys)
        return had

    @property
    def has_room_for_stores(self) -> bool:
        """Whether another batch would soon begin. A few may wait, so that no lane runs dry."""
        if self.stores_rest_until > self._clock.now:
            return False
        return self._medium.stores.backlog + self.order.held(self._medium.stores) < 2

    @property
    def stores_rest_until(self) -> float:
        """Until then stores have used up their share of the processor; what is owed waits, or is evicted first."""
        return -math.inf if self.hurries else self.store_cpu.rests_until

    def stores_allowed(self) -> bool:
        """Whether a batch may be stored now. With a half-open breaker, True once: the batch is the probe."""
        return self.has_room_for_stores and self.writes.allows(self._clock.now)

    def cancel(self, call: Call) -> bool:
        """Cancel a load. True: it never runs, and no callback follows."""
        return self.order.cancel(call)

    def reconfigure(self, config: TierConfig) -> None:
        """Apply new figures, and accept stores again. `connections` stays unchanged."""
        self.config = replace(config, connections=self.config.connections)
        self.draining = False
        self.accounting.resize(config.capacity_bytes, config.watermark, config.evict_ratio)
        self._medium.config = self.config
        self.store_cpu.share = config.store_cpu_share

    # --- the loop's turn ----------------------------------------------------------------------------------
    def step(self) -> None:
        """Report late calls, continue the scan, evict, probe."""
        now = self._clock.now
        self._medium.expire(now)
        if self._recount.take():
            self.rebuild.again()
        self.rebuild.step()
        self.reclaim.step()
        self.doubts.step()
        if self.reads.state is BreakerState.OPEN and self.reads.allows(now):
            self._probe()

    def next_deadline(self) -> float | None:
        """When `step` has work, apart from completions."""
        times = [self._medium.next_deadline]
        times += [at for at in (self.rebuild.next_at, self.reclaim.next_at, self.doubts.next_at) if at is not None]
        if self.reads.state is BreakerState.OPEN:
            times.append(self.reads.probe_at)
        soonest = min(times)
        return None if soonest == float("inf") else soonest

    def abandon(self) -> None:
        """Report every call as late now: queued calls never run, running calls end on their own."""
        self._medium.expire(float("inf"))

    def close(self, *, waits: bool = True) -> bool:
        """Waits for no call. True: none is out; otherwise the adapter is closed when the last one has returned.
        `waits`: at the end of a process, give the adapter's own close a moment."""
        idle = self._medium.close()
        # The adapter closes after its last call, and may block on its medium: that must not delay the end.
        closer = threading.Thread(target=self._medium.close_adapter, name=f"tier-{self.name}-close", daemon=True)
        closer.start()
        if waits and idle:
            closer.join(TIER_CLOSE_S)
        return idle

    def status(self) -> dict[str, Any]:
        """For `status`: plain values, cheap to make."""
        counts = self.accounting
        return {
            "name": self.name,
            "draining": self.draining,
            "wrap": self.wrap,
            "reads": {"breaker": str(self.reads.state), "opened": self.reads.opened},
            "writes": {"breaker": str(self.writes.state), "opened": self.writes.opened},
            "last_error": self.last_error,
            "last_error_age_s": self.last_error_age_s,
            "bytes_used": counts.bytes_used,
            "bytes_reserved": counts.bytes_reserved,
            "bytes_leaving": counts.bytes_leaving,
            "objects": counts.objects,
            "capacity_bytes": counts.capacity_bytes,
            "tenants": [] if counts.tenancy is None else _tenants(counts.tenancy.usage()),
            "scan": str(self.rebuild.state),
            "leads": counts.leads,
            "deletes": {
                "done": self.reclaim.deleted,
                "evicted": self.reclaim.evicted,
                "failed": self.reclaim.failed,  # attempts: an object that the medium does not delete counts each time
                "waiting": self.reclaim.waiting,
                "by_others": self.rebuild.forgotten,
                "last_error": self.reclaim.last_error,
                "in_doubt": len(self.doubts),
            },
            "lanes": {
                lane.name: {"queued": lane.queued, "running": lane.running, "hung": lane.hung} for lane in self.lanes
            },
            "counts": dict(self.counts),
            "store_cpu": {
                "used_s": self.store_cpu.used_s,
                "share": None if math.isinf(self.store_cpu.share) else self.store_cpu.share,
                "rests": self.store_cpu.rests,
            },
            "latencies": {what: latency.status() for what, latency in self.latencies.items()},
        }

    def _probe(self) -> None:
        """Ask for a key that never exists: any answer means that the tier is back."""

        def ended(call: Call) -> None:
            if self._returned_late(call, self.reads):
                return
            if call.error is not None:
                self._failed(self.reads, "probe", str(call.error) or repr(call.error))
            else:
                self._went_well(self.reads, "probe")
                self.trouble.well("lookup", self._clock.now)  # a probe is a lookup

        deadline = self._clock.now + TIER_LOOKUP_S
        call = Call(
            lambda: self.adapter.exists([_PROBE_KEY], deadline),
            deadline,
            HOUSEKEEPING,
            ended,
            lambda call: self._late(call, self.reads, "probe"),
        )
        if self._submit_lookup(call) is not None:
            self.reads.failed(self._clock.now, "the queue of lookups is full")

    # --- ends of calls ------------------------------------------------------------------------------------
    def _timed(self, what: str, call: Call) -> None:
        self.latencies[what].add(self._clock.now - (call.deadline - call.allowed_s))

    def _submit_lookup(self, call: Call) -> TierReason | None:
        call.allowed_s = call.deadline - self._clock.now
        return None if self._medium.lookups.submit(call) else self._throttled()

    def _throttled(self) -> TierReason:
        self.counts["throttled"] += 1
        return TierReason.THROTTLED

    @property
    def last_error(self) -> str:
        """Empty if the tier is well."""
        return self.trouble.text

    @property
    def last_error_age_s(self) -> float | None:
        age = self.trouble.age_s(self._clock.now)
        return None if age is None else round(age, 3)

    def _policy_failed(self, method: str, error: BaseException) -> None:
        """No evictions then: what needs room waits, or is answered FULL."""
        self.counts["eviction_failed"] += 1
        text = f"its eviction policy failed in {method}: {error!r}"[:ERROR_EXCERPT_CHARS_MAX]
        self.trouble.note("eviction", text, self._clock.now)

    def _late(self, call: Call, breaker: Breaker, what: str) -> None:
        self.counts[f"{what}_late"] += 1
        self.trouble.note(what, f"{what} not done by its deadline", self._clock.now)
        if call.state is CallState.LATE and call.allowed_s >= _LATE_COUNTS_S:
            breaker.failed(self._clock.now, self.last_error)
        elif breaker.state is BreakerState.HALF_OPEN:
            breaker.failed(self._clock.now, self.last_error)  # it was the probe

    def _returned_late(self, call: Call, breaker: Breaker) -> bool:
        if call.was_late and call.error is None:
            breaker.came_back(self._clock.now)
        return call.was_late

    def _failed(self, breaker: Breaker, what: str, error: str) -> None:
        self.trouble.failed(what, error, self._clock.now)
        breaker.failed(self._clock.now, error)

    # --- the books: whole batches at once, because this runs on the loop and a batch may have hundreds of objects -----
    def _note_loaded(self, keys: Sequence[bytes], results: Sequence[Loaded], changed: Watch) -> None:
        """A load has ended. Its result for a key that was `changed` meanwhile is out of date."""
        there: list[tuple[bytes, int]] = []
        gone: list[bytes] = []
        damaged: list[bytes] = []
        broken: list[bytes] = []
        for key, result in zip(keys, results, strict=True):
            if result.reason is None:
                there.append((key, result.nbytes))
                continue
            self.counts[f"load_{result.reason}"] += 1
            if changed.saw(key):
                continue
            self.losses.note([key], result.reason, result.error)
            if result.reason is TierReason.GONE:
                gone.append(key)
            if result.reason is TierReason.DAMAGED:
                self.trouble.note("load", result.error, self._clock.now)
                damaged.append(key)
                if not result.mismatched:
                    broken.append(key)
        self.counts["loaded"] += len(there)
        self.counts["loaded_bytes"] += sum(nbytes for _, nbytes in there)
        found = [each for each in there if not changed.saw(each[0])]
        self.accounting.add(found)  # including what another server stored
        self.reclaim.delete_former([key for key, _ in found])
        self.accounting.remove(gone)
        self.accounting.damaged(damaged)
        self.reclaim.set_aside(broken)

    def _note_stored(self, keys: Sequence[bytes], outcomes: Sequence[Outcome]) -> None:
        """A store has ended."""
        there: list[tuple[bytes, int]] = []
        unknown: dict[bytes, int | None] = {}  # a failed store, or an earlier attempt, may have been done
        full = False
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome.result is Result.DONE:
                there.append((key, outcome.nbytes))
                continue
            if isinstance(outcome, NoRoom):
                self.counts["store_encoded_again"] += 1
                continue
            self.counts[f"store_{outcome.result}"] += 1
            unknown[key] = outcome.nbytes
            full |= outcome.result is Result.FULL
            if outcome.error:
                self.trouble.note("store", outcome.error, self._clock.now)
        self.counts["store_done"] += len(there)
        self.counts["stored_bytes"] += sum(nbytes for _, nbytes in there)
        self.accounting.add(there)
        self.doubts.add(unknown)
        if full:
            self.reclaim.medium_is_full()
        # A clear may have happened while they were stored.
        self.reclaim.delete_former([key for key, _ in there])

    # --- health -------------------------------------------------------------------------------------------
    def _judge(self, breaker: Breaker, what: str, results: Sequence[Loaded] | Sequence[Outcome]) -> None:
        """Tell the breaker how a batch went: one failure of the tier makes the whole call a failure."""
        for result in results:
            failed = (
                result.reason is TierReason.TIER_ERROR if isinstance(result, Loaded) else result.result is Result.FAILED
            )
            if failed:
                self._failed(breaker, what, result.error)
                return
        self._went_well(breaker, what)

    def _went_well(self, breaker: Breaker, what: str) -> None:
        breaker.succeeded()
        self.trouble.well(what, self._clock.now)


def _tenants(usage: list[TenantUsage]) -> list[dict[str, Any]]:
    """The largest ones."""
    return [asdict(each) for each in sorted(usage, key=lambda each: -each.used_bytes)[:TENANTS_SHOWN_MAX]]
