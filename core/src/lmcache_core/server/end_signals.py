"""SIGTERM and SIGINT for a server's process, from before its first step on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class EndSignals:
    """Handles the signals that end this process. A context manager; only in the main thread.

    A start that is interrupted half way would leave its pool and its sockets behind, so a signal that comes before the
    server exists is kept until it does. A second one meanwhile interrupts the start, which may hang.
    """

    def __init__(self) -> None:
        self._came = False
        self._end: Callable[[], None] | None = None

    def tell(self, end: Callable[[], None]) -> None:
        """Call `end` whenever a signal comes, and at once if one has come. It runs inside a signal handler."""
        self._end = end
        if self._came:
            end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self._came = self._came, True
        if self._end is not None:
            self._end()
        elif again:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
