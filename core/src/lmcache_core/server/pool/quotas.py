"""Quotas of tenants: read from the settings, changed at run time, and passed to the pool and every tier.

Changes at run time are saved in the state directory and override the settings for that tenant. Each is a line of a
file, and the last line about a tenant holds: servers of one name that share the directory do not overwrite each other's
changes, and have them from their next start on. A change is saved, on the state thread, before it is applied: a server
that dies in between applies it when it restarts. Objects are then evicted in bounded steps, in
the kernel and on the tiers.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lmcache_core import limits
from lmcache_core.errors import CacheError, LimitError, SettingsError, UsageError
from lmcache_core.files import SharedLines, is_torn
from lmcache_core.guard import guarded
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.tenants import OTHERS, Quota
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode, error_reply
from lmcache_core.server.peers.session import Session
from lmcache_core.server.pool.l1 import L1
from lmcache_core.server.process.loop import Alarm
from lmcache_core.settings.model import TenantQuota
from lmcache_core.state_thread import StateThread, check_not_left
from lmcache_core.tiers.tier.tier import Tier

log = logging.getLogger(__name__)
POOL = "l1"  # the pool's name, next to the tiers' names
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_U64 = 1 << 64
_Change = m.SetQuota | m.RemoveQuota


class _Figures(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    reserved_bytes: int | None = None
    limit_bytes: int | None = None


class _Kept(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tenant, as saved in the file."""

    namespaces: list[int]
    stores: dict[str, _Figures] = {}


class Quotas:
    """Serves `QuotasRequest`, `SetQuota` and `RemoveQuota`. Lives on the loop's thread. Raises `SettingsError` if the
    saved quotas cannot be read (without them tenants would take each other's room), or if the settings give a namespace
    to two tenants."""

    def __init__(
        self,
        path: Path,
        state: StateThread,
        kernel: Kernel,
        l1: L1,
        housekeeping: Alarm,
        settled: Mapping[str, TenantQuota],
    ) -> None:
        """`housekeeping`: schedules the eviction of what is over a quota. `settled`: the tenants of the settings."""
        self._file = _QuotaFile(path)
        self._state = state
        self._waiting: deque[tuple[Session, _Change]] = deque()  # the first is being saved
        self._kernel = kernel
        self._l1 = l1
        self._housekeeping = housekeeping
        self._settled = {name: _of_settings(quota) for name, quota in settled.items()}
        self._kept = state.wait(self._file.open)
        for name in self._settled.keys() & self._kept.keys():
            if self._settled[name] != self._kept[name]:
                log.warning(
                    "the quota of tenant %r was changed at run time, which overrides the settings: to use "
                    "the settings, "
                    "run `lmcache-core quota delete %s` and restart",
                    name,
                    name,
                )
        self._tenants = {**self._settled, **self._kept}
        self._reported: set[tuple[str, str]] = set()  # (store, tenant): the stores that were informed of a tenant
        self._check_conflicts(POOL, kernel.tenant_of)
        self._tell_l1(self._tenants)

    def check(self) -> None:
        """Call once the tiers exist: raises `SettingsError` for invalid settings."""
        for name, kept in self._tenants.items():
            try:
                _check_name(name)
                self._check_namespaces(name, kept.namespaces)
                for store, figures in kept.stores.items():
                    self._figures(name, store, msgspec.to_builtins(figures))
            except UsageError as error:
                if name not in self._kept:
                    raise SettingsError(f"quotas.{name}: {error}") from error
                log.warning("the quota of tenant %r was set at run time, and no longer fits: %s", name, error)
        if len(self._tenants) > limits.TENANTS_MAX:
            raise SettingsError(
                f"quotas: there are {len(self._tenants)} tenants, and at most {limits.TENANTS_MAX} can be"
            )

    # --- requests -----------------------------------------------------------------------------------------

    def describe(self, session: Session, request: m.QuotasRequest) -> m.QuotasReply:
        """As many tenants as fit into one frame: their use of each store, and their quotas. Who does not operate this
        server hears of no namespace that it has not registered: whoever knows an id may use it."""
        rows = self._described()[max(0, request.first) :]
        if not session.operates:
            own = {f"{each:016x}" for each in session.namespaces}
            rows = [{**row, "namespaces": [each for each in row["namespaces"] if each in own]} for row in rows]
        nbytes = 0
        for at, row in enumerate(rows):
            nbytes += len(encode(row))
            if nbytes > limits.QUOTAS_FRAME_BYTES:
                return m.QuotasReply(request.rid, rows[: at + 1], at + 1 < len(rows))
        return m.QuotasReply(request.rid, rows)

    def _described(self) -> list[dict[str, Any]]:
        used: dict[str, dict[str, Any]] = {}
        for store, rows in self._usage():
            for row in rows:
                usage = asdict(row)
                used.setdefault(usage.pop("name"), {})[store] = usage
        tenants = []
        for name in sorted(self._tenants.keys() | used.keys(), key=lambda each: (not each, each)):
            kept = self._tenants.get(name)
            stores = used.get(name, {})
            for store, figures in ({} if kept is None else kept.stores).items():
                stores.setdefault(store, {"used_bytes": None, **msgspec.to_builtins(figures)})  # a tier that is gone
            namespaces = [] if kept is None else [f"{each:016x}" for each in kept.namespaces]
            tenants.append({"tenant": name, "namespaces": namespaces, "stores": stores})
        return tenants

    def change(self, session: Session, request: _Change) -> None:
        """Save the change, then begin to apply it; the answer follows. One at a time, as each is checked against those
        before it. To remove a tenant releases its namespaces; none of their objects is evicted for that. A tenant of
        the settings returns, with the quotas given there, when the server restarts."""
        session.check_operates("change quotas")
        if len(self._waiting) >= limits.QUOTA_CHANGES_MAX:
            raise LimitError(f"{limits.QUOTA_CHANGES_MAX} changes of quotas wait to be saved already: try again later")
        self._checked(request)  # to refuse at once what could not be meant
        self._take_place((session, request))

    def _take_place(self, change: tuple[Session, _Change]) -> None:
        self._waiting.append(change)
        if len(self._waiting) == 1:
            self._save()

    def _save(self) -> None:
        """Save the first change that can be made; answer those before it that cannot."""
        while self._waiting:
            session, request = self._waiting[0]
            try:
                tenant = self._checked(request)
                self._state.ask(partial(self._file.keep, request.tenant, tenant), partial(self._saved, tenant))
                return
            except CacheError as error:
                self._waiting.popleft()
                session.send(error_reply(request.rid, error))

    def _saved(self, tenant: _Kept | None, _: None, error: Exception | None) -> None:
        session, request = self._waiting.popleft()

        def applied() -> m.Message:
            if error is None:
                self._apply(request.tenant, tenant)
                return m.Done(request.rid)
            reason = error.strerror if isinstance(error, OSError) else error
            return error_reply(
                request.rid,
                SettingsError(
                    f"the quota is not set: it cannot be kept in {self._file.path}: {reason}; let the server write "
                    "there, or set state_dir to a directory where it may"
                ),
            )

        def failed(fault: BaseException) -> m.Message:  # for example, of a policy
            log.error("the quota of tenant %r could not be applied", request.tenant, exc_info=fault)
            text = "the quota is kept, and could not be applied: restart the server; its log has the traceback"
            return m.Error(request.rid, "INTERNAL", text, "never")

        session.send(guarded(failed, applied))
        self._save()  # others wait for it

    def _checked(self, request: _Change) -> _Kept | None:
        """What the tenant is after the change; None: gone. Raises `UsageError` and `LimitError`."""
        before = self._tenants.get(request.tenant)
        if isinstance(request, m.RemoveQuota):
            if before is None:
                raise UsageError(f"tenant {request.tenant[:80]!r} has no quota; {self._who()}")
            return None
        _check_name(request.tenant)
        if before is None and len(self._tenants) >= limits.TENANTS_MAX:
            raise LimitError(f"there are {limits.TENANTS_MAX} tenants already, the limit: remove one first")
        namespaces = self._namespaces(request, before)
        stores = {} if before is None else dict(before.stores)
        for store, figures in request.stores.items():
            stores[store] = self._figures(request.tenant, store, figures)
        tenant = _Kept(namespaces, {name: each for name, each in stores.items() if each != _Figures()})
        self._check_owners(request.tenant, tenant)
        return tenant

    def _apply(self, name: str, tenant: _Kept | None) -> None:
        if tenant is None:
            self._kept.pop(name, None)
            self._settled.pop(name, None)
            self._tenants.pop(name, None)
            self._tell_l1_of(name, None)
        else:
            self._kept[name] = self._tenants[name] = tenant
            self._tell_l1({name: tenant})
        self._tell_tiers(name)
        self._housekeeping.hurry()
        self._l1.apply()

    # --- what may be set ----------------------------------------------------------------------------------

    def _namespaces(self, request: m.SetQuota, before: _Kept | None) -> list[int]:
        if request.namespaces is None:
            if before is None:
                new = f"tenant {request.tenant!r} is new, so at least one of its namespaces must be named"
                raise UsageError(new, cure="add --namespace ID; `lmcache-core status --all` shows the ids in use")
            return before.namespaces
        return self._check_namespaces(request.tenant, request.namespaces)

    def _check_namespaces(self, tenant: str, namespaces: Iterable[int]) -> list[int]:
        found = _check_ids(namespaces)
        for name, kept in self._tenants.items():
            taken = set(kept.namespaces).intersection(found)
            if taken and name != tenant:
                raise UsageError(
                    f"namespace {min(taken):016x} belongs to tenant {name!r}: remove it there first, or "
                    f"remove that quota"
                )
        return found

    def _conflict(self, store: str, tenant_of: Callable[[int], str], tenant: str, kept: _Kept) -> str:
        """A namespace that the settings of the store's own policy (`isolated`) give to another tenant; "" for none.
        Namespaces of tenants that were reported to the store were compared already."""
        for namespace in kept.namespaces if store in kept.stores else ():
            owner = tenant_of(namespace)
            ours = owner in self._tenants and store in self._tenants[owner].stores
            if owner not in (OTHERS, tenant) and not ours:
                return (
                    f"the settings of {store}'s eviction policy give namespace {namespace:016x} to tenant {owner!r}: "
                    "give the quota to that tenant, or take the namespace from it there"
                )
        return ""

    def _check_owners(self, tenant: str, kept: _Kept) -> None:
        for store, tenant_of in self._owners():
            if conflict := self._conflict(store, tenant_of, tenant, kept):
                raise UsageError(conflict)

    def _owners(self) -> Iterable[tuple[str, Callable[[int], str]]]:
        """The owner of a namespace in each store that can have tenants."""
        yield POOL, self._kernel.tenant_of
        tiering = self._l1.tiering
        for tier in () if tiering is None else tiering.tiers:
            if tier.accounting.tenancy is not None:
                yield tier.name, tier.accounting.tenancy.tenant_of

    def _check_conflicts(self, store: str, tenant_of: Callable[[int], str]) -> None:
        """Before this store gets its tenants. What was set at run time takes precedence over any settings. Raises
        `SettingsError` for a tenant of the settings."""
        for name, kept in self._tenants.items():
            conflict = self._conflict(store, tenant_of, name, kept)
            if conflict and name not in self._kept:
                raise SettingsError(f"quotas.{name}: {conflict}")
            if conflict:
                text = "the quota of tenant %r was set at run time, and takes precedence over the settings: %s"
                log.warning(text, name, conflict)

    def _figures(self, tenant: str, store: str, values: Mapping[str, Any]) -> _Figures:
        capacity = self._capacity(store)
        try:
            figures = msgspec.convert(values, _Figures)
        except msgspec.ValidationError as error:
            raise UsageError(f"quota of {store}: {error}; give reserved_bytes, limit_bytes, or both") from error
        _check_bytes(store, figures)
        reserved = figures.reserved_bytes
        if reserved:
            if capacity is None:
                raise UsageError(
                    f"tier {store!r} has no capacity_bytes, so none of it can be reserved: set capacity_bytes, or only "
                    "limit_bytes"
                )
            others = sum(
                kept.stores.get(store, _Figures()).reserved_bytes or 0
                for name, kept in self._tenants.items()
                if name != tenant
            )
            if reserved + others > capacity:
                raise UsageError(
                    f"{store} has {capacity:,} bytes, and other tenants have reserved {others:,} of them, so "
                    f"{reserved:,} more do not fit: reserve less, or use a limit"
                )
        return figures

    def _capacity(self, store: str) -> int | None:
        """Bytes of a store. Raises `UsageError` for an unknown store, or one that cannot have tenants."""
        if store == POOL:
            return self._kernel.usage().pool_bytes
        tiering = self._l1.tiering
        tiers = {} if tiering is None else {tier.name: tier for tier in tiering.tiers}
        if store not in tiers:
            raise UsageError(f"no store is named {store[:80]!r}: there are {', '.join([POOL, *tiers])}")
        accounting = tiers[store].accounting
        if accounting.tenancy is None:
            raise UsageError(f"tier {store!r} evicts nothing (eviction none, or a medium that cannot delete): no quota")
        return accounting.capacity_bytes

    def _who(self) -> str:
        return f"tenants with one: {', '.join(sorted(self._tenants)) or 'none'}"

    # --- keeping and telling ------------------------------------------------------------------------------

    def _tell_l1(self, tenants: Mapping[str, _Kept]) -> None:
        for name, kept in tenants.items():
            self._tell_l1_of(name, kept)
        self._housekeeping.hurry()

    def _tell_l1_of(self, name: str, kept: _Kept | None) -> None:
        """A tenant without a quota in a store counts as one of the others there."""
        if kept is None or POOL not in kept.stores:
            if (POOL, name) in self._reported:  # the settings may have another tenant of this name
                self._reported.discard((POOL, name))
                self._kernel.remove_tenant(name, self._l1.clock.now)
        else:
            self._reported.add((POOL, name))
            self._kernel.set_tenant(name, frozenset(kept.namespaces), _quota(kept, POOL), self._l1.clock.now)

    def _tell_tiers(self, name: str) -> None:
        tiering = self._l1.tiering
        if tiering is not None:
            for tier in tiering.tiers:
                self._tell_one(tier, name)
            tiering.tenants_changed()

    def tell_tier(self, tier: Tier) -> None:
        """Tell a tier about all tenants before it is used. Raises `SettingsError` if its policy gives a namespace to
        another one."""
        if tier.accounting.tenancy is not None:
            self._check_conflicts(tier.name, tier.accounting.tenancy.tenant_of)
        for name in self._tenants:
            self._tell_one(tier, name)

    def _tell_one(self, tier: Tier, name: str) -> None:
        tenancy, kept = tier.accounting.tenancy, self._tenants.get(name)
        if tenancy is None:
            return
        if kept is None or tier.name not in kept.stores:
            if (tier.name, name) in self._reported:
                self._reported.discard((tier.name, name))
                tenancy.remove(name)
        else:
            self._reported.add((tier.name, name))
            tenancy.change(
                name, frozenset(kept.namespaces), _quota(kept, tier.name), tier.accounting.capacity_bytes or 0
            )

    def _usage(self) -> Iterable[tuple[str, Any]]:
        yield POOL, self._kernel.usage().tenants
        tiering = self._l1.tiering
        for tier in () if tiering is None else tiering.tiers:
            if tier.accounting.tenancy is not None:
                yield tier.name, tier.accounting.tenancy.usage()


def _quota(kept: _Kept, store: str) -> Quota:
    figures = kept.stores.get(store, _Figures())
    return Quota(figures.reserved_bytes, figures.limit_bytes)


def _check_name(tenant: str) -> None:
    if not _TENANT_NAME.fullmatch(tenant) or len(tenant) > limits.TENANT_NAME_CHARS_MAX:
        raise UsageError(
            f"{tenant[:80]!r} is not a valid tenant name: use letters, digits, - _ and ., "
            f"at most {limits.TENANT_NAME_CHARS_MAX}"
        )


def _check_ids(namespaces: Iterable[int]) -> list[int]:
    found = sorted(set(namespaces))
    if not found or len(found) > limits.TENANT_NAMESPACES_MAX:
        raise UsageError(
            f"a tenant has 1 to {limits.TENANT_NAMESPACES_MAX} namespaces, and these are {len(found)}; to end a "
            "quota, remove it"
        )
    if found[0] < 0 or found[-1] >= _U64:
        raise UsageError("a namespace's id has 64 bits")
    return found


def _check_bytes(store: str, figures: _Figures) -> None:
    reserved, limit = figures.reserved_bytes, figures.limit_bytes
    if min(reserved or 0, limit or 0) < 0 or max(reserved or 0, limit or 0) >= _U64 >> 1:
        raise UsageError(f"quota of {store}: bytes must be 0 or more, and have 63 bits at most")
    if limit is not None and (reserved or 0) > limit:
        raise UsageError(f"quota of {store}: reserved_bytes ({reserved:,}) exceeds limit_bytes ({limit:,})")


def _of_settings(quota: TenantQuota) -> _Kept:
    stores = {name: _Figures(each.reserved_bytes, each.limit_bytes) for name, each in quota.stores.items()}
    namespaces = sorted({int(text, 16) for text in quota.namespaces})
    return _Kept(namespaces, {name: figures for name, figures in stores.items() if figures != _Figures()})


class _QuotaFile:
    """What was set at run time: lines of tenants, None for one that was removed. Blocks: use it on the state thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shared = SharedLines(path)

    def open(self) -> dict[str, _Kept]:
        """Every tenant. Raises `SettingsError` if the file cannot be read."""
        kept: dict[str, _Kept | None] = {}
        try:
            lines = self._shared.read()
            former = len(lines) > 1 and lines[0] == b"{"  # one document: what a server wrote before there were lines
            if former:
                end = lines.index(b"}") + 1 if b"}" in lines else len(lines)
                lines[:end] = [b"".join(lines[:end])]
            for at, line in enumerate(lines):
                changed = _decoded(line, torn=len(lines) > 1 and not (former and at == 0))
                _check_line(changed)
                for name, tenant in changed.items():
                    kept.pop(name, None)
                    kept[name] = tenant  # behind all others
            found = _check_all({name: tenant for name, tenant in kept.items() if tenant is not None})
            if former or (len(lines) > limits.STATE_COMPACT_LINES and len(lines) > 4 * len(found)):
                self._shared.compact(msgspec.json.encode(found))
            return found
        except (OSError, msgspec.MsgspecError, UsageError) as error:
            raise SettingsError(
                f"cannot read the quotas of tenants from {self.path}: {error}. Restore the file, or delete it and set "
                "the quotas anew"
            ) from error

    def keep(self, name: str, tenant: _Kept | None) -> None:
        """Write what a tenant is from now on. Raises `OSError`."""
        self._shared.append(msgspec.json.encode({name: tenant}), check_not_left)


def _decoded(line: bytes, torn: bool) -> dict[str, _Kept | None]:
    try:
        return msgspec.json.decode(line, type=dict[str, _Kept | None])
    except msgspec.MsgspecError as error:
        if not torn or not is_torn(error):
            raise
        return {}


def _check_line(changed: Mapping[str, _Kept | None]) -> None:
    """No server writes a line that gives a namespace to two tenants."""
    owners: dict[int, str] = {}
    for name, tenant in changed.items():
        for namespace in () if tenant is None else tenant.namespaces:
            if owners.setdefault(namespace, name) != name:
                raise UsageError(f"namespace {namespace:016x} belongs to {owners[namespace]!r} and to {name!r}")


def _check_all(kept: Mapping[str, _Kept]) -> dict[str, _Kept]:
    """The tenants, of which each namespace has one: of two servers each may have given it away without seeing the
    other's change. The tenant that was changed last has it."""
    owners: dict[int, str] = {}
    found: dict[str, _Kept] = {}
    for name, tenant in reversed([*kept.items()]):
        _check_name(name)
        left = [each for each in _check_ids(tenant.namespaces) if owners.setdefault(each, name) == name]
        for store, figures in tenant.stores.items():
            _check_bytes(store, figures)
        if len(left) < len(tenant.namespaces):
            text = "tenant %r loses %d namespaces: its quota and a later one of another server both have them"
            log.warning(text, name, len(tenant.namespaces) - len(left))
        if left:
            found[name] = msgspec.structs.replace(tenant, namespaces=left)
    return dict(reversed([*found.items()]))
