"""Which process a worker is: what a server writes into the worker's row, so that the next one can prove its death.

A process id alone proves nothing: it is given again, and means another process in another pid namespace. With its start
and its namespace it names one process for good. A namespace's number may be given again, too, but only after every
process of the former one is dead.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Process(NamedTuple):
    """A process as the system names it. All zero: unknown."""

    pid: int = 0
    start: int = 0  # clock ticks after the machine's
    namespace: int = 0  # of process ids, on one boot of one machine


UNKNOWN = Process()


def process_of(pid: int) -> Process:
    """The living process with this id in our namespace; `UNKNOWN` if it cannot be named. The system has said that the
    id is of our namespace, not the process."""
    start = start_of(pid) if pid > 0 else 0
    return Process(pid, start, our_namespace()) if start and our_namespace() else UNKNOWN


def start_of(pid: int) -> int:
    """When the process with this id began. 0: it cannot be read, as under /proc with hidepid."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may contain anything.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return 0


def our_boot() -> int:
    """A number of this boot of the machine; 0: unknown."""
    with contextlib.suppress(OSError):
        return int.from_bytes(sha256(_BOOT_ID.read_bytes()).digest()[:8], "little") or 1
    return 0


@lru_cache(maxsize=1)
def our_namespace() -> int:
    """0: unknown."""
    with contextlib.suppress(OSError):
        boot = _BOOT_ID.read_bytes()
        found = Path("/proc/self/ns/pid").stat()
        named = boot + f"{found.st_dev}:{found.st_ino}".encode()
        return int.from_bytes(sha256(named).digest()[:8], "little") or 1
    return 0
