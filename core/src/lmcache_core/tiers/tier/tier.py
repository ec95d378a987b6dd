"""One configured tier: adapter, lanes, breakers, codec chain, accounting. Lives on the loop's thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn

from lmcache_core import limits
from lmcache_core.clock import Clock
from lmcache_core.cpu_share import CpuShare
from lmcache_core.errors import CacheError, SettingsError, UsageError, printable
from lmcache_core.guard import guarded
from lmcache_core.kernel.guard import GuardedPolicy
from lmcache_core.kernel.tenants import TenantUsage
from lmcache_core.policies.contracts import EvictionPolicy, TierView
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol.codec import plain
from lmcache_core.serde.certificate import Certificate
from lmcache_core.serde.chain import CodecChain
from lmcache_core.serde.contract import Serde
from lmcache_core.threads import started
from lmcache_core.tiers.contract import AdapterContext, L2Adapter, Recount
from lmcache_core.tiers.l1 import TierReason
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import HEADER_BYTES, TIER_KEY_BYTES, ObjectKind, object_kind, split_tier_key
from lmcache_core.tiers.object.transfer import Carrier
from lmcache_core.tiers.observer import TierObserver
from lmcache_core.tiers.tier.accounting import Accounting, Sizes
from lmcache_core.tiers.tier.breaker import Breaker, Breakers
from lmcache_core.tiers.tier.breaker_states import BreakerState
from lmcache_core.tiers.tier.call_states import CallState
from lmcache_core.tiers.tier.config import TierConfig
from lmcache_core.tiers.tier.doubts import Doubts
from lmcache_core.tiers.tier.health import Health
from lmcache_core.tiers.tier.lanes import Call, Posted
from lmcache_core.tiers.tier.medium import Medium
from lmcache_core.tiers.tier.probes import LoadProbe, LookupProbe
from lmcache_core.tiers.tier.rebuild import Rebuild
from lmcache_core.tiers.tier.rebuild_states import RebuildState
from lmcache_core.tiers.tier.reclaim import Reclaim
from lmcache_core.tiers.tier.trouble import Losses
from lmcache_core.tiers.tier.verdicts import Verdicts

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
        if serdes and not adapter.capabilities.stores:
            raise SettingsError(
                f"tier {name!r} never stores, and what others have is not encoded: leave l2.{name}.serde out"
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
        self.certificate: Certificate | None = None  # what is demanded of a lossy chain
        self._certified: dict[int, None] = {}  # the namespaces for which it is good, the newest last
        self.health = Health(name)
        self.clock = Clock()  # the server's, from `start` on
        guarded = None if eviction is None else GuardedPolicy(eviction, self._policy_failed)
        self.accounting = Accounting(
            config.capacity_bytes, config.watermark, config.evict_ratio, guarded, config.eviction_name
        )
        if self.accounting.tenancy is not None:
            self.accounting.tenancy.make = make_eviction
        self._hurries_since_s: float | None = None
        self._given_up = {
            "lookup": 0,
            "load": 0,
            "store": 0,
            "delete": 0,
        }  # how often their breakers had opened at the last look
        self._no_room_since_s: float | None = None
        self.draining = False  # an operator wants nothing more stored
        self.batch_keys_max = max(1, min(adapter.capabilities.batch_keys_max, limits.TIER_BATCH_KEYS_MAX))
        self._kinds: dict[int, ObjectKind] = {}
        self._stored_bytes: dict[int, int] = {}
        self.sizes = Sizes()

    def start(
        self,
        post: Callable[[Posted], None],
        epochs: Epochs,
        clock: Clock,
        observer: TierObserver | None = None,
        *,
        stores_waited_for: bool = False,
    ) -> None:
        """Called once, by Tiering. `observer` is notified when the breaker opens and closes, and of objects that this
        no longer has. `stores_waited_for`: whoever gives them waits for their end, as for that of a load."""
        self.post = post
        self._epochs = epochs
        self.clock = self.health.clock = clock
        self.store_cpu = CpuShare(self.config.store_cpu_share, lambda: clock.now)
        self.losses = Losses(clock)
        medium = self.medium = Medium(
            self.name, self.adapter, self.config, self.batch_keys_max, clock, post, stores_waited_for
        )
        self.carrier = Carrier(self.adapter, self.chain, medium.stopping)
        self.lanes, self.order = medium.lanes, medium.order
        self.doubts = Doubts(medium, self.accounting, self._recount)
        self.reclaim = Reclaim(medium, self.accounting, self.losses, self.doubts, epochs, self._delete_late)
        self.verdicts = Verdicts(medium, self.accounting, self.reclaim)
        self.rebuild = Rebuild(medium, self.accounting, self.doubts, self.health.trouble)
        if observer is not None:
            self._watch(observer)

    def _watch(self, observer: TierObserver) -> None:
        self.health.reads.on_move = partial(self._moved, observer, "reads", self.health.reads)
        self.health.writes.on_move = partial(self._moved, observer, "writes", self.health.writes)
        self.accounting.on_changed = partial(self._tell_changed, observer)
        self.accounting.on_removed = partial(self._tell_removed, observer)
        self.rebuild.on_finished = observer.recounted

    def _tell_changed(self, observer: TierObserver, names: Sequence[bytes]) -> None:
        for namespace, keys in self._reachable(names).items():
            observer.changed(namespace, keys)

    def _tell_removed(self, observer: TierObserver, names: Sequence[bytes]) -> None:
        for namespace, keys in self._reachable(names).items():
            observer.removed(self.name, namespace, keys)

    def _reachable(self, names: Sequence[bytes]) -> dict[int, list[bytes]]:
        """Keys by namespace, without what a clear has made unreachable: later stores use other names."""
        by_namespace: dict[int, list[bytes]] = {}
        for name in names:
            if len(name) == TIER_KEY_BYTES:
                key, namespace, epoch = split_tier_key(name)
                if epoch >= self._epochs.of(namespace):
                    by_namespace.setdefault(namespace, []).append(key)
        return by_namespace

    def _moved(self, observer: TierObserver, what: str, breaker: Breaker | Breakers, state: BreakerState) -> None:
        observer.breaker_moved(self.name, what, state, breaker.last_error if state is BreakerState.OPEN else "")

    # --- what the controllers ask -------------------------------------------------------------------------
    @property
    def view(self) -> TierView:
        return TierView(self.name, self.health.reads.state is BreakerState.CLOSED, self.accounting.capacity_bytes)

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

    def check_namespace(self, namespace: int, layout: Layout, label: str) -> None:
        """Raises `UsageError`, with the cure, if the tier's serdes cannot encode objects of this layout, or may not: if
        their certificate is for another dtype, or another model than the namespace's label names."""

        def refused(error: BaseException) -> NoReturn:
            why = str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}"
            raise UsageError(
                f"tier {self.name!r} cannot store objects of {layout}: {printable(why)}",
                cure=f"change l2.{self.name}.serde, or register a layout with the dtype of the values",
            ) from None

        guarded(refused, self.stored_bytes, layout)
        if self.certificate is not None:
            try:
                self.certificate.check(layout, label)
            except UsageError as error:
                raise UsageError(
                    f"tier {self.name!r} must not store objects of {layout}: {error}",
                    cure=f"name a certificate for this model in l2.{self.name}.require_certificate",
                ) from None
            if label:  # else nothing is known of its model
                self._certified.pop(namespace, None)
                self._certified[namespace] = None
                if len(self._certified) > limits.NAMESPACES_KNOWN_MAX:
                    del self._certified[next(iter(self._certified))]

    def may_store(self, namespace: int) -> bool:
        """Whether objects of this namespace may be stored at all: what others have left in the pool may be of a model
        that the certificate is not for."""
        return self.certificate is None or namespace in self._certified

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
        capacity, seen = self.accounting.capacity_bytes, self.sizes.expected(layout.fingerprint)
        if capacity is None or (seen is not None and seen <= capacity):
            return (most if seen is None else seen), True
        return min(most, max(1, self.accounting.headroom_bytes or 0)), False

    def remove(self, keys: Sequence[bytes]) -> set[bytes]:
        """Delete tier keys, and count them as missing from now on. Returns those that were counted as present."""
        had = self.accounting.known(keys)
        self.accounting.drop(keys)
        self.losses.note(list(had), TierReason.CLEARED)
        self.reclaim.delete(keys)
        return had

    @property
    def owes_deletes(self) -> bool:
        """Whether something that was dropped is still on the medium, and is about to go: a medium that hangs, or fails
        again and again, is not waited for. Where stores fail, too, one delete in vain is enough."""
        can = self.adapter.capabilities.delete and self.health.deletes.state is BreakerState.CLOSED
        if not can or self._is_given_up:
            return False
        answers = self.reclaim.vain < (limits.BREAKER_FAILURES if self.takes_stores else 1)
        return answers and self.accounting.drops > self.reclaim.hung_drops

    @property
    def has_room_for_stores(self) -> bool:
        """Whether another batch would soon begin. A few may wait, so that no lane runs dry."""
        if self.stores_rest_until > self.clock.now:
            return False
        return self.medium.stores.backlog + self.order.held(self.medium.stores) < 2

    @property
    def stores_rest_until(self) -> float:
        """Until then stores have used up their share of the processor; what is owed waits, or is evicted first."""
        return -math.inf if self.hurries else self.store_cpu.rests_until

    @property
    def remote(self) -> bool:
        """Whether other nodes use its medium, too. An adapter cannot know that of a directory: the settings say so."""
        can, locality = self.adapter.capabilities, self.config.locality
        return locality == "remote" or (locality == "auto" and can.shared and not can.private)

    @property
    def gets_stores(self) -> bool:
        """Whether objects are to be stored on it at all."""
        return not self.draining and self.adapter.capabilities.stores

    def stores_allowed(self) -> bool:
        """Whether a batch may be stored now. With a half-open breaker, True once: the batch is the probe."""
        can_delete = self.health.deletes.state is BreakerState.CLOSED
        return can_delete and self.has_room_for_stores and self.health.stores.allows(self.clock.now)

    @property
    def takes_stores(self) -> bool:
        """Whether what is owed to it is about to be stored: nobody waits for a tier that hangs or fails."""
        return self.health.writes.state is BreakerState.CLOSED and not self._is_given_up

    def hurry(self) -> None:
        """The server is ending: store what is owed now, and wait for nothing that hangs."""
        if self._hurries_since_s is None:
            self._hurries_since_s = self.clock.now

    @property
    def hurries(self) -> bool:
        return self._hurries_since_s is not None

    @property
    def _is_given_up(self) -> bool:
        """Whether the server ends without what is under way here: a breaker is open because calls hang, and so do those
        that pay what is owed. Loads that hang say nothing of stores that take their time and return."""
        if self._hurries_since_s is None or not (self.health.reads.hangs or self.health.writes.hangs):
            return False
        paying = [lane for lane in (self.medium.stores, self.medium.removals) if lane.busy]
        return bool(paying) and all(lane.silent(self._hurries_since_s, self.clock.now) for lane in paying)

    @property
    def is_scanned(self) -> bool:
        """Whether a scan is about to say what else it has."""
        return self.accounting.scanning and not self.rebuild.failing

    @property
    def is_listed(self) -> bool:
        """Whether its accounts have everything that its medium had at the start."""
        return self.rebuild.state is not RebuildState.OFF and not self.accounting.scanning

    def make_room(self, nbytes: int, namespace: int) -> TierReason | None:
        """As `Reclaim.make_room`. If there is none for as long as a store may take, that is a failed store: whatever
        should make room hangs."""
        room, now = self.reclaim.make_room(nbytes, namespace), self.clock.now
        if room is not TierReason.THROTTLED:
            self._no_room_since_s = None
        elif self._no_room_since_s is None:
            self._no_room_since_s = now
        elif now - self._no_room_since_s >= self.config.deadline_s and self.takes_stores:
            error = f"no room was made for stores within {self.config.deadline_s:g} s: {self.reclaim.last_error}"
            self.health.trouble.note("store", error, now)
            self.health.stores.failed(now, error, late=True, at_once=True)
        return room

    def room_is_not_wanted(self) -> None:
        """No store waits for room any more: the next one that does waits from then on."""
        self._no_room_since_s = None

    def reconfigure(self, config: TierConfig) -> None:
        """Apply new figures, and accept stores again. `connections` stays unchanged."""
        self.config = replace(config, connections=self.config.connections)
        self.draining = False
        self.accounting.resize(config.capacity_bytes, config.watermark, config.evict_ratio)
        self.medium.config = self.config
        self.store_cpu.share = config.store_cpu_share

    # --- the loop's turn ----------------------------------------------------------------------------------
    def step(self) -> None:
        """Report late calls, continue the scan, evict, probe."""
        now = self.clock.now
        self.medium.expire(now)
        self._give_up()
        if self._recount.take():
            self.accounting.distrust()
            self.rebuild.again()
        self.rebuild.step()
        self.reclaim.step()
        self.doubts.step()
        self.verdicts.step()
        if self.health.lookups.state is BreakerState.OPEN and self.health.lookups.allows(now):
            LookupProbe(self.medium, self.health).begin()
        if self.health.loads.state is BreakerState.OPEN and self.health.loads.allows(now):
            LoadProbe(self.medium, self.health, self.accounting).begin()
        if self.health.deletes.state is BreakerState.OPEN and not self.medium.removals.used_up:
            self.health.deletes.succeeded()

    def next_deadline(self) -> float | None:
        """When `step` has work, apart from completions."""
        times = [self.medium.next_deadline, self.health.reads.probe_at]
        parts = (self.rebuild, self.reclaim, self.doubts, self.verdicts)
        times += [at for part in parts if (at := part.next_at) is not None]
        soonest = min(times)
        return None if soonest == float("inf") else soonest

    def abandon(self) -> None:
        """Report every call as late now: queued calls never run, running calls end on their own."""
        self.medium.expire(float("inf"))

    def close(self, *, waits: bool = True) -> bool:
        """Waits for no call. True: none is out; otherwise the adapter is closed when the last one has returned.
        `waits`: at the end of a process, give the adapter's own close a moment."""
        idle = self.medium.close()
        # The adapter closes after its last call, and may block on its medium: that must not delay the end.
        closer = started(self.medium.close_adapter, f"tier-{self.name}-close")
        if waits and idle and closer is not None:
            closer.join(limits.TIER_CLOSE_S)
        return idle

    def status(self) -> dict[str, Any]:
        """For `status`: plain values, cheap to make."""
        counts = self.accounting
        return {
            "name": self.name,
            "draining": self.draining,
            "stores": self.adapter.capabilities.stores,
            "wrap": self.wrap,
            "lossy": [name for name, _ in self.chain.lossy],
            "certified_for": "" if self.certificate is None else self.certificate.model,
            "reads": {"breaker": str(self.health.reads.state), "opened": self.health.reads.opened},
            "writes": {"breaker": str(self.health.writes.state), "opened": self.health.writes.opened},
            "last_error": self.health.last_error,
            "last_error_age_s": self.health.last_error_age_s,
            "bytes_used": counts.bytes_used,
            "bytes_reserved": counts.bytes_reserved,
            "bytes_leaving": counts.bytes_leaving,
            "objects": counts.objects,
            "capacity_bytes": counts.capacity_bytes,
            "tenants": [] if counts.tenancy is None else _tenants(counts.tenancy.usage()),
            "scan": "unlisted" if self.rebuild.refused else str(self.rebuild.state),
            "leads": counts.leads,
            "deletes": {
                "done": self.reclaim.deleted,
                "evicted": self.reclaim.evicted,
                "failed": self.reclaim.failed,  # attempts: an object that the medium does not delete counts each time
                "waiting": self.reclaim.waiting,
                "by_others": self.rebuild.forgotten,
                "hung": self.reclaim.hung,
                "last_error": self.reclaim.last_error,
                "in_doubt": len(self.doubts),
                "foreign": counts.foreign,
            },
            "damage": {
                "suspect": len(self.verdicts),
                "cleared": self.verdicts.cleared,
                "confirmed": self.verdicts.confirmed,
                "in_bulk": self.verdicts.in_bulk,
            },
            "lanes": {
                lane.name: {"queued": lane.queued, "running": lane.running, "hung": lane.hung} for lane in self.lanes
            },
            "counts": dict(self.health.counts),
            "store_cpu": {
                "used_s": self.store_cpu.used_s,
                "share": None if math.isinf(self.store_cpu.share) else self.store_cpu.share,
                "rests": self.store_cpu.rests,
            },
            "adapter": guarded(self._no_status, plain, self.adapter.status),
            "latencies": {what: latency.status() for what, latency in self.health.latencies.items()},
        }

    def places(self, keys: Sequence[bytes]) -> list[str]:
        """Where its adapter found each of these keys, in words, and which of its serdes are lossy; empty where there is
        nothing to say."""
        lossy = ", ".join(name for name, _ in self.chain.lossy)
        ours = f"lossy: {lossy}" if lossy else ""

        def nowhere(error: BaseException) -> list[str]:
            self.health.trouble.note("explain", f"its adapter names no places: {error!r}", self.clock.now)
            return [""] * len(keys)

        found = guarded(nowhere, lambda: [str(place) for _, place in zip(keys, self.adapter.places(keys), strict=True)])
        return ["; ".join(filter(None, (place, ours))) for place in found] if ours else found

    def _no_status(self, error: BaseException) -> dict[str, Any]:
        self.health.trouble.note("status", f"its adapter has no status: {error!r}", self.clock.now)
        return {}

    def _give_up(self) -> None:
        """If a breaker has opened, nobody waits for its operation any more."""
        for what, breaker, lane in (
            ("lookup", self.health.lookups, self.medium.lookups),
            ("load", self.health.loads, self.medium.loads),
            ("store", self.health.stores, self.medium.stores),
            ("delete", self.health.deletes, self.medium.removals),
        ):
            if breaker.opened != self._given_up[what]:
                self._given_up[what] = breaker.opened
                self.medium.give_up(what, lane, running=breaker.hangs)

    def _policy_failed(self, method: str, error: BaseException) -> None:
        """No evictions then: what needs room waits, or is answered FULL."""
        self.health.counts["eviction_failed"] += 1
        text = f"its eviction policy failed in {method}: {error!r}"[: limits.ERROR_EXCERPT_CHARS_MAX]
        self.health.trouble.note("eviction", text, self.clock.now)

    def _delete_late(self, call: Call) -> None:
        """It counts against stores, which need its room. While its lane has a thread left, other deletes make that
        room; once all of them hang there is none to make, and the breaker opens at once."""
        error, now = self.reclaim.last_error, self.clock.now
        self.health.counts["delete_late"] += 1
        self.health.trouble.note("delete", error, now)
        if self.medium.removals.used_up:
            self.health.deletes.failed(now, error, late=True, at_once=True)
        elif call.state is not CallState.EXPIRED:
            self._no_room_since_s = None
            self.health.stores.failed(now, error)


def _tenants(usage: list[TenantUsage]) -> list[dict[str, Any]]:
    """The largest ones."""
    return [asdict(each) for each in sorted(usage, key=lambda each: -each.used_bytes)[:TENANTS_SHOWN_MAX]]
