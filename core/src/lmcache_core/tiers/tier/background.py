"""Lower priority for background threads: for the processor, and for the disk."""

from __future__ import annotations

import ctypes
import os
import platform

from lmcache_core.limits import LANE_NICE

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_THIS_THREAD = (1, 0)  # IOPRIO_WHO_PROCESS, and the calling thread
_IDLE = 3 << 13  # this class is served when nobody else has asked for a while


def step_behind(*, by: int = LANE_NICE, idle_disk: bool = False) -> None:
    """Lowers the priority of the calling thread, for good: by 10 it gets a tenth of another's share of the processor
    when both could run. With `idle_disk`, also the idle class of I/O, if this system has one; disk schedulers without
    classes ignore it."""
    os.nice(by)  # on Linux, of this thread only
    number = _IOPRIO_SET.get(platform.machine())
    if idle_disk and number is not None:
        ctypes.CDLL(None).syscall(ctypes.c_long(number), *map(ctypes.c_int, (*_THIS_THREAD, _IDLE)))
