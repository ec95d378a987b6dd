"""What adapter and client process say to each other, and how objects lie in the memory that they share.

Each connection between the two is a socket of packets, and a memory file of `staging_bytes`. Objects lie there one
after another, each with room for its checksum, at multiples of `ALIGN`. One request is answered by one reply.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ALIGN = 64
CHECKSUM_BYTES = 8  # xxh3_64 of the object, with that of its name as seed; behind it, little-endian
PACKET_BYTES_MAX = 65536

# Codes of Mooncake that are ordinary answers here.
NOT_THERE = frozenset({-703, -704, -710, -712})  # not stored, not yet whole, or evicted meanwhile
TOO_LARGE = -600
FULL = -200
# A code of our own.
DAMAGED = -1_000_001
BUSY = -1_000_002  # another client stores or deletes this key


class Setup(msgspec.Struct, forbid_unknown_fields=True):
    """The first packet of the process's own socket: what Mooncake's client needs."""

    master: str
    metadata: str
    protocol: str
    devices: str
    host: str
    tenant: str
    replicas: int
    soft_pin_ms: int  # 0: no pin
    staging_bytes: int


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """`sizes`: of a store, the bytes of each object; of a load, the most that each may have."""

    verb: Literal["store", "load", "exists", "delete"]
    names: list[str]
    sizes: list[int] = []


class Reply(msgspec.Struct, forbid_unknown_fields=True):
    """`codes`: for each name what Mooncake answered; not negative: the bytes of a load, or whether it exists.
    `error`: why there are none."""

    codes: list[int]
    error: str = ""
    cure: str = ""


def room_bytes(nbytes: int) -> int:
    """What an object takes in the shared memory."""
    return -(-(nbytes + CHECKSUM_BYTES) // ALIGN) * ALIGN


def places(sizes: list[int]) -> list[int]:
    """Where each object begins."""
    at, found = 0, []
    for nbytes in sizes:
        found.append(at)
        at += room_bytes(nbytes)
    return found
