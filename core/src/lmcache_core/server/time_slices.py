"""Short time slices for the loop's thread, and with it for the threads that it starts: the lanes.

On a machine with more to do than cores, a thread that wakes up waits until another's slice is over: 1.4 to 3 ms, and
two of them where it needs the GIL from a lane that was put aside while it held it. Linux (6.12 and later) lets who
asks for shorter slices go first; it gets no more of the processor. No privilege is needed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

from lmcache_core.limits import LOOP_SLICE_S

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime (the slice), deadline, period


def ask_for_short_slices() -> bool:
    """For the calling thread and those that it starts from now on. False: this system does not give them, or the
    thread has a scheduling policy of somebody's choice, which is left alone."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, int(LOOP_SLICE_S * 1e9), 0, 0)
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return bool(call(ctypes.c_long(number), ctypes.c_int(0), ctypes.c_char_p(attributes), ctypes.c_uint(0)) == 0)
