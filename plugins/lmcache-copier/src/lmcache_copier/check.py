"""What may keep the copier from an engine's memory, in words, and what `lmcache-core check` looks at for `[copier]`."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.plugins.components import Finding

if TYPE_CHECKING:
    from lmcache_copier.settings import CopierSettings

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE = 19
BY_DESCRIPTOR = "or give the memory as a descriptor (a memfd), which needs no such right"


def yama_scope() -> int:
    """Who may trace whom: 0 all of a user's processes each other; 1 those that were named; 2 with CAP_SYS_PTRACE; 3
    nobody."""
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return 0


def may_trace_all() -> bool:
    """Whether this process has CAP_SYS_PTRACE."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    found = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(found, 16) >> _CAP_SYS_PTRACE & 1)


def why_unreachable(pid: int, uid: int, error: OSError) -> str:
    """Why the copier cannot reach the memory of this engine, with the cure."""
    if not pid:
        return (
            "the copier does not see this process, which runs in another pid namespace: let both containers share one "
            "(shareProcessNamespace or hostPID in Kubernetes, --pid in Docker)"
        )
    if error.errno == errno.EPERM:
        scope = yama_scope()
        if scope and not may_trace_all():
            cure = "set kernel.yama.ptrace_scope to 0 or 1" if scope > 1 else "let this process call prctl"
            return (
                f"the copier may not read the memory of pid {pid}, since kernel.yama.ptrace_scope is {scope}: {cure}, "
                f"give the server CAP_SYS_PTRACE, {BY_DESCRIPTOR}"
            )
        return (
            f"the copier (uid {os.geteuid()}) may not read the memory of pid {pid} (uid {uid}): run both as one user, "
            "in one user namespace, with no more capabilities in the engine than in the server and with an engine that "
            "is dumpable (prctl PR_SET_DUMPABLE; setuid and file capabilities end that), give the server "
            f"CAP_SYS_PTRACE, {BY_DESCRIPTOR}"
        )
    if error.errno == errno.ENOSYS:
        return f"this kernel has no process_vm_readv, or a seccomp profile forbids it: allow it, {BY_DESCRIPTOR}"
    return f"the memory of pid {pid} cannot be copied ({error.strerror or error}): register memory that is there"


def check(settings: CopierSettings) -> Sequence[Finding]:
    """Findings for `[copier]`."""
    subject, scope = "copier", yama_scope()
    others = sorted({*settings.uids} - {os.geteuid()})
    if others and not may_trace_all():
        return [
            Finding(
                False,
                subject,
                f"copier.uids names uid {others[0]}, whose memory this user may not read",
                "give the server CAP_SYS_PTRACE, or have these engines give descriptors",
            )
        ]
    if scope > 1 and not may_trace_all():
        why = f"kernel.yama.ptrace_scope is {scope}: the copier can read no engine's memory by address"
        return [Finding(False, subject, why, f"set it to 0 or 1, give the server CAP_SYS_PTRACE, {BY_DESCRIPTOR}")]
    return [Finding(True, subject, f"the copier may read the memory of this user's engines (ptrace_scope {scope})")]
