"""Where engines find the copier: a socket beside the server's lifeline, and the threads that run their jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import Counter
from pathlib import Path

from lmcache_copier.budget import Budgets
from lmcache_copier.copying import CopyThreads
from lmcache_copier.engine import Engine, EngineJob
from lmcache_copier.limits import (
    ENGINES_MAX,
    JOB_THREADS,
    JOBS_WAITING_MAX,
)
from lmcache_copier.options import CopierOptions
from lmcache_core import Client
from lmcache_core.errors import LimitError
from lmcache_core.pool.backing import Access, grant_access
from lmcache_core.pool.claim import bind_at
from lmcache_core.protocol.address import named_root
from lmcache_core.threads import started
from lmcache_core.trust import Trust

log = logging.getLogger("lmcache_copier")

SOCKET_NAME = "copier"  # in the server's runtime directory
_PAUSE_S = 0.5
_UNFINISHED = "copier~"  # a socket that does not listen yet


class CopierDoor:
    """Listens, and admits engines of the users that may come."""

    def __init__(self, directory: Path, root: Path | None, client: Client, options: CopierOptions) -> None:
        """`directory`: the server's, in `root`. Raises `OSError`."""
        self._client = client
        self._uids = {0, os.geteuid(), *options.uids}
        self._helpers = CopyThreads(options.threads - 1)
        self._jobs: queue.Queue[EngineJob] = queue.Queue(JOBS_WAITING_MAX)
        self._budgets = Budgets()
        self._lock = threading.Lock()
        self._figures: Counter[str] = Counter(engines=0, registrations=0, jobs=0, objects=0, faults=0, refused=0)
        self.path = directory / SOCKET_NAME
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with contextlib.closing(Trust.of_server(named_root(root)).open_directory(directory)) as opened:
            for name in (_UNFINISHED, SOCKET_NAME):  # of one that died: the server starts only one at a time
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=opened.fileno())
            bind_at(self._sock, opened.fileno(), directory / _UNFINISHED)
            unfinished = directory / _UNFINISHED
            grant_access(unfinished, Access.GROUP if options.gids else Access.OWNER, options.gids)
            self._sock.listen(ENGINES_MAX)
            unfinished.rename(self.path)
        for number in range(JOB_THREADS):
            started(self._work, f"job-{number}")

    @property
    def figures(self) -> dict[str, int]:
        """Counts since the start; `engines`: that are connected; and what engines have of the copier's memory now."""
        with self._lock:
            return {**self._figures, **self._budgets.taken}

    def count(self, name: str, amount: int) -> None:
        """Add to a figure."""
        with self._lock:
            self._figures[name] += amount

    def run(self) -> None:
        """Admit engines, for as long as the process lives."""
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:  # no descriptor is left, perhaps for a while
                log.warning("no engine can be admitted: %s", error.strerror)
                time.sleep(_PAUSE_S)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        try:
            engine = Engine(sock, self._client, self._submit, self._helpers, self.count, self._budgets.shares())
        except OSError as error:
            log.warning("an engine could not be admitted: %s", error.strerror)
            sock.close()
            return
        if engine.uid not in self._uids:
            log.warning("uid %d is refused: copier.uids does not name it", engine.uid)
            self.count("refused", 1)
            sock.close()
            return
        if self.figures["engines"] >= ENGINES_MAX:
            log.warning("%d engines are connected already: another one is refused", ENGINES_MAX)
            self.count("refused", 1)
            sock.close()
            return
        self.count("engines", 1)

        def serve() -> None:
            try:
                engine.run()
            finally:
                self.count("engines", -1)

        if started(serve, "engine") is None:
            self.count("engines", -1)
            sock.close()

    def _submit(self, job: EngineJob) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise LimitError(f"{JOBS_WAITING_MAX} jobs wait for the copier already: wait for some") from None

    def _work(self) -> None:
        while True:
            self._jobs.get().run()

    def remove_name(self) -> None:
        """So that the server can remove its directory."""
        with contextlib.suppress(OSError):
            self.path.unlink()
