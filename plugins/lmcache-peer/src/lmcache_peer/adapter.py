"""The peer tier: loads objects from the pools of other nodes. It never stores: what is there is theirs."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from lmcache_core.errors import CacheError, TierError, printable
from lmcache_core.limits import PLUGIN_STATUS_BYTES_MAX
from lmcache_core.plugins.components import Finding
from lmcache_core.tiers.blocking import BatchAdapter
from lmcache_core.tiers.contract import AdapterContext, Capabilities, LoadItem, Outcome, Result, StoreItem
from lmcache_core.tiers.object.format import TIER_KEY_BYTES
from lmcache_peer.admission import Admission
from lmcache_peer.client import SHOWN, Peer
from lmcache_peer.directory import directory_of
from lmcache_peer.holders import holders_of
from lmcache_peer.limits import ASKED_MAX, ERROR_SHOWN_CHARS, FOUND_MAX, LOCK_S, NAMES_MAX, PEERS_SHOWN_MAX
from lmcache_peer.members import Members
from lmcache_peer.settings import PeerTierSettings

_MISS = Outcome(Result.MISS)
_PARTS_BYTES = 4  # of the number of rows
_MARGIN_S = 0.05  # before a deadline: what comes back after it counts against the tier, not against the peer


class PeerAdapter(BatchAdapter):
    """A peer that fails costs a miss, and is not asked until it answers a probe: the tier as a whole does not fail."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        stores=False, delete=False, scan=False, shared=True, batch_keys_max=NAMES_MAX
    )

    def __init__(self, settings: PeerTierSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._admission = Admission(settings)
        self._directory = directory_of(settings, context.tier)
        self.members = Members(settings, settings.node_name(context.server), self._admission, self._directory)
        self._holders = holders_of(settings, context.tier)
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, tuple[Peer, float]] = OrderedDict()  # locked there, until then
        super().__init__(context, self.members, self._holders)

    # --- the contract ---------------------------------------------------------------------------------------
    def store(self, items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        """Refused."""
        self.check_open()
        error = TierError(f"tier {self._tier!r} stores nothing: what it has is other nodes'", retryable=False)
        return [Outcome.of(error)] * len(items)

    def exists(self, keys: Sequence[bytes], deadline: float) -> Sequence[bool]:
        """Names that are in no digest are not there: nobody is asked. Of the others, whoever seems to have them is
        asked, and keeps what it has for the load that follows."""
        self.check_open()
        until = deadline - _MARGIN_S
        self.members.begin(until)
        there: set[bytes] = set()

        def ask(peer: Peer, names: list[bytes]) -> set[bytes]:
            found = peer.lookup_and_lock(names, until)
            return {name for name, has in zip(names, found, strict=True) if has}

        def found(peer: Peer, names: set[bytes]) -> None:
            there.update(names)
            self._note(peer, names)

        self._ask_around(list(dict.fromkeys(keys)), until, ask, found)
        return [key in there for key in keys]

    def load(self, items: Sequence[LoadItem], deadline: float) -> Sequence[Outcome]:
        self.check_open()
        until = deadline - _MARGIN_S
        self.members.begin(until)
        outcomes: dict[int, Outcome] = {}
        # A key that is named twice has two pieces of memory: each is an item of its own.
        by_name: defaultdict[bytes, list[int]] = defaultdict(list)
        for at, item in enumerate(items):
            by_name[item.key].append(at)
        first = {name: places[0] for name, places in by_name.items()}

        def ask(peer: Peer, names: list[bytes]) -> set[bytes]:
            sizes = peer.load([items[first[name]] for name in names], until)
            loaded = {name: size for name, size in zip(names, sizes, strict=True) if size}
            outcomes.update({first[name]: Outcome(Result.DONE, size) for name, size in loaded.items()})
            return set(loaded)

        self._ask_around(list(first), until, ask, lambda peer, names: None, self._take_found(first))
        for places in by_name.values():
            for at in places[1:]:
                outcomes[at] = _copied(items[places[0]], items[at], outcomes.get(places[0], _MISS))
        return [outcomes.get(at, _MISS) for at in range(len(items))]

    def delete(self, keys: Sequence[bytes], deadline: float) -> Sequence[Outcome]:
        """Refused, as `store`."""
        self.check_open()
        error = TierError(f"tier {self._tier!r} deletes nothing: what it has is other nodes'", retryable=False)
        return [Outcome.of(error)] * len(keys)

    def medium(self) -> str:
        where = ", ".join(self._settings.nodes) if self._settings.nodes else "its directory"
        return f"the nodes of cluster {self._settings.cluster!r} in {where}"

    def status(self) -> dict[str, Any]:
        members = self.members
        peers = [peer for peer in members.peers if not peer.is_self]
        shown = sorted(peers, key=lambda peer: (peer.usable, -peer.figures["loaded_bytes"]))[:PEERS_SHOWN_MAX]
        whole: dict[str, Any] = {
            "nodes": len(peers),
            "usable_nodes": sum(peer.usable for peer in peers),
            "refused_nodes": members.refused,
            "directory_away": int(bool(members.directory_error)),
            "directory_error": printable(members.directory_error[:ERROR_SHOWN_CHARS]),
            **{what: members.former[what] + sum(peer.figures[what] for peer in peers) for what in SHOWN},
            "parts": {},
        }
        left = PLUGIN_STATUS_BYTES_MAX - len(msgspec.msgpack.encode(whole)) - _PARTS_BYTES
        for peer in shown:  # names and errors are others' and may be long
            row = {peer.node: peer.status()}
            left -= len(msgspec.msgpack.encode(row))
            if left < 0:
                break
            whole["parts"] |= row
        return whole

    def places(self, keys: Sequence[bytes]) -> Sequence[str]:
        with self._lock:
            found = [self._found.get(key) for key in keys]
        return ["" if each is None else f"on node {each[0].node}" for each in found]

    def check(self, deadline: float) -> Iterator[Finding]:
        self.members.begin(deadline - _MARGIN_S)
        if self.members.directory_error:
            raise TierError(self.members.directory_error, cure="see that the directory runs where the settings say")
        peers = [peer for peer in self.members.peers if not peer.is_self]
        if not peers:
            yield Finding(True, "", "no other node is there yet; nothing is stored here")
        cure = "see that its server runs with [peer], and that secret_file or the certificates are the cluster's"
        for peer in peers:
            node = f"node {peer.node} at {peer.entry.endpoint}"
            if peer.usable:
                yield Finding(True, "", f"{node} has {peer.digest.objects:,} objects")
            else:
                yield Finding(False, "", f"{node}: {peer.breaker.last_error}", cure)

    # --- asking around --------------------------------------------------------------------------------------
    def _ask_around(
        self,
        names: list[bytes],
        until: float,
        ask: Callable[[Peer, list[bytes]], set[bytes]],
        found: Callable[[Peer, set[bytes]], None],
        at_first: dict[bytes, Peer] | None = None,
    ) -> None:
        """Ask peers for names, each name at the first that seems to have it, and what that one does not give at the
        next. `ask` returns what was given. `at_first`: where names are known to be."""
        left = self._candidates(names, at_first or {}, until)
        for _ in range(ASKED_MAX):
            of_peer: defaultdict[Peer, list[bytes]] = defaultdict(list)
            for name, candidates in left.items():
                if (peer := next((each for each in candidates if each.usable), None)) is not None:
                    candidates.remove(peer)
                    of_peer[peer].append(name)
            if not of_peer or time.monotonic() >= until:
                return
            calls = [
                partial(_asked, ask, peer, part[first : first + NAMES_MAX])
                for peer, part in of_peer.items()
                for first in range(0, len(part), NAMES_MAX)
            ]
            answers = self._context.parallel(calls) if len(calls) > 1 else [calls[0]()]
            for peer, given in answers:
                found(peer, given)
                for name in given:
                    left.pop(name, None)

    def _candidates(self, names: list[bytes], at_first: dict[bytes, Peer], until: float) -> dict[bytes, list[Peer]]:
        """Who seems to have each, in an order of its own for each call, so that the load spreads. Where that cannot be
        known, those that a lookup has found."""
        sound = [name for name in names if len(name) == TIER_KEY_BYTES]  # others are no names of objects
        usable = [each for each in self.members.peers if each.usable]
        try:
            holders = self._holders.of(sound, usable, until) if usable and sound else [[]] * len(sound)
        except TierError as error:
            self.members.directory_error = str(error)
            holders = [[]] * len(sound)
        found = {}
        for name, peers in zip(sound, holders, strict=True):
            peers = list(peers)
            if len(peers) > 1:
                random.shuffle(peers)
            if (first := at_first.get(name)) is not None and first.usable:
                peers = [first, *(each for each in peers if each is not first)]
            found[name] = peers
        return found

    def _note(self, peer: Peer, names: set[bytes]) -> None:
        until = time.monotonic() + LOCK_S
        with self._lock:
            for name in names:
                self._found[name] = (peer, until)
                self._found.move_to_end(name)
            while len(self._found) > FOUND_MAX:
                self._found.popitem(last=False)

    def _take_found(self, names: dict[bytes, int]) -> dict[bytes, Peer]:
        """Where these were locked, as far as they still are."""
        now = time.monotonic()
        with self._lock:
            known = {name: found for name in names if (found := self._found.pop(name, None)) is not None}
        return {name: peer for name, (peer, until) in known.items() if until > now}


def _asked(ask: Callable[[Peer, list[bytes]], set[bytes]], peer: Peer, names: list[bytes]) -> tuple[Peer, set[bytes]]:
    try:
        return peer, ask(peer, names)
    except (OSError, CacheError):  # the peer has noted it
        return peer, set()


def _copied(source: LoadItem, target: LoadItem, outcome: Outcome) -> Outcome:
    """The same object into other buffers."""
    if outcome.result is Result.DONE:
        for theirs, ours in zip(source.buffers, target.buffers, strict=True):
            ours[:] = theirs
    return outcome
