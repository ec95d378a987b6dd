"""The kernel's figures, gathered from the parts that keep them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lmcache_core.kernel.answers import ClassUsage, HolderUsage, KernelUsage, LeaseKind
from lmcache_core.kernel.leases import LeaseBook
from lmcache_core.kernel.ledger import Account, Ledger
from lmcache_core.kernel.pins import Pins
from lmcache_core.kernel.quota import Quarantine
from lmcache_core.kernel.residents import Residents
from lmcache_core.kernel.sessions import SessionBook
from lmcache_core.kernel.states import State


def usage_of(
    residents: Residents,
    leases: LeaseBook,
    sessions: SessionBook,
    quarantine: Quarantine,
    pins: Pins,
    ledger: Ledger,
    expiries: int,
) -> KernelUsage:
    """Costs grow with sessions, classes and units, never with objects."""
    allocator = residents.allocator
    quarantined: Counter[str] = Counter()
    for session in sessions.by_id.values():
        quarantined[session.holder] += session.quarantined_bytes
    states = [state for state in State if state is not State.FREE]
    free_bytes = allocator.populated_bytes - allocator.used_bytes
    return KernelUsage(
        pool_bytes=allocator.pool_bytes,
        populated_bytes=allocator.populated_bytes,
        used_bytes=allocator.used_bytes,
        bytes_by_state={state.name.lower(): residents.bytes_by_state[state] for state in states},
        objects_by_state={state.name.lower(): residents.objects_by_state[state] for state in states},
        leases_by_kind={kind.name.lower(): leases.by_kind[kind] for kind in LeaseKind},
        sessions=len(sessions.by_id) - 1,
        sessions_lost=sum(session.lost for session in sessions.by_id.values()),
        quarantine_by_holder=dict(quarantine.by_holder),
        quarantine_by_session={
            session.id: session.quarantined_bytes for session in sessions.by_id.values() if session.quarantined_bytes
        },
        holders={
            holder.name: _held(holder.accounts, holder.sessions, holder.written.nbytes, quarantined[holder.name])
            for holder in ledger.holders.values()
            if holder.sessions or any(account.nbytes for account in holder.accounts)
        },
        held_by_session={
            session.id: _held(session.accounts, 1, 0, session.quarantined_bytes)
            for session in sessions.by_id.values()
            if session.id and (session.quarantined_bytes or any(account.nbytes for account in session.accounts))
        },
        pinned_bytes=pins.nbytes,
        pinned_objects=len(pins),
        fragmentation=1 - allocator.empty_bytes / free_bytes if free_bytes > 0 else 0.0,
        emptying_bytes=allocator.used_bytes
        - sum(each.slots_used * each.slot_bytes for each in allocator.classes.values()),
        slabs_free=allocator.units_free,
        policy_error=residents.policy_error,
        tenants=residents.tenancy.usage(),
        classes=[
            ClassUsage(each.slot_bytes, each.slabs, each.slots, each.slots_used) for each in allocator.classes.values()
        ],
        counters={
            "evictions": residents.evictions,
            "policy_faults": residents.policy_faults,
            "expiries": expiries,
            "stale_leases": leases.stale,
        },
    )


def _held(accounts: Sequence[Account], sessions: int, written_bytes: int, quarantined_bytes: int) -> HolderUsage:
    promised, read, pinned = (account.nbytes for account in accounts)
    return HolderUsage(sessions, promised, read, pinned, written_bytes, quarantined_bytes)
