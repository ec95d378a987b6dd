"""The time that a plugin's import or hook may take, and the end of one that would take the process with it.

In the main thread, a signal ends what takes too long. What no signal can end (C code, other threads) is at least named
on standard error, so that whoever waits knows what to uninstall.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from lmcache_core.limits import PLUGIN_GRACE_S, PLUGIN_S
from lmcache_core.plugins.discovery import ALLOW_LIST


class TooLongError(BaseException):
    """Raised inside the plugin. Not an `Exception`, which plugins catch."""


class EndedProcessError(BaseException):
    """Raised where a plugin calls `os._exit`."""


@contextlib.contextmanager
def patience(plugin: str, doing: str, limit_s: float = PLUGIN_S) -> Iterator[None]:
    """Limit what `plugin` does to `limit_s`. Inside another limit it changes nothing."""
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    cure = f"uninstall it, or set {ALLOW_LIST} to the distributions you want"

    def too_long(number: int, frame: FrameType | None) -> NoReturn:
        raise TooLongError(f"{doing} took more than {limit_s:g} s, the limit")

    def name_it() -> None:
        sys.stderr.write(f"lmcache-core: plugin {plugin}: {doing} has not ended for {named_s:g} s: {cure}\n")

    def no_exit(status: int) -> Any:
        if os.getpid() != process:
            leave(status)  # a child that the plugin has forked
        raise EndedProcessError(f"{doing} called os._exit({status})")

    process, leave, named_s = os.getpid(), os._exit, limit_s + PLUGIN_GRACE_S
    timer = threading.Timer(named_s, name_it)
    timer.daemon = True
    timer.start()
    before = signal.signal(signal.SIGALRM, too_long)
    os._exit = no_exit
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)  # again each second: a plugin may have caught the first one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os._exit = leave
        timer.cancel()
