"""The thread that does everything quick: descriptors, timers, and calls from other threads."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from lmcache_core.clock import Clock
from lmcache_core.guard import guarded
from lmcache_core.limits import FRAME_BYTES_MAX, HOUSEKEEPING_S
from lmcache_core.pool.atfork import forget_in_child
from lmcache_core.server.process.time_slices import ask_for_short_slices

log = logging.getLogger(__name__)
_FAULT = "a fault on the loop; the server continues"
Handler = Callable[[int], None]  # called with the epoll mask


class Alarm:
    """When the loop must do something; others may bring it forward. Monotonic seconds."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def hurry(self) -> None:
        """Set it to the next turn."""
        self.at_s = 0.0


class Loop:
    """An epoll loop. Only `call` and `stop` may be used from other threads.

    A turn: wait, set the clock, handle each ready descriptor once (so each peer's next message is served before
    anyone's backlog), then `tick`, which returns when it wants to run next (monotonic seconds), or None.

    Third-party policies and hooks run in these calls: what they raise is logged and counted in `faults`, and the loop
    continues.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._removed: set[int] = set()  # in this turn
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.RLock()  # guards the descriptor's life; a signal handler may enter it again
        self.stopping = False
        self.faults = 0
        self.on_fault: Callable[[BaseException], None] = lambda error: None  # whoever owns state puts it right
        self.longest_turn_s = 0.0  # how long everybody else's messages waited, for whatever reason
        self.buffer = memoryview(bytearray(FRAME_BYTES_MAX + 1))  # for receivers, which use it one at a time
        self.add(self._wake_fd, select.EPOLLIN, self._woken)
        forget_in_child(self)

    def after_fork_in_child(self) -> None:
        """Nothing runs in the child: the thread does not exist there."""
        self._wake_lock = threading.RLock()  # a thread that does not exist here may have held it
        if self._wake_fd >= 0:
            self.close()

    def add(self, fd: int, mask: int, handler: Handler) -> None:
        """Watch a descriptor."""
        self._epoll.register(fd, mask)
        self._handlers[fd] = handler

    def modify(self, fd: int, mask: int) -> None:
        """Change the watched events."""
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor; call this before closing it."""
        del self._handlers[fd]
        self._removed.add(fd)
        self._epoll.unregister(fd)

    def call(self, function: Callable[[], None]) -> None:
        """Run the function on the loop's thread soon. Safe from any thread, also after the loop has ended."""
        self._calls.append(function)
        self.wake()

    def wake(self) -> None:
        """Begin the next turn now. Safe from any thread."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End `run` after the current turn. Safe from any thread and from signal handlers."""
        self.stopping = True
        self.wake()

    def run(self, tick: Callable[[], float | None]) -> None:
        """Serve until `stop`; `tick` is called once a turn."""
        ask_for_short_slices()
        poll, handlers, removed, clock = self._epoll.poll, self._handlers, self._removed, self.clock
        clock.turn()
        self._run_calls()  # earlier calls run before the first message
        timeout = 0.0
        while not self.stopping:
            ready = poll(timeout)
            clock.turn()
            if removed:
                removed.clear()
            for fd, mask in ready:
                handler = handlers.get(fd)
                # An earlier handler of this turn may have removed it, and its number may already belong to another one:
                # a process whose descriptor was just registered has not died.
                if handler is not None and fd not in removed:
                    try:
                        handler(mask)
                    except KeyboardInterrupt:
                        raise
                    except BaseException as error:  # noqa: BLE001 - as `guarded`, which would cost each message 0.2 µs
                        self._failed(error)
            try:
                next_tick = tick()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - as `guarded`, in every turn
                self._failed(error)
                next_tick = clock.now + HOUSEKEEPING_S  # what fails at once would fail again at once
            # From this moment, not from the turn's beginning: the wait would be too long by the length of the turn.
            clock.rests_since_s = ended_at_s = clock.read()
            if ended_at_s - clock.now > self.longest_turn_s:
                self.longest_turn_s = ended_at_s - clock.now
            timeout = -1.0 if next_tick is None else max(0.0, next_tick - ended_at_s)

    def _failed(self, error: BaseException) -> None:
        """Something raised, perhaps a plugin in Rust, whose panic is not an `Exception`: serving continues."""
        log.error(_FAULT, exc_info=error)
        self.faults += 1
        guarded(_not_put_right, self.on_fault, error)

    @property
    def ended(self) -> bool:
        """Whether calls from now on will not run any more."""
        return self._wake_fd < 0

    def close(self) -> None:
        """Release the loop's own descriptors; registered ones belong to their owners."""
        with self._wake_lock:  # a lane that outlives the loop may be waking it
            fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)
        self._epoll.close()

    def _woken(self, mask: int) -> None:
        os.eventfd_read(self._wake_fd)
        self._run_calls()

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            guarded(self._failed, self._calls.popleft())


def _not_put_right(error: BaseException) -> None:
    log.error("the tables could not be put right after that fault: restart the server", exc_info=error)
