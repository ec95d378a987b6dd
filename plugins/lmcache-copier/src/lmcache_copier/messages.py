"""What an engine and the copier say to each other, over a socket of their own beside the server's lifeline.

Every message of an engine has a number, `rid`, which its answers carry. Page ids are int64, and -1 stands for a page
that is not touched: it is stored as zeros, and not written to.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from lmcache_copier.limits import (
    ADDRESS_BITS,
    DESCRIPTORS_MAX,
    ENTRIES_MAX,
    GROUPS_MAX,
    HANDLE_BYTES,
    MARK_BYTES,
    REGIONS_MAX,
    UUID_BYTES,
)
from lmcache_core import Status
from lmcache_core.protocol.ranges import U64, Axes, Seconds, Shape, Word

VERSION = 2
STATUSES = {status: number for number, status in enumerate(Status)}

Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << ADDRESS_BITS)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class _CopierMessage(msgspec.Struct, forbid_unknown_fields=True, tag=True):
    pass


class MemoryPiece(msgspec.Struct, forbid_unknown_fields=True):
    """Memory of an engine. `descriptor`: the position among the descriptors that come with the message, or among the
    allocations of a GPU that it names, and `address` is an offset there; -1: it is the process's own."""

    address: Address
    nbytes: Address
    descriptor: Annotated[int, msgspec.Meta(ge=-1, lt=REGIONS_MAX)]
    readonly: bool


class RegionOf(msgspec.Struct, forbid_unknown_fields=True):
    """As `lmcache_core.Region`, `offset` bytes after the start of a piece."""

    piece: Number
    offset: Address
    page_bytes: Count
    page_stride: Count
    pages: Count


class GroupOf(msgspec.Struct, forbid_unknown_fields=True):
    """As `lmcache_core.PageGroup`, without a null page."""

    namespace: U64
    dtype: Word
    shape: Shape
    memory_format: Axes
    regions: Annotated[list[RegionOf], msgspec.Meta(max_length=REGIONS_MAX)]
    pages_per_object: Count


class RegisterMemory(_CopierMessage):
    """`mark`: bytes that stand at `mark_at` in the engine's memory, and nowhere else. `files`: how many descriptors
    come with the message, whether or not a piece is in each. `gpu`: the UUID of the one that has all of the memory, in
    these `allocations`, which the engine keeps until they are unregistered."""

    rid: Number
    mark_at: Address
    mark: Annotated[bytes, msgspec.Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]
    pieces: Annotated[list[MemoryPiece], msgspec.Meta(max_length=REGIONS_MAX)]
    groups: Annotated[list[GroupOf], msgspec.Meta(max_length=GROUPS_MAX)]
    files: Annotated[int, msgspec.Meta(ge=0, le=DESCRIPTORS_MAX)] = 0
    gpu: Annotated[bytes, msgspec.Meta(max_length=UUID_BYTES)] = b""
    allocations: Annotated[list[Handle], msgspec.Meta(max_length=REGIONS_MAX)] = []


class UnregisterMemory(_CopierMessage):
    """Answered with `CopierDone` once nothing of the copier touches that memory any more, or has it open."""

    rid: Number
    registration: Number


class JobEntry(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of one group, 32 bytes each, and the ids of their pages. `promises`: the server's ids of promises that hold
    them, as u64; empty: none."""

    group: Number
    keys: bytes
    ids: bytes
    promises: bytes = b""
    traceparent: Word = ""


Entries = Annotated[list[JobEntry], msgspec.Meta(max_length=ENTRIES_MAX)]


class StorePages(_CopierMessage):
    """From pages to the pool. Answered with `JobFinished`, and before that, if the engine wants to know when its pages
    may change again, with `PagesRead`. `event`: of a GPU; no page is touched before it."""

    rid: Number
    registration: Number
    entries: Entries
    deadline_s: Seconds | None
    tell_read: bool
    event: Handle | None = None


class RetrievePages(_CopierMessage):
    """From the pool to pages. Answered with `JobFinished`. `verify`: the number of a level. `event`: see above."""

    rid: Number
    registration: Number
    entries: Entries
    deadline_s: Seconds | None
    verify: Annotated[int, msgspec.Meta(ge=0, le=2)]
    event: Handle | None = None


class CancelJob(_CopierMessage):
    """End the job with this number: its `JobFinished` comes as soon as nothing touches its pages."""

    rid: Number


class MeasurePages(_CopierMessage):
    """Read these pages of a group as a store would, into memory of the copier's own. Answered with `PagesMeasured`."""

    rid: Number
    registration: Number
    group: Number
    ids: bytes


class AskAlive(_CopierMessage):
    """Answered with `CopierDone`, whatever else is under way."""

    rid: Number


class CopierWelcome(_CopierMessage):
    """The copier's first word. `uid`: that it runs as."""

    version: int
    pid: int
    uid: int


class MemoryRegistered(_CopierMessage):
    rid: int
    registration: int


class CopierDone(_CopierMessage):
    rid: int


class CopierRefused(_CopierMessage):
    """`code`: of an error of lmcache-core's."""

    rid: int
    code: str
    message: str


class PagesRead(_CopierMessage):
    """The pages of a store have been read. `waited_s`: how long the server took to give room."""

    rid: int
    waited_s: float


class JobFinished(_CopierMessage):
    """Of each entry a byte for each key: its status, by its position among `Status`, and its reason; pages that do not
    hold what they should, as int64; which incarnation was read, as u64. `fault`: why memory could not be copied."""

    rid: int
    statuses: list[bytes]
    reasons: list[bytes]
    untrusted: list[bytes]
    incarnations: list[bytes]
    fault: str = ""


class PagesMeasured(_CopierMessage):
    rid: int
    seconds: float


CopierRequest = RegisterMemory | UnregisterMemory | StorePages | RetrievePages | CancelJob | MeasurePages | AskAlive
CopierReply = CopierWelcome | MemoryRegistered | CopierDone | CopierRefused | PagesRead | JobFinished | PagesMeasured
