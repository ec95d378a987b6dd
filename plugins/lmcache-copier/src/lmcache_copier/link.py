"""An engine's connection to the copier: calls, their answers, and the proof that nothing is copied any more.

A copier that hangs, or was stopped, may go on at any time: then it would write to pages that are others' by now, or
read them for a key that they do not belong to. So a job that is given up is over when the copier says so, or is dead.
Whoever gets no answer kills it; the server starts another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from lmcache_copier import messages as m
from lmcache_copier.channel import Incoming, frame_of, pidfd_of, send
from lmcache_copier.check import yama_scope
from lmcache_copier.limits import ANSWER_S, CONNECT_S, FENCE_S, MARK_BYTES, QUIET_S
from lmcache_core.buffers import address_of
from lmcache_core.descriptors import Descriptor
from lmcache_core.errors import CacheError, DisconnectedError, ProtocolError, VersionError, by_code
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.trust import Trust

log = logging.getLogger("lmcache_copier")

_SLICE_S = 0.05  # a thread that reads for all looks up so often
_PR_SET_PTRACER = 0x59616D61


class Mark:
    """Bytes in this process's memory by which the copier knows it."""

    def __init__(self) -> None:
        self._buffer = bytearray(secrets.token_bytes(MARK_BYTES))
        self._view = memoryview(self._buffer)

    @property
    def at(self) -> int:
        return address_of(self._view)

    @property
    def value(self) -> bytes:
        return bytes(self._buffer)


class CopierCall:
    """A question to the copier. `reply`: the last answer; `lost`: there will be none, and nothing of it is copied any
    more. `last`: the answer after which nothing is copied for it."""

    def __init__(self, rid: int, last: tuple[type[Any], ...]) -> None:
        self.rid = rid
        self.read: m.PagesRead | None = None
        self.reply: Any = None
        self.lost = ""
        self.last = last
        self.undo: Callable[[Any], None] | None = None
        self.owners: object = None  # of memory that the copier has until then

    def undo_answered(self) -> None:
        """What nobody waits for any more."""
        if self.undo is not None and isinstance(self.reply, self.last):
            self.undo(self.reply)

    @property
    def over(self) -> bool:
        """Whether it is answered, or never will be."""
        return self.reply is not None or bool(self.lost)

    def result(self) -> Any:
        """The answer, once it is over. Raises `DisconnectedError`, and what the copier refused it with."""
        if self.reply is None:
            raise DisconnectedError(self.lost)
        if isinstance(self.reply, m.CopierRefused):
            raise by_code(self.reply.code)(self.reply.message)
        return self.reply


class CopierLink:
    """One connection, from its welcome to its end. Thread-safe: one thread reads for all that wait."""

    def __init__(self, path: Path, trust: Trust) -> None:
        """Connect. Raises `DisconnectedError`, and `UntrustedError` for a copier of somebody else's."""
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._lock = threading.Lock()  # guards the calls
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._calls: dict[int, CopierCall] = {}
        self._rids = count(1)
        self._dead = False
        self._ended = False  # the connection, as far as we have seen
        self._asked_at: float | None = None  # since when the copier owes a sign of life
        self._warned = False
        self._owed: deque[bytes] = deque()  # frames that nobody waited for, and that did not go at once
        self._pidfd: Descriptor | None = None
        try:
            self._connect(trust)
        except (OSError, CacheError) as error:
            self._sock.close()
            if isinstance(error, CacheError):
                raise
            raise DisconnectedError(
                f"no copier answers at {path}: {error.strerror or error}; the server needs lmcache-copier and a table "
                "[copier]"
            ) from error
        self._heard_at = time.monotonic()
        forget_in_child(self)

    def _connect(self, trust: Trust) -> None:
        sock = self._sock
        sock.settimeout(CONNECT_S)
        with contextlib.closing(trust.open_socket_directory(self.path)) as directory:
            sock.connect(f"/proc/self/fd/{directory.fileno()}/{self.path.name}")
        trust.check_peer(sock, str(self.path))
        pid, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if pid <= 0:
            raise DisconnectedError(
                f"the copier at {self.path} runs in another pid namespace, so that it could not be ended if it hung: "
                "let both containers share one"
            )
        self._pidfd = pidfd_of(sock, pid)  # before its welcome: it lives after this
        self.pid = pid
        self._incoming: Incoming[m.CopierReply] = Incoming(sock, m.CopierReply)
        welcome = None
        while welcome is None:
            if not self._incoming.receive():
                raise DisconnectedError(f"the copier at {self.path} refuses this user: name its uid in copier.uids")
            welcome = next(self._incoming.messages(), None)
        if not isinstance(welcome, m.CopierWelcome) or welcome.version != m.VERSION:
            raise VersionError(f"the copier at {self.path} speaks another protocol: install one version on both sides")
        sock.settimeout(None)  # or Python would poll before each call; what is read was announced
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ANSWER_S), 0))
        if yama_scope() == 1:  # it lets nobody look at us but those that we name
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)

    def __del__(self) -> None:
        self._sock.close()  # its end cancels what was left under way

    def after_fork_in_child(self) -> None:
        """The copier would take the child for us."""
        self._dead = self._ended = True
        self._sock.close()

    @property
    def usable(self) -> bool:
        """Whether calls can be made."""
        return not self._ended and not self._dead

    # --- calls --------------------------------------------------------------------------------------------------

    def open(self, last: tuple[type[Any], ...]) -> CopierCall:
        """A call that is still to be sent, so that whoever asks can hold it before the copier knows of it."""
        call = CopierCall(next(self._rids), last)
        self._calls[call.rid] = call  # without the lock: see `unregister`
        return call

    def send(self, call: CopierCall, message: Any, fds: Sequence[int] = ()) -> None:
        """Send it. Raises `ProtocolError` for a message that is too long."""
        try:
            self._send(message, fds)
        except ProtocolError:
            with self._lock:
                self._calls.pop(call.rid, None)
            raise

    def _send(self, message: Any, fds: Sequence[int] = ()) -> None:
        if self._ended:
            self._bury(f"the copier at {self.path} has ended")
            return
        try:
            with self._sending:
                while self._owed:
                    self._sock.sendall(self._owed.popleft())
                send(self._sock, message, fds)
        except OSError:  # whoever waits for the answer learns of it
            self._ended = True
        except ProtocolError:  # nothing of it was sent
            raise
        except BaseException:  # interrupted, perhaps within a frame: the rest would make no sense
            self._ended = True
            raise

    def post(self, message: Any) -> None:
        """Send it, and wait for nothing: a finalizer may call this, inside any lock. What does not go now goes with the
        next message."""
        self._owed.append(frame_of(message))
        self._send_owed()

    def unregister(self, number: int, owners: object) -> None:
        """Ask for it, and wait for nothing, as `post`. The owners of the memory are kept until it is answered, which
        the next call hears, or the copier is dead."""
        call = self.open((m.CopierDone,))
        call.owners = owners
        self.post(m.UnregisterMemory(call.rid, number))

    def _send_owed(self) -> None:
        if not self._owed or not self._sending.acquire(blocking=False):
            return
        try:
            while self._owed:
                frame = self._owed[0]
                if self._sock.send(frame, socket.MSG_DONTWAIT) < len(frame):
                    self._ended = True  # the rest would make no sense
                self._owed.popleft()
        except BlockingIOError:
            return
        except (OSError, IndexError):
            self._ended = True
        finally:
            self._sending.release()

    def call(
        self, make: Any, last: tuple[type[Any], ...], fds: Sequence[int] = (), undo: Callable[[Any], None] | None = None
    ) -> Any:
        """The answer. Raises `DisconnectedError`, and what the copier refused it with. `undo`: called with the answer
        if the caller is interrupted before it gets it; it waits for nothing."""
        call = self.open(last)
        try:
            self.send(call, make(call.rid), fds)
            while not call.over:
                self.wait(call, _SLICE_S)
            return call.result()
        except BaseException:
            call.undo = undo
            call.undo_answered()
            raise

    def cancel(self, call: CopierCall) -> None:
        """Ask for the end of a job. Waits for nothing; a finalizer may call this."""
        if not call.over:
            self.post(m.CancelJob(call.rid))

    def wait(self, call: CopierCall, timeout_s: float) -> bool:
        """Until the call is over, or something of it has arrived, at most that long. Whether it is over."""
        if not call.over:
            self._pump(timeout_s)
        return call.over

    # --- reading ------------------------------------------------------------------------------------------------

    def _pump(self, timeout_s: float) -> None:
        """Read what arrives within that time, or wait for the thread that does."""
        if not self._reading.acquire(timeout=timeout_s):
            return
        try:
            self._send_owed()
            if not self._ended:
                self._read(timeout_s)
            if self._ended:
                self._bury(f"the copier at {self.path} has ended")
            else:
                self._check_life()
        finally:
            self._reading.release()

    def _read(self, timeout_s: float) -> None:
        if not self._readable(timeout_s):
            return
        try:
            if not self._incoming.receive(socket.MSG_DONTWAIT):
                self._ended = True
            self._heard_at, self._asked_at = time.monotonic(), None
            for message in self._incoming.messages():
                self._take(message)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            log.warning("the connection to the copier is lost: %s", error)
            self._ended = True
        except BaseException:  # interrupted, perhaps with an answer in hand that nobody would get any more
            self._ended = True
            raise

    def _readable(self, timeout_s: float) -> bool:
        """Whether there is something to read, at most that long."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _take(self, message: Any) -> None:
        with self._lock:
            call = self._calls.get(getattr(message, "rid", 0))
            if call is None:
                return
            if isinstance(message, m.PagesRead):
                call.read = message
            elif isinstance(message, (*call.last, m.CopierRefused)):
                del self._calls[call.rid]
                call.reply = message
                call.undo_answered()

    def _check_life(self) -> None:
        """Ask a quiet copier whether it lives, and end one that does not say so."""
        now = time.monotonic()
        if self._asked_at is None:
            if now - self._heard_at >= QUIET_S:
                self._asked_at = now
                self.post(m.AskAlive(0))
        elif now - self._asked_at >= ANSWER_S and not self._readable(0):  # we may have been the one that was away
            self._bury(f"the copier (pid {self.pid}) did not answer for {now - self._heard_at:.1f} s, and was killed")

    # --- its end ------------------------------------------------------------------------------------------------

    def _bury(self, why: str) -> None:
        """See that the copier is dead, and only then give up what it was asked."""
        if not self._dead:
            self._dead = self._kill()
        if self._dead:
            self._ended = True
            with self._lock:
                calls = [self._calls.pop(rid) for rid in list(self._calls)]
            for call in calls:
                call.lost = why

    def _kill(self) -> bool:
        """Whether it is dead. One that has closed the connection may live on, with a copy under way."""
        assert self._pidfd is not None
        poll = select.poll()
        poll.register(self._pidfd.fileno(), select.POLLIN)
        if poll.poll(0):
            return True
        try:
            signal.pidfd_send_signal(self._pidfd.fileno(), signal.SIGKILL)
        except ProcessLookupError:
            return True
        except OSError as error:
            if not self._warned:
                log.warning(
                    "the copier (pid %d) does not answer, and cannot be killed by this user (%s): what it was asked is "
                    "waited for until it has ended",
                    self.pid,
                    error.strerror,
                )
            self._warned = True
        return bool(poll.poll(0 if self._warned else FENCE_S * 1000))
