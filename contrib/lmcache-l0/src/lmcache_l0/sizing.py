"""From the sizes that a user gives to the plan of a table: three figures, of which any two determine the third."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_l0 import _table
from lmcache_l0.errors import SizesError, UsageError

GIB = 1 << 30
VALUE_BYTES = 4096
SIZE_GB = 1.0
SIZE_GB_MAX = 1 << 16
LOAD_MAX = 0.7  # planned load: the mean probe of a miss is short below, and grows fast above
_LINE_BYTES = 64


@dataclass(frozen=True)
class Plan:
    """A table to be built. Bytes throughout."""

    hash_slots: int
    max_value_size: int
    max_key_size: int
    versions: int
    spares: int
    file_bytes: int
    slot_bytes: int

    @property
    def keys_planned(self) -> int:
        """Keys at 70 % load."""
        return int(self.hash_slots * LOAD_MAX)


@dataclass(frozen=True)
class _Shape:
    """Fixed before slots and values: the space for a key, and how buffers are shared."""

    key: int
    versions: int
    spares: int

    def sizes(self, slots: int, value: int) -> tuple[int, int] | None:
        return _table.plan(slots, value, self.key, self.versions, self.spares)

    def built(self, slots: int, value: int) -> Plan:
        sizes = self.sizes(slots, value)
        if sizes is None:
            raise UsageError(
                f"a table of {slots:,} slots for values of {value:,} bytes is over the limit of 64 TiB: "
                "use fewer slots or smaller values"
            )
        return Plan(slots, value, self.key, self.versions, self.spares, *sizes)


def plan_table(
    *,
    size_gb: float | None = None,
    max_value_size: int | None = None,
    hash_slots: int | None = None,
    versions: int = 0,
    spares: int | None = None,
    max_key_size: int = 256,
) -> Plan:
    """The table of these sizes. `size_gb` counts GiB, the others slots and bytes.

    `hash_slots` alone determines the size, and `size_gb` alone the slots, with values of 4 KiB. If both are given, the
    slots are fixed and the file is as large as they need, or, without `max_value_size`, values are as large as
    `size_gb` allows. With `versions` every key has that many extra buffers of its own; without (0), 64 slots share
    `spares` extra ones (2). Raises SizesError if they contradict each other.
    """
    if versions != 0 or isinstance(versions, bool):
        _check("versions", versions, _table.VERSIONS_MAX)
        if spares not in (None, versions):
            raise UsageError(
                f"versions={versions} and spares={spares}: give one; with versions nothing is shared by a stripe"
            )
        spares = versions
    if spares is None:
        spares = _table.SPARES
    elif versions == 0:
        _check("spares", spares, _table.SPARES_MAX)
    _check("max_key_size", max_key_size, _table.KEY_BYTES_MAX)
    shape = _Shape(max_key_size, versions, spares)
    if max_value_size is not None:
        _check("max_value_size", max_value_size, _table.VALUE_BYTES_MAX)
    if hash_slots is not None:
        _check("hash_slots", hash_slots, _table.SLOTS_MAX)
    if size_gb is None and hash_slots is None:
        size_gb = SIZE_GB
    if size_gb is not None and not 0 < size_gb <= SIZE_GB_MAX:
        raise UsageError(f"size_gb={size_gb} must be above zero and at most {SIZE_GB_MAX:,}")
    budget = None if size_gb is None else int(size_gb * GIB)
    if hash_slots is None:
        assert budget is not None
        value = VALUE_BYTES if max_value_size is None else max_value_size
        hash_slots = _slots_in(budget, value, shape)
        if hash_slots < 1:
            raise _contradiction(budget, 1, value, shape)
        return shape.built(hash_slots, value)
    if max_value_size is None:
        max_value_size = VALUE_BYTES
        if budget is not None:
            max_value_size = _value_in(budget, hash_slots, shape)
            if max_value_size < 1:
                raise _contradiction(budget, hash_slots, 1, shape)
    plan = shape.built(hash_slots, max_value_size)
    if budget is not None and plan.file_bytes > budget:
        raise _contradiction(budget, hash_slots, max_value_size, shape)
    return plan


def _check(name: str, figure: int, most: int) -> None:
    if isinstance(figure, bool) or not isinstance(figure, int) or not 1 <= figure <= most:
        raise UsageError(f"{name}={figure!r} must be a whole number from 1 to {most:,}")


def _slots_in(budget: int, value: int, shape: _Shape) -> int:
    """The most slots that a file of `budget` bytes holds."""
    low, high = 0, min(_table.SLOTS_MAX, budget // _LINE_BYTES)
    while low < high:
        slots = (low + high + 1) // 2
        sizes = shape.sizes(slots, value)
        if sizes is not None and sizes[0] <= budget:
            low = slots
        else:
            high = slots - 1
    return low


def _value_in(budget: int, slots: int, shape: _Shape) -> int:
    """The largest value size (in whole lines) of which `budget` bytes hold `slots`; 0 if there is none."""
    low, high = 0, min(_table.VALUE_BYTES_MAX, max(budget // slots, 1)) // _LINE_BYTES
    while low < high:
        lines = (low + high + 1) // 2
        sizes = shape.sizes(slots, lines * _LINE_BYTES)
        if sizes is not None and sizes[0] <= budget:
            low = lines
        else:
            high = lines - 1
    return low * _LINE_BYTES


def _contradiction(budget: int, slots: int, value: int, shape: _Shape) -> SizesError:
    """What to change if the three figures contradict each other; only changes that help."""
    needed = shape.built(slots, value).file_bytes
    fewer = _slots_in(budget, value, shape)
    smaller = _value_in(budget, slots, shape)
    ways = [f"size_gb={needed / GIB + 0.0005:.3f} or more"]
    if fewer:
        ways.append(f"hash_slots={fewer:,} or fewer")
    if smaller:
        ways.append(f"max_value_size={smaller:,} or less")
    many = f"{slots:,} slots" if slots > 1 else "1 slot"
    return SizesError(
        f"{many} for values of {value:,} bytes need {needed / GIB:.3f} GiB, and size_gb={budget / GIB:.3f}: "
        f"give {', or '.join(ways)}"
    )
