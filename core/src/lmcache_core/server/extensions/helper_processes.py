"""The helpers of a server: started with it, and again with a growing pause, and stopped with it, however it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core import limits
from lmcache_core.errors import SettingsError
from lmcache_core.server.helper import HelperContext, HelperProcess

if TYPE_CHECKING:
    from lmcache_core.settings.model import HelperSettings

log = logging.getLogger(__name__)

# The variables of the server's environment that a helper gets: paths and the like, nothing that may be a secret.
PASSED_ON = frozenset(
    {
        "HOME", "HOSTNAME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH",
        "PYTHONHOME", "PYTHONPATH", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
        "XDG_RUNTIME_DIR", "LMCACHE_CORE_PLUGINS", "LMCACHE_CORE_SERVER_UID",
    }
)  # fmt: skip

# Runs in the child before the command replaces it, so that the helper ends with the server in every case (1:
# PR_SET_PDEATHSIG, which survives exec). The server may have ended before that call.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]): sys.exit(1)
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error: sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class Helpers:
    """All helpers. Started and stopped by the server's own threads; `status` is for any thread."""

    def __init__(self, processes: Mapping[str, HelperProcess], context: HelperContext) -> None:
        if len(processes) > limits.HELPERS_MAX:
            raise SettingsError(f"{len(processes)} helpers are configured, and the limit is {limits.HELPERS_MAX}")
        self._watched = [_Watched(name, process, context) for name, process in processes.items()]

    def start(self) -> None:
        """Start them; the server answers from now on."""
        for each in self._watched:
            each.start()

    def close(self) -> None:
        """Stop all of them at the same time; any that has not ended within `HELPER_STOP_S` is killed."""
        for each in self._watched:
            each.ask_to_end()
        until = time.monotonic() + limits.HELPER_STOP_S
        for each in self._watched:
            each.wait_ended(max(0.0, until - time.monotonic()))

    def status(self) -> dict[str, Any]:
        """For `status`."""
        return {each.name: each.status() for each in self._watched}


class _Watched:
    """One helper, and the thread that waits for its end: the process ends with the thread that started it."""

    def __init__(self, name: str, process: HelperProcess, context: HelperContext) -> None:
        self.name = name
        self._command = process.command
        self._environment = environment(context, process.environment)
        self._ending = threading.Event()
        self._lock = threading.Lock()  # guards `_process`: no signal is sent once it was waited for
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._since_s = 0.0
        self._last_end = ""
        self._thread = threading.Thread(target=self._run, name=f"helper-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_end(self) -> None:
        self._ending.set()
        self._signal(signal.SIGTERM)

    def wait_ended(self, timeout_s: float) -> None:
        if self._thread.ident is None:  # never started
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("helper %s did not end within %g s, and is killed", self.name, limits.HELPER_STOP_S)
            self._signal(signal.SIGKILL)
            self._thread.join(1.0)

    def status(self) -> dict[str, Any]:
        process = self._process
        return {
            "pid": None if process is None else process.pid,
            "restarts": max(0, self._started - 1),
            "running_s": None if process is None else round(time.monotonic() - self._since_s, 3),
            "last_end": self._last_end,
        }

    def _run(self) -> None:
        pause_s = 0.0
        while not self._ending.is_set():
            self._last_end = self._run_once() or self._last_end
            if self._ending.is_set():
                break
            if time.monotonic() - self._since_s >= limits.HELPER_STEADY_S:
                pause_s = 0.0
            again = f"in {pause_s:g} s" if pause_s else "at once"
            log.warning("helper %s ended (%s), and is started again %s", self.name, self._last_end, again)
            self._ending.wait(pause_s)
            pause_s = min(max(2 * pause_s, limits.HELPER_PAUSE_S), limits.HELPER_PAUSE_S_MAX)

    def _run_once(self) -> str:
        """Run it once; returns how it ended, in words."""
        self._since_s = time.monotonic()
        self._started += 1
        guarded = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *self._command]
        try:
            with self._lock:
                if self._ending.is_set():
                    return ""
                # Its output goes to the server's log: the server's own standard output is for its caller.
                self._process = subprocess.Popen(
                    guarded, env=self._environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
                )
        except OSError as error:
            return f"it could not be started: {error.strerror}"
        process = self._process
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the pid stays reserved until we hold the lock
        with self._lock:
            status = process.wait()
            self._process = None
        return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"

    def _signal(self, number: signal.Signals) -> None:
        """Signal the helper and what it has started: it leads its own session."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)


def environment(context: HelperContext, more: Mapping[str, str]) -> dict[str, str]:
    """A helper's environment: where the server is, and those of the server's own variables that are not secret."""
    passed = {name: value for name, value in os.environ.items() if name in PASSED_ON}
    ours = {
        "LMCACHE_CORE_NAME": context.server,
        "LMCACHE_CORE_RUNTIME_DIR": str(context.runtime_dir),
        "LMCACHE_CORE_ADDRESS": context.address,
    }
    return {**passed, **ours, **more}


def configured(helpers: Mapping[str, HelperSettings]) -> dict[str, HelperProcess]:
    """Those that the settings define by a command."""
    return {
        name: HelperProcess(
            tuple(each.command), {name: os.environ[name] for name in each.environment if name in os.environ}
        )
        for name, each in helpers.items()
    }


def check_helper_names(names: Sequence[str], more: Sequence[str]) -> None:
    """Raise `SettingsError` if a command and a plugin's helper have the same name."""
    both = sorted({*names} & {*more})
    if both:
        raise SettingsError(f"{both[0]!r} is both a plugin's helper and one of [helpers]: rename [helpers.{both[0]}]")
