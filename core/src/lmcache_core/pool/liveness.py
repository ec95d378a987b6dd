"""Is that worker dead? One place that answers, in three words, from what nobody but the worker can hold back.

End of file and silence are only reasons to ask. A process that the system names is dead or alive, as long as the name
means it; so is who holds a life token. A life lock shows less: free means that its worker is gone, and held means
nothing, because everybody who maps the pool can hold it.
"""

from __future__ import annotations

import os
import select
from enum import Enum

from lmcache_core.pool.lifelock import lock_is_free
from lmcache_core.pool.processes import Process, our_namespace, start_of

__all__ = ["Life", "by_lock", "by_pidfd", "by_process", "by_token"]


class Life(Enum):
    """Of a worker, as far as it touches the pool's slots."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"

    def either(self, other: Life) -> Life:
        """What two kinds of evidence say together: any proof of death is enough."""
        if Life.DEAD in (self, other):
            return Life.DEAD
        return other if self is Life.UNKNOWN else self


def by_pidfd(pidfd: int) -> Life:
    """By a descriptor of its process; -1: there is none."""
    return Life.UNKNOWN if pidfd < 0 else _by_descriptor(pidfd, select.POLLIN)


def by_token(ours: int) -> Life:
    """By our end of its life token, which reports an error once nobody has the other; -1: it has none."""
    return Life.UNKNOWN if ours < 0 else _by_descriptor(ours, 0)


def by_lock(fd: int, offset: int) -> Life:
    """By its life lock, at `offset` of the segment `fd`. It must have taken it before."""
    return Life.DEAD if lock_is_free(fd, offset) else Life.UNKNOWN


def by_process(process: Process) -> Life:
    """By the name of its process."""
    if process.pid <= 0 or not process.start or process.namespace != our_namespace() or not process.namespace:
        return Life.UNKNOWN
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return Life.DEAD
    except (OSError, OverflowError):  # no descriptor is left, or the id is no id
        return Life.UNKNOWN
    try:
        start = start_of(process.pid)
        if start not in (0, process.start):
            return Life.DEAD  # the id is another process's by now
        life = by_pidfd(pidfd)
        return life if start or life is Life.DEAD else Life.UNKNOWN
    finally:
        os.close(pidfd)


def _by_descriptor(fd: int, event: int) -> Life:
    poll = select.poll()  # select.select() accepts no descriptor above 1023
    poll.register(fd, event)
    return Life.DEAD if poll.poll(0) else Life.ALIVE
