"""The contracts that the kernel calls: the entries it shows to policies, and the eviction policy itself.

They stand here, below everything else, and are re-exported by `lmcache_core.policies`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol


class Entry(Protocol):
    """What an eviction policy sees of a resident object. Compared and hashed by identity.

    `older`, `newer` and `policy_data` belong to the one policy that holds the entry: it may keep its list
    links and its own state there (a million residents cannot afford a dictionary beside them). All three are None when
    the entry is inserted for the first time, and nobody else sets them. Everything else is read-only for the policy.
    """

    @property
    def key(self) -> bytes:
        """32 opaque bytes, unique together with `namespace`."""
        ...

    @property
    def namespace(self) -> int:
        """The 64-bit id of the object's namespace."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that its eviction gives back."""
        ...

    @property
    def holds(self) -> int:
        """Pins and leases on it. An entry with holds is never a victim."""
        ...

    older: Any
    newer: Any
    policy_data: Any


class EvictionPolicy(ABC):
    """Decides which resident objects go first. One instance orders one store (the L1, or one tier).

    Built as `Policy(settings)`, with an instance of the settings model that its ComponentSpec names (None: it has
    none).

    Attributes:
        wants_charges: True: `charge` is called.
        evicts: False: it never names a victim, so what is loaded from a tier leaves with its reader.

    The caller guarantees: one thread; every entry is inserted once, and removed once when it is gone (an
    evicted one too: `victims` only names, the caller then calls `remove`); batches in the order of use; for
    the keys of one request, recency is applied from the last to the first, so that a suffix goes before its
    prefix. Policies never reverse a batch.

    The policy must: be deterministic (no clock, no randomness without a seed in its settings); cost O(1) an
    entry, whatever is resident; skip entries with holds without walking past them again and again.
    """

    @abstractmethod
    def insert(self, entries: Sequence[Entry]) -> None:
        """Take over objects that became resident. Entries that have holds already may be among them (a load whose
        reader waits, a pin): they are no victims until `released` names them."""

    @abstractmethod
    def access(self, entries: Sequence[Entry]) -> None:
        """Note one use of each entry. Entries that have holds may be among them, and one may come twice in a batch."""

    @abstractmethod
    def remove(self, entries: Sequence[Entry]) -> None:
        """Forget entries that are gone, for whatever reason. They may have holds."""

    @abstractmethod
    def victims(self, nbytes: int) -> list[Entry]:
        """Entries to evict, first to go first, whose bytes sum to at least `nbytes`, or all that may go.

        Never an entry with holds. Names them only: asked again before any `remove`, it gives the same ones.
        """

    wants_charges: bool = False
    evicts: bool = True

    def charge(self, namespace: int, nbytes: int) -> None:  # noqa: B027
        """`nbytes` more (negative: less) are taken by a namespace without an entry: they are being written, loaded or
        reserved, or their entry was removed while somebody holds their slot. Bytes of entries whose eviction is
        under way are taken off the same way. Only for policies that say `wants_charges`; never for what `insert` and
        `remove` count."""

    def surplus(self, nbytes: int) -> list[Entry]:
        """As `victims`, for headroom that nobody needs yet: fewer may be named, or none."""
        return self.victims(nbytes)

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        """Whether some of these must stay although an object of `namespace` needs the place where they all stand."""
        return False

    def resize(self, capacity_bytes: int) -> None:  # noqa: B027
        """The store's capacity. The owner calls it before the first `insert`, and again when it changes.

        Only policies that divide the capacity (or bound what they remember by it) need it.
        """

    def held(self, entries: Sequence[Entry]) -> None:  # noqa: B027
        """These entries' `holds` rose from zero. A policy may take them off its list until `released`."""

    def released(self, entries: Sequence[Entry]) -> None:  # noqa: B027
        """These entries' `holds` fell to zero: they may be victims again."""
