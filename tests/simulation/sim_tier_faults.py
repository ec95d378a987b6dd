"""Faults to plant in tiering and tiers: each breaks one promise about objects on their way to a tier and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sim_isolation import Store

import lmcache_core.tiers.object.transfer as transfer_module
from lmcache_core.kernel.clearing import Clearing
from lmcache_core.kernel.contracts import Entry
from lmcache_core.kernel.fence import Fence
from lmcache_core.kernel.objects import Incarnation, Named
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.states import State
from lmcache_core.server.pool.l1 import L1
from lmcache_core.tiers.contract import Outcome
from lmcache_core.tiers.flow.load_states import LoadEvent, LoadState
from lmcache_core.tiers.flow.loads import LoadBatch, LoadTable
from lmcache_core.tiers.flow.lookup import LookupController
from lmcache_core.tiers.flow.store import StoreBatch, StoreController
from lmcache_core.tiers.flow.writeback import WriteBack
from lmcache_core.tiers.l1 import StorePin, TierReason
from lmcache_core.tiers.object.epochs import EpochFile
from lmcache_core.tiers.object.format import read_header
from lmcache_core.tiers.tier.accounting import Accounting
from lmcache_core.tiers.tier.breaker import Breaker
from lmcache_core.tiers.tier.lanes import Call, Lane
from lmcache_core.tiers.tier.order import KeyOrder
from lmcache_core.tiers.tier.reclaim import Reclaim
from lmcache_policies.isolated import IsolatedPolicy


def what_a_key_is_now_is_held_for_a_tier() -> None:
    """Whatever was queued."""

    def standing_as(self: Residents, namespace: int, wanted: Iterable[Named]) -> list[Incarnation | None]:
        found = [self.table.of(namespace).get(key) for key, _ in wanted]
        return [item if item is not None and item.state is State.READY else None for item in found]

    Residents.standing_as = standing_as  # type: ignore[method-assign]


def a_tier_gets_the_checksum_of_another_commit() -> None:
    """That with which the key was committed first."""
    pin, sums = L1.pin_for_store, dict[tuple[int, int, bytes], int | None]()

    def pin_for_store(self: L1, namespace: int, wanted: Sequence[Named]) -> StorePin:
        pinned = pin(self, namespace, wanted)
        slots = [
            None
            if slot is None
            else slot._replace(checksum=sums.setdefault((id(self.segment), namespace, key), slot.checksum))
            for (key, _), slot in zip(wanted, pinned.slots, strict=True)
        ]
        return StorePin(pinned.lease, slots)

    L1.pin_for_store = pin_for_store  # type: ignore[method-assign]


def a_clear_dooms_no_loads() -> None:
    """What a load brings after it becomes ready. Kernel and tiering would each see to that alone: neither does."""
    begin = Fence.begin

    def sparing(self: Fence, *arguments: Any) -> Clearing:
        clearing = begin(self, *arguments)
        spared = [item for table in clearing.tables.values() for item in table if item.state is State.LOADING]
        for item in clearing.take(spared):
            table = self._residents.table.made(item.namespace, 1)
            table.shards[(item.key[0] ^ item.key[31]) & table.mask][item.key] = item
        return clearing

    Fence.begin = sparing  # type: ignore[method-assign]
    LookupController.clear = lambda self, namespace: None  # type: ignore[method-assign]


def what_changes_a_tier_key_may_overlap() -> None:
    """A store and a delete of one key run at once, in whatever order."""

    def submit(self: KeyOrder, lane: Lane, call: Call, *order: object, **options: object) -> bool:
        return lane.submit(call)

    KeyOrder.submit = submit  # type: ignore[method-assign]


def the_end_of_a_store_is_told_twice() -> None:
    """And settled twice."""
    stored = StoreController.stored

    def twice(self: StoreController, batch: StoreBatch, outcomes: Sequence[Outcome]) -> None:
        stored(self, batch, outcomes)
        stored(self, batch, outcomes)

    StoreController.stored = twice  # type: ignore[method-assign]


def the_slot_of_a_late_load_is_free_at_once() -> None:
    """Its lane goes on writing to what is another's."""

    def given_up(self: LoadTable, batch: LoadBatch, running: bool) -> None:
        for load in batch.loads:
            load.move(LoadEvent.EXPIRE if running else LoadEvent.RETURN)
            self._l1.abort_load(load.lease, [load.position], TierReason.LATE)
            self._tell(load, TierReason.LATE)

    LoadTable.given_up = given_up  # type: ignore[method-assign]


def the_slot_of_a_late_load_is_never_given_back() -> None:
    """It waits for an answer that does not come."""
    loaded = LoadTable.loaded

    def forgetful(self: LoadTable, batch: LoadBatch, results: Sequence[Outcome]) -> None:
        in_time = [(load, each) for load, each in zip(batch.loads, results, strict=True) if load.state is LoadState.OUT]
        batch.loads = [load for load, _ in in_time]
        loaded(self, batch, [each for _, each in in_time])

    LoadTable.loaded = forgetful  # type: ignore[method-assign]


def what_a_tier_brings_is_believed_to_be_what_was_asked_for() -> None:
    """Its header is sound, and another key's."""
    transfer_module.check_header = lambda page, kind, **asked: read_header(page)  # type: ignore[attr-defined]


def a_new_server_knows_no_epochs() -> None:
    """What was cleared on the tiers before is found again."""
    EpochFile.open = lambda self: self._shared.read() and None  # type: ignore[method-assign]


def what_was_stored_while_it_was_cleared_stays() -> None:
    """Nothing deletes it."""
    Reclaim._counted = lambda self, keys: None  # type: ignore[method-assign]


def one_delete_that_hangs_stops_all_others() -> None:
    """They would take threads, too."""
    Reclaim._rests = property(lambda self: self.hung > 0)  # type: ignore[assignment, method-assign]


def the_room_of_a_delete_that_hangs_is_counted_on() -> None:
    """It is leaving, as long as that may take."""
    Accounting.hang = lambda self, keys: None  # type: ignore[method-assign]


def a_late_call_is_no_failure() -> None:
    """Whoever asks next waits for the tier, too."""
    failed = Breaker.failed

    def patient(self: Breaker, now: float, error: str, *, late: bool = False, at_once: bool = False) -> None:
        if not late:
            failed(self, now, error)

    Breaker.failed = patient  # type: ignore[method-assign]


def what_a_tier_lacks_is_never_looked_for() -> None:
    """It has what was committed while it was there and well."""
    WriteBack.tier_added = lambda self, name: None  # type: ignore[method-assign]
    WriteBack.lost = lambda self, name, objects: None  # type: ignore[method-assign]


def what_is_being_written_is_charged_to_nobody() -> None:
    """A tenant may take what another one's quota covers, as long as it commits nothing."""
    IsolatedPolicy.charge = lambda self, namespace, nbytes: None  # type: ignore[method-assign]
    Store.check = lambda self: None  # type: ignore[method-assign] # which would see that the sums are wrong


def whoever_is_coldest_makes_room() -> None:
    """In the pool and on tiers, whatever its quota says."""

    def victims(self: IsolatedPolicy, nbytes: int) -> list[Entry]:
        return [entry for tenant in self._all for entry in tenant.policy.victims(nbytes)]

    IsolatedPolicy.victims = victims  # type: ignore[method-assign]


FAULTS: Sequence[Callable[[], None]] = [
    what_a_key_is_now_is_held_for_a_tier,
    a_tier_gets_the_checksum_of_another_commit,
    a_clear_dooms_no_loads,
    what_changes_a_tier_key_may_overlap,
    the_end_of_a_store_is_told_twice,
    the_slot_of_a_late_load_is_free_at_once,
    the_slot_of_a_late_load_is_never_given_back,
    what_a_tier_brings_is_believed_to_be_what_was_asked_for,
    a_new_server_knows_no_epochs,
    what_was_stored_while_it_was_cleared_stays,
    one_delete_that_hangs_stops_all_others,
    the_room_of_a_delete_that_hangs_is_counted_on,
    a_late_call_is_no_failure,
    what_a_tier_lacks_is_never_looked_for,
    what_is_being_written_is_charged_to_nobody,
    whoever_is_coldest_makes_room,
]
# What steers a schedule to where one shows: the scene, in sim_plans.py.
SCENES = {
    "what_a_key_is_now_is_held_for_a_tier": "a key is stored again while it waits for a tier",
    "a_clear_dooms_no_loads": "a clear meets loads",
    "the_slot_of_a_late_load_is_free_at_once": "a load comes back once its slot is another's",
    "what_a_tier_brings_is_believed_to_be_what_was_asked_for": "a tier gives one object for another",
    "a_new_server_knows_no_epochs": "a server dies before its clear has deleted anything",
    "what_is_being_written_is_charged_to_nobody": "a burst that commits nothing",
}
