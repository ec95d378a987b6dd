"""From the sizes a user gives to the table that is built: three figures of which any two decide."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_l0 import _table
from lmcache_l0.errors import SizesError, UsageError

GIB = 1 << 30
VALUE_BYTES = 4096
SIZE_GB = 1.0
LOAD_MAX = 0.7  # planned load: the mean probe of a miss is short below, and grows fast above
_LINE_BYTES = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Plan:
    """A table to be built. Bytes throughout."""

    hash_slots: int
    max_value_size: int
    max_key_size: int
    versions: int
    file_bytes: int
    slot_bytes: int

    @property
    def keys_planned(self) -> int:
        """Keys at 70 % load."""
        return int(self.hash_slots * LOAD_MAX)


def plan_table(
    *,
    size_gb: float | None = None,
    max_value_size: int | None = None,
    hash_slots: int | None = None,
    versions: int = 2,
    max_key_size: int = 256,
) -> Plan:
    """The table of these sizes. `size_gb` counts GiB, the others slots and bytes.

    Given alone, `hash_slots` decides the size and `size_gb` the slots, with values of 4 KiB; given both, the
    slots stand and the file is as large as they need, or as `size_gb` allows for the values where
    `max_value_size` is left out. SizesError where they contradict each other.
    """
    _check("versions", versions, _table.VERSIONS_MAX)
    _check("max_key_size", max_key_size, _table.KEY_BYTES_MAX)
    if max_value_size is not None:
        _check("max_value_size", max_value_size, _table.VALUE_BYTES_MAX)
    if hash_slots is not None:
        _check("hash_slots", hash_slots, _table.SLOTS_MAX)
    if size_gb is None and hash_slots is None:
        size_gb = SIZE_GB
    budget = None if size_gb is None else int(size_gb * GIB)
    if budget is not None and budget <= 0:
        raise UsageError(f"size_gb={size_gb} must be above zero")
    if hash_slots is None:
        assert budget is not None
        value = max_value_size or VALUE_BYTES
        hash_slots = _slots_in(budget, value, max_key_size, versions)
        if hash_slots < 1:
            raise _contradiction(budget, 1, value, max_key_size, versions)
        return _built(hash_slots, value, max_key_size, versions)
    if max_value_size is None:
        max_value_size = VALUE_BYTES
        if budget is not None:
            max_value_size = _value_in(budget, hash_slots, max_key_size, versions)
            if max_value_size < 1:
                raise _contradiction(budget, hash_slots, _LINE_BYTES, max_key_size, versions)
    plan = _built(hash_slots, max_value_size, max_key_size, versions)
    if budget is not None and plan.file_bytes > budget:
        raise _contradiction(budget, hash_slots, max_value_size, max_key_size, versions)
    return plan


def _check(name: str, figure: int, most: int) -> None:
    if isinstance(figure, bool) or not isinstance(figure, int) or not 1 <= figure <= most:
        raise UsageError(f"{name}={figure!r} must be a whole number from 1 to {most:,}")


def _built(slots: int, value: int, key: int, versions: int) -> Plan:
    sizes = _table.plan(slots, value, key, versions)
    if sizes is None:
        raise UsageError(
            f"a table of {slots:,} slots for values of {value:,} bytes is over the limit of 64 TiB: "
            "use fewer slots, smaller values or fewer versions"
        )
    return Plan(slots, value, key, versions, *sizes)


def _slots_in(budget: int, value: int, key: int, versions: int) -> int:
    """The most slots that a file of `budget` bytes holds."""
    one = _built(1, value, key, versions)
    per_slot = one.slot_bytes + _LINE_BYTES
    # One slot's file is padded to pages twice, so this guess is up to that much too low: start above it.
    slots = max(0, (budget - one.file_bytes + 2 * _PAGE_BYTES) // per_slot + 2)
    while slots and _built(slots, value, key, versions).file_bytes > budget:
        slots -= 1
    return min(slots, _table.SLOTS_MAX)


def _value_in(budget: int, slots: int, key: int, versions: int) -> int:
    """The largest value size (in whole lines) of which `budget` bytes hold `slots`; 0 if there is none."""
    low, high = 0, min(_table.VALUE_BYTES_MAX, max(budget // slots, 1)) // _LINE_BYTES
    while low < high:
        lines = (low + high + 1) // 2
        sizes = _table.plan(slots, lines * _LINE_BYTES, key, versions)
        if sizes is not None and sizes[0] <= budget:
            low = lines
        else:
            high = lines - 1
    return low * _LINE_BYTES


def _contradiction(budget: int, slots: int, value: int, key: int, versions: int) -> SizesError:
    needed = _built(slots, value, key, versions).file_bytes
    fewer = _slots_in(budget, value, key, versions)
    smaller = _value_in(budget, slots, key, versions)
    ways = [f"size_gb={needed / GIB + 0.0005:.3f}"]
    ways.append(f"hash_slots={fewer:,}" if fewer else "fewer slots (not even one fits)")
    ways.append(f"max_value_size={smaller:,}" if smaller else "smaller values (none are small enough)")
    return SizesError(
        f"{slots:,} slots for values of {value:,} bytes in {versions + 1} buffers need {needed / GIB:.3f} GiB, and "
        f"size_gb={budget / GIB:.3f}: give {ways[0]} or more, or {ways[1]} or fewer, or {ways[2]} or less"
    )
