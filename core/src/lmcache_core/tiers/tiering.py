"""Tiering: the only object that the server's loop talks to about tiers. One thread, no locks, no blocking calls.

How a loop drives it (the time is its clock's, set once a turn):

    tiering = Tiering(l1, tiers, wake=eventfd_write, clock=clock, store_policy=…, prefetch_policy=…)
    tiering.on_committed([Committed(…), …])    # after each commit of a worker: cheap, only queues
    job = tiering.lookup(Lookup(namespace, layout_id, keys, missing, deadline), on_done)
    …
    loop:
        poll(timeout = tiering.next_deadline() - clock.read())
        clock.turn()
        tiering.step()                         # completions, late calls, next batches; bounded work; calls on_done
    …
    tiering.begin_drain()                      # SIGTERM: store everything dirty; keep calling step()
    tiering.drained                            # True: nothing is pending or in flight any more
    idle = tiering.close()                     # never waits; False: a lane call is still out, keep the mapping

`wake()` is called from lane threads whenever a completion is waiting; it must be thread-safe and cheap.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from lmcache_core.clock import Clock
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.guard import guarded
from lmcache_core.limits import HOUSEKEEPING_S, PREFETCH_IN_FLIGHT_MAX, STORE_IN_FLIGHT_BYTES_MAX, TIERING_STEP_S
from lmcache_core.policies.contracts import PrefetchPolicy, StorePolicy
from lmcache_core.pool.layout import Layout
from lmcache_core.tiers.flow.jobs import Job, TierLookup
from lmcache_core.tiers.flow.lookup import LookupController
from lmcache_core.tiers.flow.store import StoreController
from lmcache_core.tiers.flow.whereabouts import StoredWatch, Whereabouts
from lmcache_core.tiers.flow.writeback import WriteBack
from lmcache_core.tiers.l1 import NOT_KNOWN, ON_REMOTE_TIER, ON_TIER, CommittedObject, L1Port
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import tier_keys
from lmcache_core.tiers.observer import TierObserver
from lmcache_core.tiers.tier.config import TierConfig
from lmcache_core.tiers.tier.lanes import Posted
from lmcache_core.tiers.tier.tier import Tier

logger = logging.getLogger(__name__)

_PIECES = 4  # kinds of work that take turns: ended calls, plans, submitted batches, write-back


@dataclass(frozen=True)
class TieringConfig:
    """`dirty`: what happens to an object whose room the L1 needs before every tier has it. "drop" evicts it after all
    others, and counts it as lost; "keep" and "wait" hold it in the L1 until it is stored (while the tiers are behind, a
    new store then answers FULL, or waits for a while).
    """

    prefetch_in_flight_max: int = PREFETCH_IN_FLIGHT_MAX
    store_in_flight_bytes_max: int = STORE_IN_FLIGHT_BYTES_MAX
    dirty: str = "drop"

    def __post_init__(self) -> None:
        if self.dirty not in ("drop", "keep", "wait"):
            raise SettingsError(f"dirty = {self.dirty!r} is not known: use 'drop', 'keep' or 'wait'")


class Tiering:
    """See the module docstring."""

    def __init__(
        self,
        l1: L1Port,
        tiers: Sequence[Tier],
        *,
        wake: Callable[[], None],
        clock: Clock,
        store_policy: StorePolicy,
        prefetch_policy: PrefetchPolicy,
        config: TieringConfig = TieringConfig(),
        observer: TierObserver | None = None,
        on_tier: Callable[[Tier], None] | None = None,
        epochs: Epochs | None = None,
    ) -> None:
        """`epochs`: those of the namespaces; None: only of this process. `observer` is notified of stores, loads and
        health, and `on_tier` of each tier before it is used, including those added or replaced later."""
        self._wake = wake
        self._clock = clock
        self.wants_reuse = store_policy.wants_reuse
        self._ended: deque[Posted] = deque()  # appended to by lane threads
        self._turn = 0  # the kind of work that is next
        self._touched = True  # something has changed since the last step
        self._settled = True  # a call has ended or a tier has changed since every tier was last stepped
        self._next_at = 0.0  # when there is work even if nothing has changed …
        self._tiers_at = 0.0  # … and when a tier has work
        self._epochs_at = 0.0  # when to look for clears of other servers
        self._tiers: dict[str, Tier] = {}
        self._epochs = Epochs() if epochs is None else epochs
        self._epochs.on_risen.append(self._epochs_risen)
        self._stores = StoreController(
            l1,
            self._tiers,
            store_policy,
            self._epochs,
            in_flight_bytes_max=config.store_in_flight_bytes_max,
            keep=config.dirty != "drop",
            observer=observer,
        )
        self._lookups = LookupController(
            l1, self._tiers, prefetch_policy, self._epochs, clock, config.prefetch_in_flight_max, observer
        )
        self._write_back = WriteBack(l1, self._tiers, self._stores, self._epochs, clock)
        self._draining = False
        self._faults = 0
        self._observer = observer
        self._on_tier = on_tier
        for tier in tiers:
            self._check_name(tier)
            self._use(tier)

    def check_namespace(self, namespace: int, layout: Layout, label: str) -> None:
        """Raises `UsageError`, with the cure, if some tier could never store objects of a namespace with this layout
        and label."""
        for tier in self._tiers.values():
            tier.check_namespace(namespace, layout, label)

    def on_committed(self, objects: Sequence[CommittedObject]) -> None:
        """Queue what a worker committed (unique keys). Only queues; `step` does the work."""
        if self._tiers and objects:
            self._touched = True
            self._stores.on_committed(objects)

    def lookup(self, request: TierLookup, on_done: Callable[[Job], None], policy: PrefetchPolicy | None = None) -> Job:
        """Ask the tiers for what the L1 lacks, and load what the policy picks. Ask the kernel again in `on_done`: what
        was loaded may have been evicted since. Raises `UsageError` for an unknown tier.
        """
        self._settled = True
        if self._draining:
            request = request._replace(options=structs.replace(request.options, tiers=()))
        return self._lookups.lookup(request, on_done, policy)

    def whereabouts(self, namespace: int, keys: Sequence[bytes], on_done: Callable[[Whereabouts], None]) -> Whereabouts:
        """Ask all tiers which of the keys they have, and why not. `Whereabouts` says when `on_done` is called."""
        self._settled = True  # the next step checks their deadlines
        whereabouts = Whereabouts(on_done)
        whereabouts.ask(self._tiers, namespace, self._epochs.of(namespace), keys, self._clock.now)
        return whereabouts

    def stored(self, namespace: int, keys: Sequence[bytes]) -> StoredWatch:
        """Watch what becomes of committed keys."""
        epoch = self._epochs.of(namespace)
        return StoredWatch(self._tiers, self._stores, self._write_back, namespace, epoch, keys, self._clock)

    @property
    def moves(self) -> int:
        """A number that changes whenever something is planned, stored, lost, or found not to be owed."""
        return self._stores.moves + self._write_back.moves

    @property
    def names(self) -> Sequence[str]:
        """The names of the tiers, in order."""
        return list(self._tiers)

    def layouts_in_use(self) -> set[int]:
        """Ids of the layouts that running lookups may ask slots for."""
        return self._lookups.layouts_in_use()

    def cancel(self, job: Job) -> None:
        """The request was cancelled. What no other job waits for is released; `on_done` is called unless it was
        already."""
        self._settled = True
        self._lookups.cancel(job)

    def step(self) -> None:
        """Apply completions, report what is late, and start what can start. One call does a small piece of work, of
        TIERING_STEP_S or little more, so that the next message of a worker never waits long."""
        now = self._clock.now
        if not (self._touched or self._settled or self._ended) and now < self._next_at:
            return
        self._touched = False
        due = self._settled or now >= self._tiers_at
        self._settled = False
        if due:
            for tier in list(self._tiers.values()):
                self._guarded(tier.step)
        if now >= self._epochs_at:
            self._epochs_at = now + HOUSEKEEPING_S
            self._epochs.refresh()
        self._stores.unblock()
        pieces = (self._end_one, self._stores.plan_some, self._stores.submit_some, self._write_back.step)
        until, nothing_done = self._clock.read() + TIERING_STEP_S, 0
        while nothing_done < _PIECES:
            piece = pieces[self._turn]
            self._turn = (self._turn + 1) % _PIECES
            nothing_done = 0 if self._guarded(piece) else nothing_done + 1
            if self._clock.read() >= until:
                break
        self._guarded(self._lookups.step)
        # The loop turns for its housekeeping anyway: it then finds changes that an adapter or a policy did not
        # announce.
        self._tiers_at = now + HOUSEKEEPING_S
        for tier in self._tiers.values():
            at = tier.next_deadline()
            if at is not None and at < self._tiers_at:
                self._tiers_at = at
        self._next_at = self._soonest()

    def next_deadline(self) -> float:
        """When to call `step` even if nothing wakes the loop. The clock's `now` if there is work left."""
        if self._touched or self._settled or self._ended:
            return self._clock.now
        return self._next_at

    def _soonest(self) -> float:
        if self._stores.has_work or self._lookups.has_work or self._write_back.has_work:
            return self._clock.now
        times = (self._stores.next_at(self._clock.now), self._write_back.next_at)
        return min(self._tiers_at, self._lookups.next_deadline, *(at for at in times if at is not None))

    def remove(self, namespace: int, keys: Sequence[bytes]) -> list[bytes]:
        """Delete what the tiers have under these keys, in the background: after the stores that are under way, and
        before any that follow. Running loads of these keys end without an object. Returns the keys that some tier was
        believed to have."""
        self._settled = True
        names = tier_keys(keys, namespace, self._epochs.of(namespace))
        had: set[bytes] = set()
        for tier in self._tiers.values():
            had |= tier.remove(names)
        self._lookups.loads.remove(namespace, keys)
        return [key for key, name in zip(keys, names, strict=True) if name in had]

    def move_epoch(self, namespace: int | None, on_done: Callable[[Exception | None], None]) -> None:
        """Put everything that tiers have of a namespace (None: of all) out of reach, for good. `on_done` is called when
        that is kept on a medium, at once or later, with a `SettingsError` if it cannot be; call `clear` then."""
        self._epochs.move(namespace, on_done)

    def clear(self, namespace: int | None) -> None:
        """A fence: loads and lookups in flight in this scope (None: everything) end as CLEARED, a delete follows each
        store in flight of a former epoch, and what the tiers hold of it is deleted in the background. Call it after the
        kernel's own clear."""
        self._settled = True
        self._stores.clear(namespace)
        self._lookups.clear(namespace)
        self._forget_former_epochs()

    def _epochs_risen(self, scopes: Sequence[int | None]) -> None:
        self._forget_former_epochs()
        if self._observer is not None:
            self._observer.recounted()

    def _forget_former_epochs(self) -> None:
        for tier in self._tiers.values():
            tier.reclaim.forget_former_epochs()

    def add_tier(self, tier: Tier) -> None:
        """Add a tier at the end of the order. Raises `SettingsError` if the name is taken."""
        self._check_name(tier)
        self._use(tier)
        self._changed(tier.name, "add")

    def reconfigure_tier(self, name: str, config: TierConfig) -> None:
        """Change the figures of a running tier; if it was drained, it is stored to again. `connections` cannot change:
        replace the tier. Raises `UsageError` for an unknown name."""
        tier = self._tier(name)
        was_draining = tier.draining
        tier.reconfigure(config)
        if was_draining:
            self._write_back.tier_added(name)
        self._changed(name, "reconfigure")

    def replace_tier(self, tier: Tier) -> None:
        """Replace the tier of the same name by a new one. What waits to be stored goes to the new one; what is under
        way counts as late. Raises `UsageError` for an unknown name."""
        old = self._tier(tier.name)
        self._use(tier)
        self._stores.tier_replaced(tier.name)
        self._changed(tier.name, "replace")
        old.abandon()
        old.close(waits=False)

    @property
    def tiers(self) -> Iterable[Tier]:
        """The tiers, in order."""
        return self._tiers.values()

    def on_tiers(self, namespace: int, keys: Sequence[bytes]) -> bytes:
        """For each key the bits ON_TIER and ON_REMOTE_TIER, each shifted by NOT_KNOWN where that is so."""
        names = tier_keys(keys, namespace, self._epochs.of(namespace))
        found = dict.fromkeys(names, 0)
        listing = 0
        for tier in self._tiers.values():
            bit = ON_REMOTE_TIER if tier.remote else ON_TIER
            listing |= bit if tier.accounting.scanning else 0
            for name in tier.accounting.known(names):
                found[name] |= bit
        return bytes(found[name] | (listing & ~found[name]) << NOT_KNOWN for name in names)

    def tenants_changed(self) -> None:
        """Have every tier check what its tenants must give back."""
        self._settled = True

    def drain_tier(self, name: str) -> None:
        """Store nothing more there; its objects are still served. Raises `UsageError` for an unknown name."""
        self._tier(name).draining = True
        self._changed(name, "drain")

    def remove_tier(self, name: str) -> None:
        """Remove the tier at once (its objects stay on the medium). Its running calls count as late. Raises
        `UsageError` for an unknown name."""
        tier = self._tier(name)
        del self._tiers[name]
        self._stores.tier_removed(name)
        self._write_back.tier_removed(name)
        tier.abandon()
        tier.close(waits=False)
        self._changed(name, "remove")

    def begin_drain(self) -> None:
        """Take no new lookups; store everything dirty."""
        self._draining = self._settled = True
        for tier in self._tiers.values():
            tier.hurry()
        self._write_back.hurry()
        self._lookups.cancel_all()

    @property
    def owed(self) -> dict[str, int]:
        """How many objects each tier does not have yet, or may not have."""
        return {
            name: planned + (0 if self._tiers[name].draining else self._write_back.owed(name))
            for name, planned in self._stores.owed.items()
        }

    @property
    def owed_deletes(self) -> dict[str, int]:
        """How many objects were dropped that each tier still has, or may have."""
        return {name: tier.accounting.drops for name, tier in self._tiers.items() if tier.adapter.capabilities.delete}

    @property
    def given_up(self) -> dict[str, str]:
        """The tiers that nobody waits for at the end of a server, and their last error."""
        return {name: tier.health.last_error for name, tier in self._tiers.items() if not tier.takes_stores}

    @property
    def drained(self) -> bool:
        """Nothing is pending or in flight, except for tiers that do not answer."""
        if any(tier.owes_deletes for tier in self._tiers.values()):
            return False
        return self._stores.idle and self._write_back.idle and self._lookups.idle and not self._ended

    def close(self) -> bool:
        """End everything without waiting for any lane. True: no call is running, so the pool may be unmapped."""
        self._draining = True
        self._lookups.cancel_all()
        self._stores.close()
        idle = True
        for tier in self._tiers.values():
            tier.abandon()
            idle = tier.close() and idle
        while self._end_one():
            pass
        self._lookups.notify()
        return idle

    def status(self) -> dict[str, Any]:
        """For `status`: queues, counters, and one entry per tier, in order."""
        return {
            "draining": self._draining,
            "faults": self._faults,
            "stores": {**self._stores.status(), "dirty": self.owed},
            "lookups": self._lookups.status(),
            "tiers": [tier.status() for tier in self._tiers.values()],
        }

    def _check_name(self, tier: Tier) -> None:
        """Raise `SettingsError` if another tier has the name."""
        if tier.name in self._tiers:
            raise SettingsError(f"there is a tier {tier.name!r} already: choose another name, or remove it first")

    def _use(self, tier: Tier) -> None:
        """Start using a tier. Raises `SettingsError` if another tier is on the same medium, and whatever `on_tier`
        raises to refuse it."""
        for other in self._tiers.values():
            if tier.medium_name is not None and tier.medium_name == other.medium_name and tier.name != other.name:
                raise SettingsError(
                    f"tiers {other.name!r} and {tier.name!r} are both on {tier.medium_name}: one medium is one tier; "
                    "give each a directory, a prefix or a database of its own"
                )
        self._settled = True
        tier.start(self._post, self._epochs, self._clock, self._observer)
        if self._on_tier is not None:
            self._on_tier(tier)
        if self._draining:
            tier.hurry()
        self._tiers[tier.name] = tier
        self._write_back.tier_added(tier.name)

    def _changed(self, name: str, action: str) -> None:
        if self._observer is not None:
            self._observer.tier_changed(name, action)

    def _tier(self, name: str) -> Tier:
        """The tier to change."""
        self._settled = True
        if name not in self._tiers:
            raise UsageError(f"no tier is named {name!r}: there are {', '.join(self._tiers) or 'none'}")
        return self._tiers[name]

    def _end_one(self) -> bool:
        if not self._ended:
            return False
        self._guarded(self._ended.popleft().tell_end)
        self._settled = True
        self._stores.unblock()
        return True

    def _guarded(self, method: Callable[..., Any], *arguments: Any) -> bool:
        """Whether it did something. Third-party policies and serdes run on this thread, and must not end the server."""
        return bool(guarded(self._failed, method, *arguments))

    def _failed(self, error: BaseException) -> bool:
        self._faults += 1
        logger.error("a fault in the tiers; the server goes on", exc_info=error)
        return False

    def _post(self, posted: Posted) -> None:
        self._ended.append(posted)
        self._wake()
