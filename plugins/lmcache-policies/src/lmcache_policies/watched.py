"""A shadow cache of any eviction policy that is installed: seen beside the orders, and never followed."""

from __future__ import annotations

from typing import Any

from lmcache_core.policies import EvictionPolicy

_NO_NAMESPACE = 0
_KEY_BYTES = 32


class _ShadowEntry:
    """What the policy sees of a sampled object that its shadow holds."""

    __slots__ = ("holds", "key", "namespace", "nbytes", "newer", "older", "policy_data")

    def __init__(self, number: int, nbytes: int) -> None:
        self.key = number.to_bytes(_KEY_BYTES, "big")
        self.namespace = _NO_NAMESPACE
        self.nbytes = nbytes
        self.holds = 0
        self.older: Any = None
        self.newer: Any = None
        self.policy_data: Any = None


class Watched:
    """The policy in a store of `capacity_bytes` for the sampled keys. `hits` of so many `uses`."""

    def __init__(self, policy: EvictionPolicy, capacity_bytes: int) -> None:
        self.hits = self.uses = 0
        self._policy = policy
        self._free_bytes = self._capacity_bytes = capacity_bytes
        self._resident: dict[int, _ShadowEntry] = {}
        policy.resize(capacity_bytes)

    def use(self, number: int, nbytes: int) -> None:
        """An object in the sample is used. Raises whatever the policy raises."""
        self.uses += 1
        entry = self._resident.get(number)
        if entry is not None:
            self.hits += 1
            self._policy.access((entry,))
            return
        if nbytes > self._capacity_bytes:
            return
        if nbytes > self._free_bytes:
            going = self._policy.victims(nbytes - self._free_bytes)
            self._policy.remove(going)
            for each in going:
                del self._resident[int.from_bytes(each.key, "big")]
                self._free_bytes += each.nbytes
            if nbytes > self._free_bytes:
                return
        entry = self._resident[number] = _ShadowEntry(number, nbytes)
        self._free_bytes -= nbytes
        self._policy.insert((entry,))
