"""The contracts that the kernel calls: the entries it shows to policies, and the eviction policy itself.

They stand here, below everything else; `lmcache_core.policies` re-exports them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol


class Entry(Protocol):
    """What an eviction policy sees of a resident object. Compared and hashed by identity.

    `older`, `newer` and `policy_data` belong to the one policy that holds the entry: it may keep its list links and its
    own state there (a million residents cannot afford a dictionary beside them). All three are None when the entry is
    inserted for the first time, and nobody else sets them. Everything else is read-only for the policy.
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
        """Bytes that its eviction frees."""
        ...

    @property
    def holds(self) -> int:
        """Number of pins and leases on it. An entry with holds is never a victim."""
        ...

    older: Any
    newer: Any
    policy_data: Any


class EvictionPolicy(ABC):
    """Decides which resident objects go first. One instance orders one store (the L1, or one tier).

    Built as `Policy(settings)`, with an instance of the settings model that its ComponentSpec names (None if it names
    none).

    Attributes:
        wants_charges: True if `charge` is to be called.
        evicts: False if it never names a victim; then what is loaded from a tier is dropped after its reader.

    The caller guarantees: one thread; each entry is inserted once, and removed once when it is gone (also after
    eviction: `victims` only names entries, the caller then calls `remove`); batches come in the order of use; for the
    keys of one request, recency is applied from the last to the first, so that a suffix is evicted before its prefix.
    Policies never reverse a batch.

    The policy must: be deterministic (no clock, no randomness without a seed in its settings); cost O(1) per entry,
    however many are resident; skip entries with holds without walking past them again and again.
    """

    @abstractmethod
    def insert(self, entries: Sequence[Entry]) -> None:
        """Take over objects that became resident. Some may have holds already (a load whose reader waits, a pin): those
        are no victims until `released` names them."""

    @abstractmethod
    def access(self, entries: Sequence[Entry]) -> None:
        """Note one use of each entry. Some may have holds, and an entry may appear twice in a batch."""

    @abstractmethod
    def remove(self, entries: Sequence[Entry]) -> None:
        """Forget entries that are gone, for whatever reason. They may have holds."""

    @abstractmethod
    def victims(self, nbytes: int) -> list[Entry]:
        """Entries to evict, in order of eviction, of at least `nbytes` in total, or all that may be evicted.

        Never an entry with holds. It only names them: asked again before any `remove`, it names the same ones.
        """

    wants_charges: bool = False
    evicts: bool = True

    def charge(self, namespace: int, nbytes: int) -> None:  # noqa: B027
        """A namespace takes `nbytes` more (negative: fewer) without an entry: for objects that are being written or
        loaded, for reservations, or for removed entries whose slots somebody still holds. Bytes of entries whose
        eviction is under way are subtracted the same way. Called only for policies with `wants_charges`, and never for
        what `insert` and `remove` count."""

    def surplus(self, nbytes: int) -> list[Entry]:
        """As `victims`, for headroom that nobody needs yet. It may name fewer, or none."""
        return self.victims(nbytes)

    def spares(self, entries: Sequence[Entry], namespace: int) -> bool:
        """Whether some of these must stay although an object of `namespace` needs the place of all of them."""
        return False

    def resize(self, capacity_bytes: int) -> None:  # noqa: B027
        """Set the store's capacity. The owner calls it before the first `insert`, and again when it changes.

        Only policies that divide the capacity, or bound by it what they remember, need it.
        """

    def held(self, entries: Sequence[Entry]) -> None:  # noqa: B027
        """The `holds` of these entries rose from zero. A policy may take them off its list until `released`."""

    def released(self, entries: Sequence[Entry]) -> None:  # noqa: B027
        """The `holds` of these entries fell to zero: they may be victims again."""

    def status(self) -> dict[str, Any]:
        """Plain values for `status`, by name; must be cheap."""
        return {}

    def note(self, text: str) -> None:  # noqa: B027
        """The owner puts its own in the place of this one. The policy may call it with a line for the operator, such as
        why it orders otherwise from now on."""
