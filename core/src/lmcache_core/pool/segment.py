"""The segment: the pool's memory as one process sees it.

The server creates it, under claims that only it can hold, and removes it. Workers attach to a descriptor that the
server passes them (or, for backing shm, to its name). They check the header before they use an offset, and never remove
anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import (
    LimitError,
    NotAttachedError,
    PoolError,
    PoolMismatchError,
    UntrustedError,
    UsageError,
)
from lmcache_core.guard import on_failure
from lmcache_core.limits import REPAIR_STEP_BYTES, UNLOCKED_ROWS_TRIED
from lmcache_core.native import native
from lmcache_core.pool import backing as backings
from lmcache_core.pool import header as headers
from lmcache_core.pool import on_disk
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.pool.backing import LIFELINE_NAME, SHM_DIR, Access, Backing
from lmcache_core.pool.claim import Claim, claim
from lmcache_core.pool.header import MAGIC, TALLY_BYTES, Header, PoolInfo
from lmcache_core.pool.lifelock import lock_is_free
from lmcache_core.pool.liveness import Life, by_lock, by_process
from lmcache_core.pool.making import adoptable, check_fits, read_header, size
from lmcache_core.pool.mapping import Mapping, flush
from lmcache_core.pool.master import Master
from lmcache_core.pool.ownership import OnStale, own_segment, same_file, unlink
from lmcache_core.pool.processes import UNKNOWN, Process, our_boot
from lmcache_core.pool.tables import LayoutRow, Tables, WorkerRow
from lmcache_core.trust import Trust

log = logging.getLogger(__name__)

__all__ = ["Access", "Backing", "OnStale", "PoolInfo", "Segment", "name_exists"]


class Segment:
    """A mapped pool. Its tables are used by one thread; views may be used from any thread."""

    def __init__(
        self, descriptor: Descriptor, header: Header, claims: Sequence[Claim] = (), path: Path | None = None
    ) -> None:
        """Called by `create` and `attach_*`. Takes over the descriptor and the `claims`."""
        self._descriptor = descriptor
        self.claims = tuple(claims)  # the owner's, on the names of its segment and in its runtime directory
        self.path = path  # None if the backing has no name, or this process does not know it
        self.header = header
        self.info = header.info
        self.adopted = False  # it was a dead server's, and its content is kept
        self.recreated = False  # a dead server's segment of this name was found and freed …
        self.why_cold = ""  # why nothing was adopted
        self._unmapped = False  # no former worker can map it
        self.rebooted = False  # it was adopted from a disk, and the machine has started anew since it was served …
        self.stored_after_s = 0  # … in disorder: what was stored up to this Unix second may have been cleared
        self._began = False  # the owner may have changed something
        self._former_epoch = 0
        self._epoch = 0  # this server's own
        self._mapping: Mapping | None = Mapping(descriptor.fileno(), header.segment_bytes)
        self._fenced: Mapping | None = None  # the same pool without write permission
        self._fencing = threading.Lock()
        self._buffer = self._mapping.view()
        self.master: Master | None = None  # the owner's own tables, safe from stray writes to the pool
        if claims:
            self.master = Master(self._buffer[: header.index_offset], *headers.regions(header))
        self._tables: Tables | None = Tables(self._buffer, header, self.master)
        self._serving = self._buffer[headers.SERVING_OFFSET : headers.SERVING_OFFSET + 8].cast("Q")
        self._published = self._word(headers.PUBLISHED_OFFSET)
        known = self._buffer if self.master is None else self.master.buffer
        self._proof = known[headers.PROOF_OFFSET : headers.PROOF_OFFSET + 8].cast("Q")
        # Bound once, because it is called for every slot that is granted or settled.
        self.mark_slots: Callable[[Sequence[int], int, int | None], None] = self._tables.mark_slots
        self._forked = False
        forget_in_child(self)

    # --- making and attaching -----------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        name: str,
        data_bytes: int,
        backing: Backing | str = Backing.SHM,
        *,
        runtime_dir: Path,
        access: Access | str = Access.OWNER,
        gids: Sequence[int] = (),
        on_stale: OnStale | str = OnStale.RECREATE,
        why_not_adopt: str = "",
        index_entries: int | None = None,
        shm_dir: Path = SHM_DIR,
        file: Path | None = None,
    ) -> Segment:
        """Make the pool, and own it until `close` or death.

        `data_bytes` is the room for objects; tables and index come on top. `runtime_dir` is made (0700) if it is
        missing; a claim on NAME stands in it, and one on the segment's name beside the segment. `adopted`, `recreated`
        and `why_cold` say what `on_stale` did with a dead server's segment (`why_not_adopt`: the caller's reason for
        RECREATE); an adopted one has tables that are still to be validated. Raises PoolBusyError (a living owner),
        NotEnoughMemoryError (figures and cure), UsageError (name, size), PoolError (all else); then nothing new is left
        behind.
        """
        backing, access, on_stale = Backing(backing), Access(access), OnStale(on_stale)
        header = headers.plan(name, data_bytes, backing, boot_id=secrets.randbits(63) or 1, index_entries=index_entries)
        Trust.of_server(runtime_dir.parent).open_directory(runtime_dir, make_mode=0o700).close()
        with contextlib.ExitStack() as undo:
            claims = [claim(runtime_dir, name, name, undo, [LIFELINE_NAME])]
            path, owned, ours = None, None, None
            if backing is Backing.SHM:
                path = backings.segment_path(name, shm_dir)
            elif backing is Backing.FILE:
                if file is None:
                    raise UsageError("a pool of backing file needs the path of its file (l1.path)")
                path, ours = file, partial(on_disk.check_ours, path=file, name=name)
                on_disk.check_place(path)
            if path is not None:
                claims.append(claim(path.parent, path.name, name, undo))
                mine = partial(adoptable, header, access, gids)
                mark = b"" if file is None else on_disk.MAKING
                owned = own_segment(path, name, on_stale, mine, undo, why_not_adopt, ours, mark)
            former = None if owned is None else owned.adopted
            if former is None:
                check_fits(header, shm_dir=shm_dir if path is None else path.parent)
            if owned is not None:
                descriptor = owned.file
            else:
                descriptor = Descriptor.of(backings.create_memfd(name, backing))
                undo.callback(descriptor.close)
            if backing is Backing.FILE and path is not None:
                on_disk.allocate(descriptor.fileno(), header, path)
            unmapped = former is not None and on_disk.nobody_maps(descriptor.fileno(), header)
            if former is not None and not unmapped:
                # workers that map it keep their mapping
                header = replace(header, boot_id=former.boot_id, created_ns=former.created_ns)
            elif former is None:
                size(descriptor.fileno(), header, access, gids)
            segment = cls(descriptor, header, claims, path)
            undo.callback(segment.close)
            segment.adopted, segment._unmapped = former is not None, unmapped
            if owned is None:
                segment.why_cold = f'l1.backing is "{backing}": such a pool ends with its server'
            else:
                segment.recreated, segment.why_cold = owned.recreated, owned.why_cold
            segment._publish_header()
            proof = secrets.randbits(64) or 1
            segment._owned().write(headers.PROOF_OFFSET, proof.to_bytes(8, "little"))
            undo.pop_all()
        return segment

    def _publish_header(self) -> None:
        """Also note who served the pool before; that field is untrusted input."""
        master = self._owned()
        kept: int = self._word(headers.KEPT_OFFSET)[0]
        self._former_epoch = (self.serving or kept) & headers.EPOCH_MASK
        # These stay, in case that this server dies before it has looked.
        stay = (headers.CLEARS_OFFSET, headers.BOOT_OFFSET, headers.FLUSHED_OFFSET, headers.CLEARED_OFFSET)
        words = {offset: int(self._word(offset)[0]) for offset in stay}
        if self.adopted and self.header.backing is Backing.FILE:
            self.rebooted = not on_disk.is_of_this_boot(words[headers.BOOT_OFFSET])
            in_disorder = self.rebooted and not words[headers.FLUSHED_OFFSET]
            self.stored_after_s = words[headers.CLEARED_OFFSET] if in_disorder else 0
        page = headers.encode(self.header)
        for offset, word in words.items():
            page = page.ljust(offset, b"\0") + word.to_bytes(8, "little")
        page = page.ljust(headers.HEADER_BYTES, b"\0")
        end = len(MAGIC)
        master.write(end, page[end:])
        # Magic last: a segment with it is complete.
        master.write(0, page[:end])

    def begin(self) -> None:
        """The owner calls it before its first change; one that fails on its way leaves what it has found. On a disk the
        header's page says from here on: of this boot, and in disorder."""
        self._began = True
        if self.header.backing is Backing.FILE:
            self._write_word(headers.BOOT_OFFSET, our_boot())
            self._write_word(headers.FLUSHED_OFFSET, 0)
            self._flush_header("that it is served, so nothing of it could be believed after a power cut")

    def note_cleared(self, now_s: int) -> None:
        """A clear begins at this Unix second: on a disk, it is kept before this returns, so that nothing comes back
        after a power cut, also if the owner has yet to `begin`. The owner calls it. Raises `PoolError` if the disk does
        not take it."""
        if self.header.backing is not Backing.FILE:
            return
        self._write_word(headers.CLEARED_OFFSET, max(now_s, int(self._word(headers.CLEARED_OFFSET)[0])))
        self._write_word(headers.FLUSHED_OFFSET, 0)  # or the clear would not count
        self._flush_header("the clear, so what is cleared may come back after a power cut")

    def _flush_header(self, what: str) -> None:
        try:
            flush(self.mapping.address, headers.HEADER_BYTES)
        except OSError as error:
            raise PoolError(f"{self.path} does not take {what}: {error.strerror}; see to its disk") from error

    def _end_on_disk(self) -> None:
        """Everything is on the disk, and then the word that says so."""
        if self.header.backing is Backing.FILE:
            try:
                os.fsync(self.fileno())
                self._write_word(headers.FLUSHED_OFFSET, 1)
                os.fsync(self.fileno())
            except OSError as error:
                log.warning("%s cannot be flushed, and counts as after a power cut: %s", self.path, error.strerror)

    def _write_word(self, offset: int, value: int) -> None:
        self._owned().write(offset, value.to_bytes(8, "little"))

    def _word(self, offset: int) -> memoryview:
        return self._buffer[offset : offset + 8].cast("Q")

    def _owned(self) -> Master:
        if self.master is None:
            raise self._gone() if self._mapping is None else PoolError(f"pool {self.info.name!r} is another process's")
        return self.master

    @classmethod
    def attach_fd(cls, fd: int | Descriptor, expected: PoolInfo, *, trust: Trust | None = None) -> Segment:
        """Map the segment behind a descriptor that the server passed. Takes over `fd`, and closes it if this raises.
        Raises PoolMismatchError, before anything is mapped, if it is not `expected`; UntrustedError if it belongs to
        somebody whom `trust` (None: our uid and root) does not name."""
        passed = fd if isinstance(fd, Descriptor) else Descriptor.of(fd)
        with on_failure(passed.close):  # now, and not only when the traceback is freed
            os.set_inheritable(passed.fileno(), False)
            return cls._attach(passed, expected, trust, f"the segment of pool {expected.name!r}")

    @classmethod
    def _attach(
        cls, passed: Descriptor, expected: PoolInfo | None, trust: Trust | None, what: str, path: Path | None = None
    ) -> Segment:
        (trust or Trust.of_client()).check_segment(passed.fileno(), what)
        header = read_header(passed.fileno())
        headers.compare(header.info, expected or header.info)
        return cls(passed, header, path=path)

    @classmethod
    def attach_name(
        cls,
        name: str,
        expected: PoolInfo | None = None,
        *,
        shm_dir: Path = SHM_DIR,
        uid: int | None = None,
        trust: Trust | None = None,
    ) -> Segment:
        """Map a pool of backing shm by its name, for tools and for workers without a lifeline.

        Python's resource tracker is not involved, so no process's exit removes the pool. Without `expected`, any pool
        there is accepted. `uid`: the server's, as in the name (None: ours). `trust`: who may own the file (None: our
        uid and root).
        """
        path = backings.segment_path(name, shm_dir, uid=uid)
        if expected is not None and expected.backing is not Backing.SHM:
            raise PoolError(
                f"pool {name!r} has backing {expected.backing} and so no name to attach to: connect by the "
                'lifeline, or set l1.backing = "shm" for the server'
            )
        try:
            found = Descriptor(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise PoolError(
                f"{path} is not there: no server with this pool name and backing shm runs here, its name was "
                "deleted, or this container does not share the server's /dev/shm"
            ) from None
        except OSError as error:
            raise PoolError(
                f"{path} cannot be opened: {error.strerror}; run under the server's uid, or have it set "
                'access = "group" with one of your gids'
            ) from error
        try:
            with on_failure(found.close):
                return cls._attach(found, expected, trust, str(path), path)
        except UntrustedError as error:  # treated as missing: over ZMQ a client can do without it
            raise PoolError(str(error)) from error

    # --- memory -------------------------------------------------------------------------------------------

    @property
    def mapping(self) -> Mapping:
        """The mapping. Hold its `array` while you use its address."""
        if self._mapping is None:
            raise self._gone()
        return self._mapping

    def _gone(self) -> PoolError:
        state = "belongs to the parent of this forked process" if self._forked else "is closed"
        return PoolError(f"pool {self.info.name!r} {state}: connect again")

    @property
    def buffer(self) -> memoryview:
        """The whole mapping, writable, format B. Any part of it keeps the memory mapped."""
        return self.mapping.view()

    def view(self, offset: int, nbytes: int, *, readonly: bool = False) -> memoryview:
        """`nbytes` of data at an absolute `offset`, without a copy. UsageError if any of it is not data."""
        self._check_data(offset, nbytes)
        if self._mapping is None:
            raise self._gone()
        part = self._buffer[offset : offset + nbytes]
        return part.toreadonly() if readonly else part

    def slot(self, offset: int, nbytes: int, *, fenced: bool = False) -> Any:
        """An object that lends these bytes by the buffer protocol, and lives as long as any view of them. `fenced`:
        they are in a second mapping without write permission, made on first use. CUDA knows one mapping: slots of a
        pool that is pinned for it are not fenced. UsageError if any of it is not data."""
        self._check_data(offset, nbytes)
        mapping = self.mapping
        if fenced and not mapping.pinned:
            with self._fencing:
                if self._fenced is None:
                    self._fenced = Mapping(self.fileno(), self.header.segment_bytes, writable=False)
                mapping = self._fenced
        return mapping.part(offset, nbytes)

    def _check_data(self, offset: int, nbytes: int) -> None:
        if offset < self.header.data_offset or nbytes < 0 or offset + nbytes > self.header.segment_bytes:
            raise UsageError(
                f"{nbytes} bytes at offset {offset} are not within the data of pool {self.info.name!r}, "
                f"which goes from {self.header.data_offset} to {self.header.segment_bytes}"
            )

    def fileno(self) -> int:
        """This process's descriptor of the segment. It carries no lock; do not send it."""
        if self._mapping is None:
            raise self._gone()
        return self._descriptor.fileno()

    def worker_fd(self) -> int:
        """A second, independent open of the segment, to send to one worker. The caller closes it."""
        return backings.reopen(self.fileno()).detach()

    # --- the index ----------------------------------------------------------------------------------------

    @property
    def index_numbers(self) -> dict[str, int]:
        """Where the index is: `_native.Index(segment.buffer, **segment.index_numbers)`."""
        return self.header.index_numbers

    def serve(self, epoch: int) -> None:
        """Publish that the server with this lease epoch answers for the index; 0: nobody does. The owner calls it."""
        if not 0 <= epoch < 1 << 24:
            raise UsageError(f"epoch {epoch} must have at most 24 bits")
        self._write_word(headers.SERVING_OFFSET, epoch)
        if epoch:
            self._epoch = epoch

    def announce(self) -> None:
        """Wake workers that wait for something to be published in the index. The owner calls it, with the C
        extension."""
        offset = headers.PUBLISHED_OFFSET
        native.announce(self._owned().buffer[offset : offset + 8], self._published)

    @property
    def published(self) -> int:
        """How often `announce` was called. Untrusted input."""
        return self._published[0]

    def wait_published(self, seen: int, timeout_s: float) -> int:
        """Wait until `published` is not `seen` any more, at most that long, without a call to the server; what it is
        then. May return early."""
        return native.await_word(self._published, seen, timeout_s)

    @property
    def former_epoch(self) -> int:
        """The lease epoch of the adopted pool's former server; 0 if unknown."""
        return self._former_epoch

    @property
    def clears(self) -> int:
        """What `note_clears` was last given, also by a former server; 0 if nothing. Untrusted input."""
        return int(self._word(headers.CLEARS_OFFSET)[0])

    def note_clears(self, digest: int) -> None:
        """Everything in the pool is of the epochs with this digest, a u64. The owner calls it."""
        self._owned().write(headers.CLEARS_OFFSET, digest.to_bytes(8, "little"))

    def repair(self) -> int:
        """Do one bounded step of repairing overwritten words: header, serving word, layouts and worker rows at each
        call, slabs and slots in turn. Returns how many words differed. The owner calls it."""
        return self._owned().repair(REPAIR_STEP_BYTES)

    @property
    def serving(self) -> int:
        """The lease epoch of the server that answers for the index; 0 for none. Untrusted input."""
        return self._serving[0]

    def still(self, info: PoolInfo) -> bool:
        """Whether the mapping still shows this pool, unmoved, and no other that was made over it."""
        try:
            found = headers.decode(bytes(self._buffer[: headers.HEADER_BYTES]))
        except PoolMismatchError:
            return False
        ours = self.header
        return found.info == info and replace(found, pid=ours.pid, created_ns=ours.created_ns) == ours

    # --- former workers -----------------------------------------------------------------------------------

    def living_rows(self) -> bytes:
        """A byte for each worker row: 1 if a former worker may live and touch slots under it. Such rows stay claimed
        until `release_row`. All other rows are released: a lock on a row that the dead server gave to nobody says
        nothing."""
        tables = self.tables
        living = bytearray(self.header.worker_rows)
        for row in range(len(living)):
            found = tables.found_row(row)
            if not found.claimed or self._unmapped or self._row_left(row, found):
                tables.clear_row(row)
            else:
                living[row] = 1
                tables.claim_row(0, row, found.process, locked=found.locked)
        return bytes(living)

    def row_left(self, row: int) -> bool:
        """Whether a former worker touches nothing under this row any more: it has left the row by unlocking it, or is
        dead. Its lock, where somebody else may hold it, does not show that the worker lives."""
        return self._row_left(row, self.tables.worker_row(row))

    def _row_left(self, row: int, found: WorkerRow) -> bool:
        if found.locked and by_lock(self.fileno(), self.tables.life_offset(row)) is Life.DEAD:
            return True
        return by_process(found.process) is Life.DEAD

    # --- workers and layouts ------------------------------------------------------------------------------

    def claim_row(self, pid: int = 0, process: Process = UNKNOWN, *, locked: bool = True) -> tuple[int, int]:
        """(row, nonce) of a free row of the worker table. The worker proves that it maps the pool by reading the nonce
        there. `pid` is for messages. Rows whose life lock is held by somebody are skipped; without `locked` one of them
        will do, because this worker proves its life in another way."""
        tables = self.tables
        # Without `locked` a few of them: somebody may have locked the whole table.
        rows = list(islice(tables.free_rows(), None if locked else UNLOCKED_ROWS_TRIED))
        free = (row for row in rows if lock_is_free(self.fileno(), tables.life_offset(row)))
        row = next(free, None if locked or not rows else rows[0])
        if row is None:
            raise LimitError(f"all {self.header.worker_rows} worker rows of pool {self.info.name!r} are taken")
        return row, tables.claim_row(pid, row, process)

    def take_row(self, row: int, nonce: int, pid: int = 0, *, locked: bool = True) -> int:
        """Claim a row that a worker chose by itself. Returns the row's nonce. Raises NotAttachedError unless the worker
        has proved that it maps the pool, by what it read there, and holds the row's life lock if it says so."""
        taken = not 0 <= row < self.header.worker_rows or self.tables.row_claimed(row)
        unlocked = not taken and locked and lock_is_free(self.fileno(), self.tables.life_offset(row))
        if taken or nonce != self._proof[0] or unlocked:
            raise NotAttachedError(
                f"the client has not proved that it maps row {row} of the pool: attach to this server's "
                f"pool and lock a free row"
            )
        return self.tables.claim_row(pid, row, locked=locked)

    def shown(self, row: int) -> int:
        """What a worker that holds a row's life lock tells the server to prove that it maps the pool: the nonce of a
        row that the server gave it, or, if it chose the row by itself, the proof that all such rows share."""
        return self.tables.row_nonce(row) or self._proof[0]

    def release_row(self, row: int) -> None:
        """Free a row, once its worker is proven dead or has said goodbye."""
        self.tables.release_row(row)

    def tally_offset(self, row: int) -> int:
        """Offset in the segment of the tally line for this row's worker."""
        return self.tables.tally_offset(row)

    def clear_tally(self, row: int) -> None:
        """Clear what the row's former worker counted. For the worker that holds the row's life lock."""
        self.tables.tally(row)[:] = memoryview(bytes(TALLY_BYTES)).cast("Q")

    def row_nonce(self, row: int) -> int:
        """The nonce in a row; 0 if the row is free."""
        return self.tables.row_nonce(row)

    @property
    def tables(self) -> Tables:
        """The tables in the mapping."""
        if self._tables is None:
            raise self._gone()
        return self._tables

    def life_offset(self, row: int) -> int:
        """Offset in the segment of a row's life lock."""
        return self.tables.life_offset(row)

    def add_layout(self, layout_id: int, fingerprint: int, nbytes: int, text: str = "") -> None:
        """Publish a layout under its id; `text`: `Layout.text`."""
        self.tables.add_layout(layout_id, fingerprint, nbytes, text)

    def remove_layout(self, layout_id: int) -> None:
        """Remove a layout. Nobody uses it, and the pool has no object of it."""
        self.tables.remove_layout(layout_id)

    @property
    def layouts(self) -> dict[int, LayoutRow]:
        """Every published layout by its id."""
        return self.tables.layouts

    # --- the end ------------------------------------------------------------------------------------------

    @property
    def owned(self) -> bool:
        """True for the server that made it, until it is closed."""
        return bool(self.claims)

    @property
    def closed(self) -> bool:
        """True after `close`, and in a forked child."""
        return self._mapping is None

    def close(self, *, keep: bool | None = None) -> None:
        """Unmap it; its owner also removes lock file and name. `keep`: leave the name to the next server. None: leave
        it as it was found, so a server that adopts a pool and fails before it serves changes nothing. Memory stays
        mapped while any view of it lives."""
        if self._mapping is None:
            return
        keep = self.adopted if keep is None else keep
        claims, self.claims = self.claims, ()
        if claims and keep and self.path is not None:
            kept = 1 << 32 | (self._epoch or self._former_epoch)
            self._write_word(headers.KEPT_OFFSET, kept)
            if self._began:
                self._end_on_disk()
        elif claims and self.path is not None:
            unlink(self._descriptor, self.path)
        for each in claims:
            each.withdraw()
        self._unmap()

    def _unmap(self) -> None:
        self._mapping = self._fenced = None
        self._buffer = memoryview(b"")
        self._serving = self._proof = self._published = memoryview(bytearray(8)).cast("Q")  # nobody
        self._tables = self.master = None
        self.mark_slots = _no_slots
        self._descriptor.close()

    def after_fork_in_child(self) -> None:
        """The child has no mapping (MADV_DONTFORK), owns nothing and removes nothing. What a worker has lent out stays
        readable there: see `Mapping.in_forked_child`. A server lends nothing, so its child keeps nothing."""
        if self._mapping is None:
            return
        again = [
            each.in_forked_child() for each in (self._mapping, self._fenced) if each is not None and not self.claims
        ]
        self.claims = ()  # they have closed themselves
        self._forked = True
        # It cannot be copied: there may be no descriptor left.
        descriptor, self._descriptor = self._descriptor, Descriptor()
        try:
            self._unmap()
            for map_again in again:
                map_again(descriptor.fileno())
        finally:
            descriptor.close()  # otherwise a dead parent's memory would live as long as the child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _no_slots(offsets: Sequence[int], state: int, row: int | None) -> None:
    raise PoolError(f"{len(offsets)} slots are marked in a pool that is closed in this process")


def name_exists(segment: Segment) -> bool:
    """False once the segment's name has been deleted or given to another file. Costs one stat: ask once a second.

    A segment without a name (memfd, hugetlb) cannot lose it.
    """
    return segment.path is None or same_file(segment.fileno(), segment.path)
