"""The names at which others find a server: its runtime directory, the sockets there, and its claims. A cleaner of /tmp
or an operator may remove them while it runs; then they are made again, the claims first: a socket is made only by a
server that has all its claims. If another server has taken the name meanwhile, this one stays without it, serves whom
it has, and says so; it looks again, and has its names back once the other one has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from lmcache_core.errors import CacheError, PoolBusyError
from lmcache_core.limits import NAMES_LOOK_S
from lmcache_core.observe.lines import named
from lmcache_core.pool.claim import Claim

log = logging.getLogger(__name__)


class NamedSocket(Protocol):
    """What listens at a path."""

    @property
    def path(self) -> Path: ...
    @property
    def stands(self) -> bool:
        """Whether the path still names our socket. For any thread."""

    def make_again(self) -> Callable[[], None]:
        """Make the socket again, in a directory that the caller has checked; what must then be done on the loop. For
        any thread. Raises `PoolBusyError` if another server listens there, `OSError` and `CacheError`."""


class Names:
    """Looks at them once in `NAMES_LOOK_S`, on a thread of its own: a directory may be on a mount that hangs."""

    def __init__(
        self,
        sockets: Sequence[NamedSocket],
        claims: Callable[[], tuple[Claim, ...]],
        make_directory: Callable[[], object],
        on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        """`sockets`: all that listen at paths. `make_directory` makes the directory, or raises if somebody else has
        made it. `on_loop` runs a call on the loop."""
        self._sockets = sockets
        self._claims = claims
        self._make_directory = make_directory
        self._on_loop = on_loop
        self._ending = threading.Event()
        self.trouble = ""  # why they cannot be made again, as last logged; for any thread
        self._making = False  # the loop has yet to take new sockets into use
        self._thread = threading.Thread(target=self._run, name="names", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Make nothing again any more. A thread that hangs on a mount is left behind."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(NAMES_LOOK_S)

    def _run(self) -> None:
        while not self._ending.wait(NAMES_LOOK_S):
            self.look()

    def look(self) -> None:
        """Make again what is missing, once."""
        if self._making:
            return
        # The sockets first: if the claims stand afterwards, we were still the owner when a socket was lost.
        lost: list[NamedSocket] = [each for each in self._sockets if not each.stands]
        gone = [each for each in self._claims() if not each.closed and not each.stands]
        if not gone and not lost:
            self.trouble = ""
            return
        paths = [*(each.path for each in lost), *(each.path for each in gone)]
        made: list[Callable[[], None]] = []
        try:
            self._make_directory()
            for claim in gone:
                claim.renew()
            for each in lost:
                made.append(each.make_again())
        except (CacheError, OSError) as error:
            if str(error) != self.trouble:
                self.trouble = str(error)
                cure = "; stop one of the two servers" if isinstance(error, PoolBusyError) else ""
                log.warning(
                    "%s was removed, and cannot be made again, so no new client finds this server: %s%s",
                    paths[len(made)],
                    error,
                    cure,
                    extra=named("name_not_made", why=str(error)),
                )
            return
        finally:
            if made:
                self._making = True
                self._on_loop(lambda: self._use(made))
        self.trouble = ""
        log.warning("%s was removed or replaced: it is made again", paths[0], extra=named("name_made_again"))

    def _use(self, made: Sequence[Callable[[], None]]) -> None:
        """On the loop."""
        for each in made:
            each()
        self._making = False
