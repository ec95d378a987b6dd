"""Short time slices for the loop's thread, and for none of the threads that it starts.

On a machine with more work than cores, a thread that wakes up waits until another's slice ends: 1.4 to 3 ms, and two of
them if it needs the GIL from a lane that was preempted while holding it. Linux (6.12 and later) lets a thread with
shorter slices go first; it gets no more processor time. No privilege is needed.

Lanes keep the usual slices: a lane with short ones is preempted as soon as it has the GIL, and the loop waits for it
(docs/decisions/0010-lanes-are-threads.md has the figures).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading

from lmcache_core.limits import LOOP_SLICE_S

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_RESET_ON_FORK = 1
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime (the slice), deadline, period


def ask_for_short_slices() -> bool:
    """Only for the calling thread. False: this system does not support it, or the thread has a scheduling policy that
    somebody chose, which is kept."""
    number = _SCHED_SETATTR.get(platform.machine())
    policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
    if number is None or policy != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    slice_ns = int(LOOP_SLICE_S * 1e9)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, slice_ns, 0, 0)
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return bool(call(ctypes.c_long(number), ctypes.c_int(0), ctypes.c_char_p(attributes), ctypes.c_uint(0)) == 0)
