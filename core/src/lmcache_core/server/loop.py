"""The one thread that does everything quick: descriptors, timers, and calls handed over by other threads."""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable

from lmcache_core.limits import FRAME_BYTES_MAX, HOUSEKEEPING_S
from lmcache_core.server.time_slices import ask_for_short_slices

log = logging.getLogger(__name__)
_FAULT = "a fault on the loop; the server goes on"
Handler = Callable[[int], None]  # called with the epoll mask


class Loop:
    """An epoll loop. Only `call` and `stop` may be used from other threads.

    `tick(now)` runs once a turn and returns when it wants to run next (monotonic seconds), or None. Each ready
    descriptor gets one call a turn, so no peer's backlog is served before everybody's next message.

    Policies and hooks of others run in these calls: what one of them raises is logged and counted in `faults`, and
    the loop goes on.
    """

    def __init__(self, tick: Callable[[float], float | None]) -> None:
        self._tick = tick
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self.faults = 0
        self.now = time.monotonic()  # of this turn
        self.buffer = memoryview(bytearray(FRAME_BYTES_MAX + 1))  # for whoever receives: one at a time does
        self.add(self._wake_fd, select.EPOLLIN, self._woken)

    def add(self, fd: int, mask: int, handler: Handler) -> None:
        """Watch a descriptor."""
        self._epoll.register(fd, mask)
        self._handlers[fd] = handler

    def modify(self, fd: int, mask: int) -> None:
        """Change what is watched for."""
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        """Stop watching; before the descriptor is closed."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def call(self, function: Callable[[], None]) -> None:
        """Run the function on the loop's thread soon. Safe from any thread, also after the loop has ended."""
        self._calls.append(function)
        self.wake()

    def wake(self) -> None:
        """Begin the next turn now. Safe from any thread."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """End `run` after the current turn. Safe from any thread and from signal handlers."""
        self._stopping = True
        self.wake()

    def run(self) -> None:
        """Serve until `stop`."""
        ask_for_short_slices()
        poll, handlers, clock = self._epoll.poll, self._handlers, time.monotonic
        self._run_calls()  # what was asked for before the first turn goes before anybody's message
        while not self._stopping:
            self.now = now = clock()
            try:
                next_tick = self._tick(now)
            except Exception:
                log.exception(_FAULT)
                self.faults += 1
                next_tick = now + HOUSEKEEPING_S  # what fails at once would fail again at once
            timeout = -1.0 if next_tick is None else max(0.0, next_tick - now)
            ready = poll(timeout)
            self.now = clock()
            for fd, mask in ready:
                handler = handlers.get(fd)
                if handler is not None:  # an earlier handler of this turn may have removed it
                    try:
                        handler(mask)
                    except Exception:
                        log.exception(_FAULT)
                        self.faults += 1

    @property
    def ended(self) -> bool:
        """Nothing that is called from now on will run."""
        return self._wake_fd < 0

    def close(self) -> None:
        """Release the loop's own descriptors; what was registered stays its owner's."""
        fd, self._wake_fd = self._wake_fd, -1
        os.close(fd)
        self._epoll.close()

    def _woken(self, mask: int) -> None:
        os.eventfd_read(self._wake_fd)
        self._run_calls()

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            try:
                self._calls.popleft()()
            except Exception:
                log.exception(_FAULT)
                self.faults += 1
