"""The other nodes: who they are, as the directory says, and what they have, as they say themselves. Kept up to date
by a few threads, so that a lookup asks nobody what it can know."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

from lmcache_core.errors import CacheError
from lmcache_core.threads import started
from lmcache_peer.admission import Admission
from lmcache_peer.client import Peer
from lmcache_peer.directory import Directory, NodeEntry
from lmcache_peer.limits import DIGEST_PERIOD_S, DIRECTORY_PERIOD_S, PULL_SHARE
from lmcache_peer.messages import VERSION
from lmcache_peer.settings import PeerTierSettings

_PULLS = 4  # at once, of peers that answer
_PROBES = 8  # at once, of those that do not: each keeps its thread for `patience_s`
_PULL_S = 5.0
_STEP_S = 0.1
_NEVER = float("inf")
log = logging.getLogger(__name__)


class Members:
    """`peers` is replaced as a whole, never changed: any thread may read it."""

    def __init__(self, settings: PeerTierSettings, own_name: str, admission: Admission, directory: Directory) -> None:
        self._settings = settings
        self._own_name = own_name
        self._admission = admission
        self._directory = directory
        self.peers: tuple[Peer, ...] = ()
        self.directory_error = ""
        self.refused = 0  # entries that are not asked: without TLS, or of another version of the protocol
        self.former: Counter[str] = Counter()  # figures of those that are gone
        self._ending = threading.Event()
        self._first = threading.Event()  # the directory was asked, and every peer once
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self, deadline: float) -> None:
        """Start, at the first call, and wait a moment until it is known who has what: not beyond the deadline."""
        with self._lock:
            if self._thread is None and not self._ending.is_set():
                self._thread = started(self._run, "peer-members")
        self._first.wait(max(0.0, min(2 * self._settings.patience_s, deadline - time.monotonic())))

    def _run(self) -> None:
        directory_at = 0.0
        with (
            ThreadPoolExecutor(_PULLS, thread_name_prefix="peer-digest") as pulls,
            ThreadPoolExecutor(_PROBES, thread_name_prefix="peer-probe") as probes,
        ):
            while not self._ending.is_set():
                if time.monotonic() >= directory_at:
                    self._look_around()
                    directory_at = time.monotonic() + DIRECTORY_PERIOD_S
                now = time.monotonic()
                futures = []
                for peer in self.peers:
                    # One pull of a peer at a time, so what waits for a thread is as many as there are peers.
                    if peer.pull_at <= now and (peer.breaker.closed or peer.breaker.probe_at <= now):
                        peer.pull_at = _NEVER
                        futures.append((pulls if peer.breaker.closed else probes).submit(self._pull, peer))
                if not self._first.is_set():
                    wait(futures, timeout=2 * self._settings.patience_s)
                    self._first.set()
                self._ending.wait(_STEP_S)

    def _look_around(self) -> None:
        """While the directory is away, the last known nodes are used."""
        try:
            entries = self._directory.entries()
        except (CacheError, OSError, ValueError) as error:
            self.directory_error = str(error)
            return
        except Exception as error:
            log.exception("the directory cannot be read")
            self.directory_error = repr(error)
            return
        self.directory_error = ""
        wanted = {entry: None for entry in entries if self._is_asked(entry)}
        self.refused = sum(entry.node != self._own_name for entry in entries) - len(wanted)
        kept = {peer.entry: peer for peer in self.peers}
        peers = tuple(
            kept.get(entry) or Peer(entry, self._own_name, self._admission, self._settings.patience_s)
            for entry in wanted
        )
        gone = [peer for peer in self.peers if peer.entry not in wanted]
        self.peers = peers
        for peer in gone:
            self.former.update(peer.figures)
            peer.close()

    def _is_asked(self, entry: NodeEntry) -> bool:
        if entry.node == self._own_name or entry.version != VERSION:
            return False
        try:
            return self._settings.may_reach(entry.at)
        except ValueError:
            return False

    def _pull(self, peer: Peer) -> None:
        began, rest_s = time.monotonic(), DIGEST_PERIOD_S
        try:
            if not (self._ending.is_set() or peer.is_self):
                peer.pull(began + _PULL_S)
                rest_s = max(rest_s, PULL_SHARE * (time.monotonic() - began))
        except (OSError, CacheError) as error:  # noted: its breaker is open, and a probe follows
            log.debug("no digest of %s: %s", peer.node, error)
        except Exception as error:
            log.exception("no digest of %s", peer.node)
            peer.breaker.failed(repr(error))
        finally:
            peer.pull_at = began + rest_s

    def close(self) -> None:
        """The threads end by themselves, within the patience for one peer; nobody waits for them."""
        self._ending.set()
        for peer in self.peers:
            peer.close()
        thread = self._thread
        if thread is not None:
            thread.join(self._settings.patience_s)
        self._directory.close()
