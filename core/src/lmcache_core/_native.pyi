"""The C extension. One section a noun, in the order of its files."""

from collections.abc import Sequence
from typing import Any, Protocol, Self, final

from typing_extensions import Buffer  # of mypy's own: nothing imports this file

# --- hashing.c ---

SHA256_BY: str  # what the processor has for it, or "plain C"

def chunk_keys(root: Buffer, tokens: object, chunk_tokens: int, /) -> list[bytes] | None: ...
def block_hash_keys(prefix: Buffer, hashes: object, hash_bytes_min: int, /) -> list[bytes] | None: ...
def _chain_floor(root: Buffer, words: Buffer, chunk_tokens: int, keys: Buffer, /) -> None: ...

# --- copying.c ---

def copy_many(targets: Buffer, sources: Buffer, nbytes: int, threads: int = 1, checksums: bool = False) -> bytes | None:
    """Copy objects of `nbytes` between addresses (buffers of u64, `array("Q")`), without the GIL.

    By at most `threads` threads, by fewer where that does not pay. With `checksums` returns the xxh3_64 of each, as
    u64. The caller holds the memory at both ends and vouches for its length; raises ValueError for address 0, and for
    targets and sources of different number.
    """

def checksum_many(addresses: Buffer, nbytes: int, threads: int = 1) -> bytes:
    """The xxh3_64 of each object of `nbytes`, as u64, without the GIL. The caller holds the memory."""

def unreachable(addresses: Buffer, nbytes: int, writes: bool = False) -> int:
    """The position of the first object of `nbytes` at these addresses whose end cannot be read (with `writes`:
    written) without a signal; -1: none. Changes nothing."""

def xxh3_64(buffer: Buffer, /) -> int:
    """The checksum of a buffer's bytes, as `xxhash.xxh3_64_intdigest` gives it."""

# --- index.c ---

class _Placed(Protocol):
    """What the writer needs of an object: the kernel's `Incarnation` is one."""

    @property
    def key(self) -> bytes: ...
    @property
    def namespace(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def layout_id(self) -> int: ...
    # checksum: int | None, the xxh3_64 of the bytes; an object without it has an unknown one
    # generation: int, its number among all objects that its key ever has; one without it has an unknown one, 0

Keys = Sequence[bytes] | Buffer  # a list or tuple of 32 bytes each (`TypeError` for others), or all of them in a row

@final
class Index:
    """The index of a mapped pool. `find` and `read` are for any process and thread; the rest is for the pool's owner,
    on one thread. Raises ValueError for a geometry that does not fit the buffer, and after `close`."""

    def __new__(
        cls,
        buffer: Buffer,  # the whole mapping, writable; held until `close`, or while the index is alive
        *,
        index_offset: int,
        entries: int,
        data_offset: int,
        segment_bytes: int,
        serving_offset: int,
    ) -> Self: ...
    @property
    def entries(self) -> int:
        """Entries in all: a power of two."""
    @property
    def ready(self) -> int:
        """READY entries, by this writer's own count (`recount` takes over an earlier writer's)."""
    @property
    def gone(self) -> int:
        """Tombstones, by this writer's own count."""
    keeps_places: bool
    """While true, this writer moves no entry: somebody knows entries by their places."""
    def find(
        self, epoch: int, namespace: int, layout: int, keys: Keys, prefix: bool, mark: bool = False, counts: int = 0
    ) -> bytes | None:
        """One byte a key, 1 for a hit; with `prefix` it ends at the first miss, so its length is the number of hits.

        `mark` tells the eviction policy that the hits were used. `counts`: 0 nothing, 1 what was found, 2 the same
        where all of it is there (see `count_in`). None: the server of `epoch` does not serve this pool (any more).
        `keys` are bytes of 32, or one buffer of n * 32 bytes; ValueError names the first wrong one.
        """
    def generations(self, namespace: int, layout: int, keys: Keys, offsets: Buffer) -> bytes:
        """A u64 for each key: place and generation of its READY entry as one number, if that entry's slot is the one at
        the u64 of `offsets`; else 0. Whoever reads in place asks before and after: where the number is the same, and
        not 0, nothing that was read in between was changed."""
    def incarnations(self, epoch: int, namespace: int, layout: int, keys: Keys, prefix: bool) -> bytes | None:
        """A u64 for each key: the number of the object that it has now, 0 where it has none or that is not known. With
        `prefix` it ends before the first that is 0. None: as for `find`."""
    def read(
        self,
        epoch: int,
        namespace: int,
        layout: int,
        nbytes: int,
        keys: Keys,
        targets: Buffer,
        prefix: bool,
        verify: int,
        threads: int,
        incarnations: Buffer | None = None,
    ) -> bytes | None:
        """Copy objects of `nbytes` to the addresses in `targets` (8 bytes for each key), without the GIL.

        One byte a key: 0 miss, 1 read, 2 changed too often while it was copied (ask the server), 3 damaged: its
        checksum does not fit. With `prefix` the first that is not 1 is the last byte; targets behind it may have been
        written to. `verify`: 0 never, 1 the first time this process reads this incarnation, 2 always. What was read
        is marked as used. `threads` is how many may copy; it takes fewer for few bytes. None: as for `find`.

        The caller guarantees that each target has room for `nbytes`. Nothing is promised about a target whose byte
        is not 1. `incarnations`: 8 bytes for each key, where the number of the object that was read is put.
        """
    def digest(self, bits: Buffer, /) -> int:
        """Fill `bits` with a Bloom filter of everything that is READY, without the GIL; returns how many objects that
        is. `bits` has 64 bytes times a power of two, up to 2^19: blocks of 512 bits. Of h, the xxh3_64 of the key's 32
        bytes and the namespace id's 8 (little-endian), block (h >> 45) modulo their number has bit (h >> 9 * i) & 511
        set for i from 0 to 4. An entry that the writer moves meanwhile may be missing."""
    def names(self, names: Buffer, /) -> int:
        """Fill `names` with the key's 32 bytes and the namespace id's 8 (little-endian) of everything that is READY, as
        far as it has room, without the GIL; returns how many objects there are. An entry that the writer moves
        meanwhile may be missing."""
    def count_in(self, offset: int | None, /) -> None:
        """Count in the line of 16 u64 at this offset of the buffer, in front of the index, which this process alone
        writes to: `pool.tally.Tally` says which word is what. None: nowhere, as at first."""
    def count(self, amounts: dict[int, int], /) -> None:
        """Add these amounts to words of the line. Nothing is added if one of them is no u64."""
    def count_read(self, hits: int, nbytes: int, /) -> None:
        """So many objects of `nbytes` were read in place, or by a job of pages. They count as one read."""
    def publish(self, objects: Sequence[_Placed], nbytes_by_layout: dict[int, int], now_s: int) -> int:
        """Make objects visible whose slots are READY. Returns how many got an entry; one whose window is full does
        not, and is served by RPC alone. `nbytes_by_layout`: the bytes of an object, which the slot may exceed."""
    def remove(self, objects: Sequence[_Placed], reason: int, now_s: int) -> int:
        """Take objects out, before their slots are granted again. Returns how many had an entry. An entry of the same
        key in another slot stays. `reason` is the kernel's `Reason`, kept in the tombstone."""
    def mark_verified(self, objects: Sequence[_Placed]) -> int:
        """The bytes of these fit their checksums: readers' processes need not check them any more.
        How many entries say so now; one that does not agree with its object stays as it is."""
    def remove_slot(self, offset: int) -> int:
        """Take out whatever says that it stands in the slot at `offset`, by a look at every entry; how many did."""
    def take_marks(self, entries_max: int, keys_max: int = ...) -> list[tuple[int, bytes]]:
        """(namespace, key) of entries that readers used since the last look, and take their marks off. Looks at the
        next `entries_max` entries, from where the last call ended, and takes at most `keys_max`. Ends of prompts come
        first."""
    def tidy(self, entries_max: int) -> int:
        """Make EMPTY entries of tombstones, moving entries up that need them to be found. Looks at about
        `entries_max` entries, from where the last call ended; returns how many became EMPTY. `remove` does it by
        itself once an eighth of all entries are tombstones, so calling this is housekeeping, not a duty. Neither does
        while `keeps_places` is true."""
    def recount(self) -> tuple[int, int]:
        """Count READY entries and tombstones anew: for a writer that takes over an earlier one's index."""
    def entry(self, namespace: int, key: bytes) -> dict[str, Any] | None:
        """What stands there for a key: state ("ready" or "gone"), generation, namespace, offset, layout, nbytes,
        checksum (None: not known), unverified, stored_s, reason, gone_s, mark, place, home. For tests and tools."""
    def close(self) -> None:
        """Let the buffer go, at once or when the last call that uses it returns. Later calls raise ValueError."""
    # For the bench: keys are rows of 32 bytes. (namespace, layout, nbytes, offset, now_s, keys) -> published
    def _publish_row(
        self, namespace: int, layout: int, nbytes: int, offset: int, now_s: int, keys: Buffer, /
    ) -> int: ...
    # (namespace, layout, keys a batch, keys) -> hits, seconds of the loop in C alone
    def _find_row(self, namespace: int, layout: int, batch_keys: int, keys: Buffer, /) -> tuple[int, float]: ...

# --- pages.c ---

@final
class PageTables:
    """Regions of pages, in groups. Of each group: the regions as words (base, page_bytes, page_stride for each), pages,
    pages_per_object, null_page or None, alias, exact (see `client.regions.RegionTables`). The caller holds the memory.
    `device`: what `devices.Device.words` says of the GPU that all of it lies on, and then `allocations`: a u64 for each
    region, alike for those in one allocation; no copy lies in two of them."""

    def __new__(
        cls, groups: tuple[tuple[Any, ...], ...], device: Buffer | None = None, allocations: Buffer | None = None
    ) -> Self: ...

@final
class PageBatch:
    """The pages of one call, checked whole. Of each entry: group, number of keys, page ids (a buffer of i64),
    skip_pages, valid_pages. `writes`: no page may be there twice. Raises ValueError in words for the caller."""

    def __new__(
        cls, tables: PageTables, entries: tuple[tuple[int, int, Buffer, int, int], ...], writes: bool
    ) -> Self: ...
    def ids(self, entry: int, /) -> bytes:
        """The page ids of an entry, as i64; -1 for those that are not touched."""

@final
class PageJob:
    """Objects of a batch on their way, from pages into slots (`gather`) or from slots into pages. Its threads use
    nothing of Python. Dropping it stops it, and waits until they have left.

    A part is (entry, positions, addresses of slots, checksums or None), or (entry, positions, keys, index, namespace,
    layout id, verify) for what is to be found in the index. Positions, addresses and checksums are buffers of u64, one
    for each object; a checksum of 0 is not compared. `by_region`: the first region of all objects first. `event`: a
    handle of CUDA's; no page on a device is touched before what it was recorded behind.
    """

    def __new__(
        cls,
        batch: PageBatch,
        parts: tuple[tuple[Any, ...], ...],
        gather: bool,
        by_region: bool,
        keep: object,
        event: int = 0,
    ) -> Self: ...
    @property
    def running(self) -> bool:
        """Whether a thread may be inside a slot or a page. False in a forked child."""
    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
    @property
    def device_s(self) -> float:
        """Seconds that its threads have spent on a device's copies, behind the event, and on their checksums."""
    @property
    def fault(self) -> int:
        """What CUDA's driver said when it refused a copy, which stops the job; 0: it did not."""
    def start(self, threads: int, waits: bool, /) -> None:
        """Begin, once, by at most so many threads. With `waits` the caller is one of them, and all is done, or was
        stopped, when it returns; less than 1 MiB in host memory is done at once in any case."""
    def wait(self, seconds: float, region: int = -1, /) -> bool:
        """Take part until this region (counted through all groups; -1: all of it) is done, for so long; whether it
        is. A device's copies are only waited for."""
    def ask_to_stop(self, dropped: object = ..., /) -> None:
        """Have the threads leave soon. Waits for nothing, takes no lock. `dropped` is not looked at: this may be what a
        weak reference calls."""
    def stop(self) -> None:
        """Have the threads leave, and return when they have."""
    def statuses(self, part: int, /) -> bytes:
        """One byte an object: 0 not there, 1 copied, 2 changed while it was copied, 3 damaged, 4 not done; and 16 where
        something was written for it."""
    def incarnations(self, part: int, /) -> bytes:
        """The number of each object that was found in the index, as u64, 0 where that is not known."""
    def checksums(self, part: int, /) -> bytes:
        """The xxh3_64 of each object, as u64: of a gather, what its slot holds now."""

# --- adoption.c ---

class Adoption:
    """The pool of a dead server, read whole, checked, and put right. Its objects are made on first touch.

    Objects come as (key, namespace, offset, layout id, checksum or None, incarnation), each of them once; one that has
    been tampered with since as (None, 0, offset, 0, None, 0): only its slot can be had back. `living` has a byte for
    each worker row: whether its life lock is held. `master`, unless None, is zeroed memory as long as the front of the
    pool: the tables, as they were checked, are written there, too. `distrust`: keep only what has a checksum, and have
    each reader's process check it once. `torn`: pages may be from different moments, so keep only entries that have
    their seal. `stored_after`: nor those that were stored up to this Unix second.
    """

    def __new__(
        cls,
        buffer: Any,
        living: bytes | bytearray,
        *,
        index_offset: int,
        entries: int,
        data_offset: int,
        segment_bytes: int,
        serving_offset: int,
        layouts_offset: int,
        layout_rows: int,
        slabs_offset: int,
        slab_rows: int,
        slots_offset: int,
        slot_rows: int,
        unit_bytes: int,
        slab_bytes_min: int,
        object_bytes_max: int,
        master: Any | None,
        distrust: bool,
        torn: bool,
        stored_after: int,
    ) -> Self: ...
    @property
    def objects(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Of their slots."""
    @property
    def pending(self) -> int:
        """Objects that nobody has taken yet."""
    @property
    def ready(self) -> int:
        """Entries of the index that are READY."""
    @property
    def gone(self) -> int:
        """Tombstones of the index."""
    @property
    def dropped(self) -> dict[str, int]:
        """How much was not kept, by cause."""
    def touch(
        self, namespace: int, keys: Sequence[bytes], /
    ) -> list[tuple[bytes | None, int, int, int, int | None, int]]: ...
    def take(self, most: int, /) -> list[tuple[bytes | None, int, int, int, int | None, int]]:
        """The oldest ones."""
    def slab(self, offset: int, most: int, /) -> list[tuple[bytes | None, int, int, int, int | None, int]]:
        """Up to `most` of the slab in which `offset` lies."""
    def slabs(self) -> list[tuple[int, int, int, int, int, int, list[int]]]:
        """(start, nbytes, slot bytes, slots used, objects in it, end of what is used, free slots before that)."""
    def waiting(self) -> list[tuple[int, int, int]]:
        """(offset, state, worker row) of slots that a former worker may still touch."""
    def layouts(self) -> dict[int, tuple[int, int]]:
        """(fingerprint, nbytes) by layout id."""
    def layout_of(self, namespace: int, /) -> int:
        """The id of the one layout that the namespace's pending objects have; 0 where none is pending."""

# --- marking.c ---

def announce(known: Buffer, word: Buffer, /) -> None:
    """Count up a word: `known`, the server's own, and `word`, the same in the pool, both of one u64. Wakes all that
    wait for it, in any process."""

def await_word(word: Buffer, seen: int, seconds: float, /) -> int:
    """Wait without the GIL until the u64 is not `seen` any more, at most so long; what it is then. May return early."""

def mark_slots(known: Buffer, words: Buffer, offsets: list[int], data_offset: int, word: int, /) -> None:
    """Write the word of the slot at each offset to both tables, aligned buffers of u64 with one for each page from
    `data_offset` on. Raises IndexError for an offset outside of them, and then nothing is written."""
