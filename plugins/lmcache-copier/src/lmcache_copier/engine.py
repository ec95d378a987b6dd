"""One engine at the copier's door: what it has registered, and its jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from lmcache_copier import messages as m
from lmcache_copier.budget import Shares
from lmcache_copier.channel import Incoming, frame_of, pidfd_of
from lmcache_copier.check import why_unreachable
from lmcache_copier.copying import Copies, CopyThreads, measured_s
from lmcache_copier.limits import ENTRY_BYTES, MEASURED_BYTES_MAX, OWED_BYTES_MAX, REGISTRATIONS_MAX
from lmcache_copier.memory import DeviceRegistration, HostRegistration, Registration
from lmcache_copier.vm import EngineReach, UnreachableMemoryError
from lmcache_core import Client, Promise, Status
from lmcache_core.client import PagesResult
from lmcache_core.errors import CacheError, LimitError, ProtocolError, UsageError
from lmcache_core.limits import KEY_BYTES
from lmcache_core.threads import started

log = logging.getLogger("lmcache_copier")

FOREVER = float("inf")
_SLICE_S = 0.05


class EngineJob:
    """A store or a retrieve of one engine. It is answered once: by whoever takes `finish` first."""

    def __init__(
        self,
        message: m.StorePages | m.RetrievePages,
        registration: Registration,
        copies: Copies,
        run: Callable[[EngineJob], None],
    ) -> None:
        self.message = message
        self.rid = message.rid
        self.nbytes = ENTRY_BYTES * len(message.entries) + sum(
            len(each.keys) + len(each.ids) + len(each.promises) for each in message.entries
        )
        self.registration = registration
        self.copies = copies
        self.running: Any = None  # the job of the client, once there is one
        self._run = run
        self._lock = threading.Lock()
        self._answered = False

    def run(self) -> None:
        """On a job thread."""
        self._run(self)

    def finish(self) -> bool:
        """Whether the caller is the one to answer."""
        with self._lock:
            first, self._answered = not self._answered, True
        return first

    def before_answer(self, send: Callable[[], None]) -> None:
        """Do this, unless it is answered already. What waits for nothing."""
        with self._lock:
            if not self._answered:
                send()

    def is_cancelled(self) -> bool:
        """Whether its pages may not be touched any more."""
        return self.copies.cancelled

    def cancel(self) -> None:
        """When this returns, nothing touches the engine's pages any more."""
        self.copies.cancel()
        running = self.running
        if running is not None:
            running.leave()


class Engine:
    """One connection. Its thread reads; the answers come from it and from the threads of jobs."""

    def __init__(
        self, sock: socket.socket, client: Client, submit: Callable[[EngineJob], None], helpers: CopyThreads,
        figures: Callable[[str, int], None], shares: Shares,
    ) -> None:  # fmt: skip
        self._sock = sock
        self._client = client
        self._submit = submit
        self._helpers = helpers
        self._count = figures
        self.pid, self.uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._pidfd = pidfd_of(sock, self.pid) if self.pid else None
        self._registrations: dict[int, Registration] = {}
        self._jobs: dict[int, EngineJob] = {}
        self._numbers = 0
        self._shares = shares
        self._incoming: Incoming[m.CopierRequest] = Incoming(sock, m.CopierRequest, shares.files)
        self._sending = threading.Lock()  # guards the next three
        self._broken = False
        self._owed = 0  # bytes of answers that the socket did not take yet
        self._later: SimpleQueue[memoryview | None] = SimpleQueue()  # these; None: the connection has ended
        sock.settimeout(None)

    # --- the connection -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the engine ends, or says something that makes no sense."""
        incoming = self._incoming
        try:
            if started(self._send_later, "answers") is None:
                return
            self._send(m.CopierWelcome(m.VERSION, os.getpid(), os.geteuid()))
            while not self._broken and incoming.receive():
                for message in incoming.messages():
                    self._take(message, incoming)
        except ProtocolError as error:
            log.warning("an engine (pid %d) is dropped: %s", self.pid, error)
        except OSError as error:
            log.info("the connection of an engine (pid %d) has ended: %s", self.pid, error.strerror)
        finally:
            for job in list(self._jobs.values()):
                job.cancel()
            for registration in self._registrations.values():
                registration.close()
            self._registrations.clear()
            incoming.close()
            with self._sending:
                self._break()
            self._later.put(None)
            self._sock.close()

    def _send(self, message: Any) -> None:
        """Waits for nothing: an engine reads between two steps, and may compute for seconds."""
        frame = memoryview(frame_of(message))
        with self._sending:
            if self._broken:
                return
            if not self._owed:
                try:
                    frame = frame[self._sock.send(frame, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass  # all of it goes later
                except OSError:
                    self._break()
                    return
            if frame and self._owed + len(frame) > OWED_BYTES_MAX:
                log.warning("an engine (pid %d) is dropped: it reads no answers", self.pid)
                self._break()
            elif frame:
                self._owed += len(frame)
                self._later.put(frame)

    def _send_later(self) -> None:
        """What the socket did not take at once, on a thread of its own."""
        while (frame := self._later.get()) is not None:
            try:
                self._sock.sendall(frame)
            except OSError:
                with self._sending:
                    self._break()
                return
            with self._sending:
                self._owed -= len(frame)

    def _break(self) -> None:
        """A part of an answer may have gone: the rest would make no sense. Wakes whoever waits for the socket."""
        self._broken = True
        with contextlib.suppress(OSError):  # it is closed already
            self._sock.shutdown(socket.SHUT_RDWR)

    def _take(self, message: m.CopierRequest, incoming: Incoming[m.CopierRequest]) -> None:
        try:
            match message:
                case m.RegisterMemory():
                    self._register(message, incoming)
                case m.UnregisterMemory():
                    registration = self._registration(message.registration)
                    del self._registrations[message.registration]
                    self._away(registration, partial(self._unregister, message.rid, registration))
                case m.StorePages() | m.RetrievePages():
                    self._begin(message)
                case m.CancelJob():
                    job = self._jobs.get(message.rid)  # of one that has ended, the answer is on its way
                    if job is not None:
                        self._away(job.registration, partial(self._cancel, job))
                case m.MeasurePages():
                    self._measure(message)
                case m.AskAlive():
                    self._send(m.CopierDone(message.rid))
        except CacheError as error:
            self._send(m.CopierRefused(message.rid, error.code, str(error)))
        except UnreachableMemoryError as error:
            self._send(m.CopierRefused(message.rid, UsageError.code, self.why_not(error)))

    def why_not(self, error: OSError) -> str:
        """Why memory cannot be reached, with the cure."""
        return why_unreachable(self.pid, self.uid, error)

    # --- memory -------------------------------------------------------------------------------------------------

    def _register(self, message: m.RegisterMemory, incoming: Incoming[m.CopierRequest]) -> None:
        descriptors = [incoming.descriptors.pop(0) for _ in range(min(message.files, len(incoming.descriptors)))]
        try:
            if len(self._registrations) >= REGISTRATIONS_MAX:
                raise LimitError(f"{REGISTRATIONS_MAX} registrations of this engine are there: unregister some")
            if self._pidfd is None:
                raise UnreachableMemoryError(0, "it is in another pid namespace")
            made: Registration
            if message.gpu:
                made = DeviceRegistration(self._client, message, self._shares)
            else:
                engine = EngineReach(self.pid, self._pidfd, message.mark_at, message.mark)
                made = HostRegistration(self._client, engine, message, descriptors, self._shares)
        finally:
            for each in descriptors:
                each.close()
        self._numbers += 1
        self._registrations[self._numbers] = made
        self._count("registrations", 1)
        self._send(m.MemoryRegistered(message.rid, self._numbers))

    def _registration(self, number: int) -> Registration:
        found = self._registrations.get(number)
        if found is None:
            raise UsageError(f"no memory is registered under {number}")
        return found

    def _away(self, registration: Registration, work: Callable[[], None]) -> None:
        """What ends jobs. On a GPU that lasts as long as what the engine had queued before them, and meanwhile this
        copier is not to be taken for one that hangs."""
        if isinstance(registration, HostRegistration) or started(work, "ending") is None:
            work()

    def _unregister(self, rid: int, registration: Registration) -> None:
        for job in list(self._jobs.values()):
            if job.registration is registration:
                self._cancel(job)
        registration.close()
        self._send(m.CopierDone(rid))

    # --- jobs ---------------------------------------------------------------------------------------------------

    def _begin(self, message: m.StorePages | m.RetrievePages) -> None:
        registration = self._registration(message.registration)
        if message.rid in self._jobs:
            raise UsageError(f"job {message.rid} is under way")
        until = None if message.deadline_s is None else time.monotonic() + message.deadline_s
        store = isinstance(message, m.StorePages)
        copies = registration.copies(self._helpers, None if store else until, message.event)
        entries = [_entry(each) for each in message.entries]
        promises = [] if store else [_promise(each) for each in message.entries]

        def run(job: EngineJob) -> None:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                self._run(job, entries, promises, left)
            finally:
                self._shares.job_bytes.free(job.nbytes)  # only now: until then its keys are kept, answered or not

        job = EngineJob(message, registration, copies, run)
        self._shares.job_bytes.take(job.nbytes)
        self._jobs[message.rid] = job
        try:
            self._submit(job)
        except CacheError:
            self._is_over(job)
            self._shares.job_bytes.free(job.nbytes)
            raise

    def _run(
        self,
        job: EngineJob,
        entries: Sequence[tuple[Any, ...]],
        promises: Sequence[Promise | None],
        deadline_s: float | None,
    ) -> None:
        if job.is_cancelled():
            self._give_up(job)
            return
        message = job.message
        try:
            pages = job.registration.pages(job.copies)
            if isinstance(message, m.StorePages):
                job.running = pages.store_start(entries, deadline_s=deadline_s)
                if message.tell_read:
                    while not job.running.wait_read(_SLICE_S):  # of a GPU: its threads still copy
                        pass
                    job.before_answer(partial(self._send, m.PagesRead(job.rid, job.running.waited_s)))
            else:
                verify = ("never", "first", "always")[message.verify]
                job.running = pages.retrieve_start(
                    entries, promises=promises, order="object", deadline_s=deadline_s, verify=verify
                )
            if job.is_cancelled():  # by somebody who did not find the job yet
                job.running.leave()
            job.running.wait()
            self._finish(job, job.running.result)
        except CacheError as error:
            self._give_up(job, error)
        except Exception:
            log.exception("a job has failed")
            self._give_up(job, CacheError("the copier failed; the server's log has why"))

    def _cancel(self, job: EngineJob) -> None:
        job.cancel()
        if job.running is None and not any(job.copies.begun()):  # it may wait for a server that hangs
            self._give_up(job)

    def _is_over(self, job: EngineJob) -> bool:
        """Whether the caller is the one to answer."""
        first = job.finish()
        if first:
            self._jobs.pop(job.rid, None)
        return first

    def _give_up(self, job: EngineJob, error: CacheError | None = None) -> None:
        """Answer it by what was copied, without the client's word on it. What was not read whole is not stored; whether
        the rest is, is not known."""
        job.copies.cancel()
        if not self._is_over(job):
            return
        begun = list(job.copies.begun())
        if error is not None and not begun:
            self._send(m.CopierRefused(job.rid, error.code, str(error)))
            return
        entries, store = job.message.entries, isinstance(job.message, m.StorePages)
        counts = [len(each.keys) // KEY_BYTES for each in entries]
        statuses = [bytearray([m.STATUSES[Status.ABORTED]]) * count for count in counts]
        untrusted = [b"" for _ in counts]
        for entry, position, whole in begun:
            if store and whole:
                statuses[entry][position] = m.STATUSES[Status.UNREACHABLE]
            elif not store:
                nbytes = len(entries[entry].ids) // counts[entry]
                untrusted[entry] += entries[entry].ids[position * nbytes : (position + 1) * nbytes]
        self._send(
            m.JobFinished(
                job.rid,
                [bytes(row) for row in statuses],
                [bytes(count) for count in counts],
                untrusted,
                [bytes(8 * count) for count in counts],
                "" if error is None else str(error),
            )
        )

    def _finish(self, job: EngineJob, result: PagesResult) -> None:
        if not self._is_over(job):
            return
        moved = result.hits or result.stored
        self._count("jobs", 1)
        self._count("objects", moved)
        self._count("faults", bool(job.copies.fault))
        self._send(
            m.JobFinished(
                job.rid,
                [bytes([m.STATUSES[each] for each in row]) for row in result.statuses],
                [bytes(row) for row in result.reasons],
                [array("q", row).tobytes() for row in result.untrusted],
                [array("Q", row).tobytes() for row in result.incarnations],
                job.copies.fault and self.why_not(OSError(0, job.copies.fault)),
            )
        )

    def _measure(self, message: m.MeasurePages) -> None:
        registration = self._registration(message.registration)
        if message.group >= len(registration.groups):
            raise UsageError(f"no group {message.group}; {len(registration.groups)} are registered")
        if not isinstance(registration, HostRegistration):
            raise UsageError("memory of a GPU is not measured")
        group = registration.groups[message.group]
        count = len(message.ids) // (8 * group.pages_per_object)
        if count * group.object_bytes > MEASURED_BYTES_MAX:
            raise LimitError(
                f"{count:,} objects of {group.object_bytes:,} bytes are not measured: {MEASURED_BYTES_MAX:,} bytes at "
                "most"
            )
        copies = registration.copies(self._helpers, None)
        self._shares.job_bytes.take(group.object_bytes)
        try:
            seconds = measured_s(copies, registration.planned, message.group, count, message.ids, group.object_bytes)
        finally:
            self._shares.job_bytes.free(group.object_bytes)
        if copies.fault:
            raise UnreachableMemoryError(0, copies.fault)
        self._send(m.PagesMeasured(message.rid, seconds))


def _entry(given: m.JobEntry) -> tuple[Any, ...]:
    if len(given.keys) % KEY_BYTES or len(given.ids) % 8 or len(given.promises) not in (0, len(given.keys) // 4):
        raise UsageError(f"keys have {KEY_BYTES} bytes each, and page ids and promises 8")
    return given.group, _keys_of(given), memoryview(given.ids).cast("q"), 0, None, given.traceparent


def _promise(given: m.JobEntry) -> Promise | None:
    if not given.promises:
        return None
    return Promise(tuple(array("Q", given.promises)), tuple(_keys_of(given)), FOREVER)


def _keys_of(given: m.JobEntry) -> list[bytes]:
    """However many: it is the server's frames that hold only so many."""
    return [given.keys[at : at + KEY_BYTES] for at in range(0, len(given.keys), KEY_BYTES)]
