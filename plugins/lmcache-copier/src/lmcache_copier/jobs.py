"""Jobs of an engine that the copier does: what `StoreJob` and `RetrieveJob` are where the engine copies."""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from lmcache_copier import messages as m
from lmcache_copier.link import CopierCall, CopierLink
from lmcache_core import Status
from lmcache_core.client import PagesCall, PagesResult
from lmcache_core.errors import ProtocolError
from lmcache_core.kernel.answers import Reason

_STATUSES = tuple(Status)  # as `messages.STATUSES` numbers them
_REASONS = tuple(Reason)
_SLICE_S = 0.05


class ServerJob:
    """Keys of several groups in progress. `done`, `result` and `cancel` wait for nothing but the copier's own word that
    it touches no page; where it does not give it, it is killed first. Dropping a job cancels it."""

    _writes: bool

    def __init__(
        self, link: CopierLink | None, why: str, call: PagesCall, make: Callable[[int], Any], event: object = None
    ) -> None:
        """`link`: None if there is no copier, which `why` says. `event`: kept until the job is over."""
        self._event = event
        self._entries = call.entries
        self._pages = [call.batch.ids(number) for number in range(len(call.entries))] if self._writes else []
        self._until = None if call.deadline_s is None else time.monotonic() + call.deadline_s
        self._link = link
        self._asked_to_end = self._late = False
        self._result: PagesResult | None = None
        self.fault = why  # why pages could not be copied, or the copier could not be asked; empty: they could
        self._call: CopierCall | None = None
        if link is None:
            self._result = self._unreachable(nothing_written=True)
        else:
            self._call = call_made = link.open((m.JobFinished,))
            self._dropped = weakref.finalize(self, partial(link.cancel, call_made))
            self._dropped.atexit = False
            link.send(call_made, make(call_made.rid))

    def done(self) -> bool:
        """Whether `result` is available."""
        return self._wait(0.0)

    @property
    def result(self) -> PagesResult | None:
        """None until it is done."""
        return self._result if self.done() else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most that long (None: without a limit)."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._wait(_SLICE_S if until is None else min(_SLICE_S, max(0.0, until - time.monotonic()))):
            if until is not None and time.monotonic() >= until:
                return False
        return True

    def cancel(self) -> None:
        """Cancel the job. When this returns, nothing reads or writes the pages any more; the result says what was done
        by then, and is `ABORTED` for the rest."""
        self.leave()
        self.wait()

    def leave(self) -> None:
        """Ask for the end of the job, and wait for nothing."""
        if not self._asked_to_end and self._link is not None and self._call is not None:
            self._asked_to_end = True
            self._link.cancel(self._call)

    def _wait(self, timeout_s: float) -> bool:
        if self._result is None:
            assert self._link is not None
            assert self._call is not None
            if self._link.wait(self._call, timeout_s):
                self._end(self._call)
            elif self._until is not None and time.monotonic() >= self._until:
                self._late = self._late or not self._asked_to_end
                self.leave()  # it knows its deadline, too, and may be about to answer
        return self._result is not None

    def _end(self, call: CopierCall) -> None:
        self._dropped.detach()
        reply = call.reply
        if isinstance(reply, m.JobFinished):
            self.fault = reply.fault
            self._result = self._made(reply)
        elif reply is not None:
            self.fault = reply.message
            self._result = self._failed(Status.ABORTED, nothing_written=True)  # it was refused before anything
        else:
            self.fault = call.lost
            self._result = self._unreachable(nothing_written=False)

    def _made(self, reply: m.JobFinished) -> PagesResult:
        counts = [len(each.keys) for each in self._entries]
        if [len(row) for row in reply.statuses] != counts or [len(row) for row in reply.reasons] != counts:
            raise ProtocolError("the copier's answer is of other keys")
        statuses = [list(map(_STATUSES.__getitem__, row)) for row in reply.statuses]
        reasons = [list(map(_REASONS.__getitem__, row)) for row in reply.reasons]
        untrusted = [array("q", row).tolist() for row in reply.untrusted]
        if self._late:
            _name_late(statuses, reasons, Status.MISS if self._writes else Status.UNREACHABLE)
        return PagesResult(statuses, reasons, untrusted, [array("Q", row) for row in reply.incarnations])

    def _unreachable(self, *, nothing_written: bool) -> PagesResult:
        return self._failed(Status.UNREACHABLE, nothing_written=nothing_written)

    def _failed(self, status: Status, *, nothing_written: bool) -> PagesResult:
        counts = [len(each.keys) for each in self._entries]
        pages = [[] if nothing_written else [page for page in array("q", ids) if page >= 0] for ids in self._pages]
        return PagesResult(
            [[status] * count for count in counts],
            [[Reason.NONE] * count for count in counts],
            pages or [[] for _ in counts],
            [array("Q", bytes(8 * count)) for count in counts],
        )


def _name_late(statuses: list[list[Status]], reasons: list[list[Reason]], late: Status) -> None:
    """What a deadline ended is called as where the engine copies."""
    for row, whys in zip(statuses, reasons, strict=True):
        for at, status in enumerate(row):
            if status is Status.ABORTED:
                row[at], whys[at] = late, Reason.LATE


class ServerStore(ServerJob):
    """From pages to the pool. `waited_s`: how long the server took to give room."""

    _writes = False
    waited_s = 0.0
    device_s = 0.0  # as `StoreJob.device_s`: this process spends nothing on copies

    @property
    def has_read(self) -> bool:
        """Whether all pages have been read, or will never be: from then on they may change."""
        return self._call is None or self._call.read is not None or self.done()

    def wait_read(self, timeout_s: float | None = None) -> bool:
        """Wait for that, at most so long (None: without a limit). Raises what the copier refused the job with."""
        call, until = self._call, None if timeout_s is None else time.monotonic() + timeout_s
        while call is not None and call.read is None:
            left = _SLICE_S if until is None else min(_SLICE_S, until - time.monotonic())
            if left <= 0:
                return False
            if self._wait(left):
                break
        if call is not None and call.read is not None:
            self.waited_s = call.read.waited_s
        elif call is not None and isinstance(call.reply, m.CopierRefused):
            call.result()
        return True


class ServerRetrieve(ServerJob):
    """From the pool to pages. A region is done when the job is."""

    _writes = True

    def __init__(
        self, link: CopierLink | None, why: str, call: PagesCall, make: Callable[[int], Any], event: object,
        regions: int,
    ) -> None:  # fmt: skip
        super().__init__(link, why, call, make, event)
        self._regions = regions

    def done_region(self, region: int) -> bool:
        """Whether all pages of this region that will be written have been."""
        self._check_region(region)
        return self.done()

    def wait_region(self, region: int, timeout_s: float | None = None) -> bool:
        """Wait until that region is done, at most that long."""
        self._check_region(region)
        return self.wait(timeout_s)

    def _check_region(self, region: int) -> None:
        if not 0 <= region < self._regions:
            raise IndexError(f"no region {region}: {self._regions} are registered")


def waited(job: ServerJob) -> PagesResult:
    """Its result. An interrupted wait cancels it: nobody gets the job, so nobody may write for it."""
    try:
        job.wait()
    except BaseException:
        job.cancel()
        raise
    result = job.result
    assert result is not None
    return result
