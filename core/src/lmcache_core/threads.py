"""Threads that the system may refuse: a limit of the user's processes, or of the control group's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

NO_THREAD = "can't start new thread"  # the text of Python's RuntimeError


def started(run: Callable[[], object], name: str) -> threading.Thread | None:
    """A daemon thread that runs this. None if there is none to be had: the log says so, and the caller does without it,
    or tries again later."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("no thread %s: %s", name, error)
        return None
    return thread
