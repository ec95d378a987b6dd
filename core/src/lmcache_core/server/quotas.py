"""Quotas of tenants: read from the settings, changed at run time, and passed to the pool and every tier.

Changes at run time are saved in the state directory and override the settings for that tenant. A change is saved before
it is applied: a server that dies in between applies it when it restarts. Objects are then evicted in bounded steps, in
the kernel and on the tiers.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from lmcache_core.errors import LimitError, SettingsError, UsageError
from lmcache_core.files import replace_file
from lmcache_core.kernel.kernel import Kernel
from lmcache_core.kernel.tenants import OTHERS, Quota
from lmcache_core.limits import QUOTAS_FRAME_BYTES, TENANT_NAME_CHARS_MAX, TENANT_NAMESPACES_MAX, TENANTS_MAX
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import encode
from lmcache_core.server.l1 import L1
from lmcache_core.server.loop import Alarm
from lmcache_core.server.session import Session
from lmcache_core.settings.model import TenantQuota
from lmcache_core.tiers.tier.tier import Tier

log = logging.getLogger(__name__)
POOL = "l1"  # the pool's name, next to the tiers' names
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_U64 = 1 << 64


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
        kernel: Kernel,
        l1: L1,
        housekeeping: Alarm,
        settled: Mapping[str, TenantQuota],
    ) -> None:
        """`housekeeping`: schedules the eviction of what is over a quota. `settled`: the tenants of the settings."""
        self._path = path
        self._kernel = kernel
        self._l1 = l1
        self._housekeeping = housekeeping
        self._settled = {name: _of_settings(quota) for name, quota in settled.items()}
        self._kept = _read(path)
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
        self._told: set[tuple[str, str]] = set()  # (store, tenant): the stores that we told about a tenant
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
        if len(self._tenants) > TENANTS_MAX:
            raise SettingsError(f"quotas: there are {len(self._tenants)} tenants, and at most {TENANTS_MAX} can be")

    # --- requests -----------------------------------------------------------------------------------------

    def describe(self, session: Session, request: m.QuotasRequest) -> m.QuotasReply:
        """As many tenants as fit into one frame: their use of each store, and their quotas."""
        rows = self._described()[max(0, request.first) :]
        nbytes = 0
        for at, row in enumerate(rows):
            nbytes += len(encode(row))
            if nbytes > QUOTAS_FRAME_BYTES:
                return m.QuotasReply(request.rid, rows[: at + 1], at + 1 < len(rows))
        return m.QuotasReply(request.rid, rows)

    def _described(self) -> list[dict[str, Any]]:
        used: dict[str, dict[str, Any]] = {}
        for store, rows in self._usage():
            for row in rows:
                told = asdict(row)
                used.setdefault(told.pop("name"), {})[store] = told
        tenants = []
        for name in sorted(self._tenants.keys() | used.keys(), key=lambda each: (not each, each)):
            kept = self._tenants.get(name)
            stores = used.get(name, {})
            for store, figures in ({} if kept is None else kept.stores).items():
                stores.setdefault(store, {"used_bytes": None, **msgspec.to_builtins(figures)})  # a tier that is gone
            namespaces = [] if kept is None else [f"{each:016x}" for each in kept.namespaces]
            tenants.append({"tenant": name, "namespaces": namespaces, "stores": stores})
        return tenants

    def set(self, session: Session, request: m.SetQuota) -> m.Message:
        """Save the change, and begin to apply it."""
        _check_may(session)
        before = self._tenants.get(request.tenant)
        _check_name(request.tenant)
        if before is None and len(self._tenants) >= TENANTS_MAX:
            raise LimitError(f"there are {TENANTS_MAX} tenants already, the limit: remove one first")
        namespaces = self._namespaces(request, before)
        stores = {} if before is None else dict(before.stores)
        for store, figures in request.stores.items():
            stores[store] = self._figures(request.tenant, store, figures)
        tenant = _Kept(namespaces, {name: each for name, each in stores.items() if each != _Figures()})
        self._check_owners(request.tenant, tenant)
        self._keep({**self._kept, request.tenant: tenant})
        self._tell_l1({request.tenant: tenant})
        self._tell_tiers(request.tenant)
        return m.Done(request.rid)

    def remove(self, session: Session, request: m.RemoveQuota) -> m.Message:
        """Release its namespaces; none of their objects is evicted for that. A tenant of the settings returns, with the
        quotas given there, when the server restarts."""
        _check_may(session)
        if request.tenant not in self._tenants:
            raise UsageError(f"no tenant is named {request.tenant[:80]!r}: {self._who()}")
        self._keep({name: kept for name, kept in self._kept.items() if name != request.tenant}, gone=request.tenant)
        self._tell_l1_of(request.tenant, None)
        self._tell_tiers(request.tenant)
        self._housekeeping.hurry()
        return m.Done(request.rid)

    # --- what may be set ----------------------------------------------------------------------------------

    def _namespaces(self, request: m.SetQuota, before: _Kept | None) -> list[int]:
        if request.namespaces is None:
            if before is None:
                raise UsageError(f"tenant {request.tenant!r} is new: say which namespaces it has")
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
        Namespaces of tenants that we told the store about were compared already."""
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
                words = "the quota of tenant %r was set at run time, and takes precedence over the settings: %s"
                log.warning(words, name, conflict)

    def _figures(self, tenant: str, store: str, told: Mapping[str, Any]) -> _Figures:
        capacity = self._capacity(store)
        try:
            figures = msgspec.convert(told, _Figures)
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
        return f"there are {', '.join(sorted(self._tenants))}" if self._tenants else "there is none"

    # --- keeping and telling ------------------------------------------------------------------------------

    def _keep(self, tenants: dict[str, _Kept], gone: str = "") -> None:
        """Save what was set at run time; `gone` is no longer a tenant."""
        try:
            replace_file(self._path, msgspec.json.format(msgspec.json.encode(tenants)))
        except OSError as error:
            raise SettingsError(
                f"the quota is not set: it cannot be kept in {self._path}: {error.strerror}; let the server write "
                "there, or set state_dir to a directory where it may"
            ) from error
        self._kept = tenants
        self._settled.pop(gone, None)
        self._tenants = {**self._settled, **tenants}

    def _tell_l1(self, tenants: Mapping[str, _Kept]) -> None:
        for name, kept in tenants.items():
            self._tell_l1_of(name, kept)
        self._housekeeping.hurry()

    def _tell_l1_of(self, name: str, kept: _Kept | None) -> None:
        """A tenant without a quota in a store counts as one of the others there."""
        if kept is None or POOL not in kept.stores:
            if (POOL, name) in self._told:  # the settings may have another tenant of this name
                self._told.discard((POOL, name))
                self._kernel.remove_tenant(name, self._l1.clock.now)
        else:
            self._told.add((POOL, name))
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
            if (tier.name, name) in self._told:
                self._told.discard((tier.name, name))
                tenancy.remove(name)
        else:
            self._told.add((tier.name, name))
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
    if not _TENANT_NAME.fullmatch(tenant) or len(tenant) > TENANT_NAME_CHARS_MAX:
        raise UsageError(
            f"{tenant[:80]!r} is not a valid tenant name: use letters, digits, - _ and ., "
            f"at most {TENANT_NAME_CHARS_MAX}"
        )


def _check_ids(namespaces: Iterable[int]) -> list[int]:
    found = sorted(set(namespaces))
    if not found or len(found) > TENANT_NAMESPACES_MAX:
        raise UsageError(
            f"a tenant has 1 to {TENANT_NAMESPACES_MAX} namespaces, and these are {len(found)}; to end a "
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


def _check_may(session: Session) -> None:
    if session.carrier != "lifeline" or session.uid not in (0, os.geteuid()):
        raise UsageError(
            "only the server's own user may change quotas, over the lifeline: run the "
            "command as that user on the server's node"
        )


def _read(path: Path) -> dict[str, _Kept]:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=dict[str, _Kept])
        owners: dict[int, str] = {}
        for name, tenant in kept.items():
            _check_name(name)
            for namespace in _check_ids(tenant.namespaces):
                if owners.setdefault(namespace, name) != name:
                    raise UsageError(f"namespace {namespace:016x} belongs to {owners[namespace]!r} and to {name!r}")
            for store, figures in tenant.stores.items():
                _check_bytes(store, figures)
        return kept
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, msgspec.MsgspecError, UsageError) as error:
        raise SettingsError(
            f"cannot read the quotas of tenants from {path}: {error}. Restore the file, or delete it and set the "
            "quotas anew"
        ) from error
