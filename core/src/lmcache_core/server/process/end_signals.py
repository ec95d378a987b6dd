"""The signals that end a server's process, from before its first step on."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
AT_ONCE_S = 0.5
STAYS = (signal.SIGUSR1, signal.SIGUSR2)  # whose default would be an end without a drain


class EndSignals:
    """Handles the signals that end this process: all of them drain. A context manager; only in the main thread. What
    this process was started with as ignored stays ignored: SIGHUP under nohup, SIGINT in the background of a shell.

    A start that is interrupted half way would leave its pool and its sockets behind, so a signal that comes before the
    server exists is kept until it does. A second one meanwhile interrupts the start, which may hang; one during the
    drain ends that.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: dict[signal.Signals, Any] = {}
        self._came_s = 0.0
        self._end: Callable[[], None] | None = None
        self._end_now: Callable[[], None] | None = None

    def tell(self, end: Callable[[], None], end_now: Callable[[], None]) -> None:
        """Call `end` when a signal comes, and at once if one has come; `end_now` when somebody asks again. They run
        inside a signal handler. One that follows at once is no second wish: service managers send SIGHUP after SIGTERM,
        and a terminal's Ctrl-C comes twice through programs that pass it on."""
        self._end, self._end_now = end, end_now
        if self._came:
            end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self._came = self._came, True
        if self._end is None or self._end_now is None:
            if again:
                raise KeyboardInterrupt
        elif not again:
            self._end()
        elif number != signal.SIGHUP and time.monotonic() >= self._came_s + AT_ONCE_S:
            self._end_now()
        if not again:
            self._came_s = time.monotonic()

    def _stay(self, number: int, frame: FrameType | None) -> None:
        log.info("%s does nothing here; SIGTERM ends the server", signal.Signals(number).name)

    def finish(self) -> None:
        """This process is about to end, and nothing is left to do: a signal must not change its exit status."""
        self._before = dict.fromkeys(self._before, signal.SIG_IGN)

    def __enter__(self) -> Self:
        wanted = {**dict.fromkeys(ENDS, self._note), **dict.fromkeys(STAYS, self._stay)}
        self._before = {
            number: signal.signal(number, handler)
            for number, handler in wanted.items()
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
