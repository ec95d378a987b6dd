"""Sends batches to the owners of their keys: one pipelined exchange for each server, with redirections and
failovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from redis.connection import ConnectionPool

from lmcache_core.tiers.contract import AdapterContext
from lmcache_redis.settings import RedisSettings
from lmcache_redis.transport.commands import ASKING, Broken, Command, Refusal, Reply
from lmcache_redis.transport.connections import Address, address_of, make_pool
from lmcache_redis.transport.exchange import Exchanger
from lmcache_redis.transport.topology import BySentinel, BySlots, OneServer, Topology

_POOLS_MAX = 1024  # of servers, more than a cluster has: nodes come and go, and a redirection may name anything
_PAUSE_S = 0.1  # between polls of a cluster that is choosing a new primary
_REDIRECTED = frozenset({"MOVED", "ASK"})
_PASSING = frozenset({"CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN"})
_NOT_BEGUN = Broken("not started by its deadline", late=True)
_UNOWNED = Broken("no server is known to own the key")

Route = tuple[Address, bool]  # where to, and whether to send ASKING first


class Client:
    """One Redis, of whatever mode. Thread-safe; connects when it is first used."""

    def __init__(self, settings: RedisSettings, context: AdapterContext) -> None:
        self._settings = settings
        self._context = context
        self._exchanger = Exchanger(context.tier, settings.transport)
        self.pools: dict[Address, ConnectionPool] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.topology: Topology
        if settings.mode == "cluster":
            self.topology = BySlots(settings, self.ask_one)
        elif settings.mode == "sentinel":
            self.topology = BySentinel(settings)
        else:
            self.topology = OneServer(settings)

    @property
    def fell_back(self) -> bool:
        """Payloads go through redis-py's own calls because `auto` fell back."""
        return self._exchanger.fell_back

    def ask(self, commands: Sequence[Command], deadline: float, wait_s: float = 0.0) -> list[Reply]:
        """One reply for each command, from the owner of its key.

        Commands that were redirected, or whose server is gone or changing its slots, are sent once more at once, after
        a refresh of the topology. If another server may take over, they are repeated until `wait_s` have passed.
        """
        replies: list[Reply] = [_NOT_BEGUN] * len(commands)
        routes: dict[int, Route] = {}
        todo = list(range(len(commands)))
        give_up = min(deadline, time.monotonic() + wait_s)
        if not self.topology.version and (broken := self.topology.refresh(deadline, 0)) is not None:
            return [broken] * len(commands)
        for attempt in range(1_000_000):
            seen = self.topology.version
            self._round(commands, todo, replies, routes, deadline)
            todo = [position for position in todo if _unsettled(replies[position])]
            if not todo or time.monotonic() >= deadline:
                break
            if attempt:
                if not self.topology.fails_over or time.monotonic() + _PAUSE_S >= give_up:
                    break
                time.sleep(_PAUSE_S)
            routes = self._redirections(todo, replies)
            hint = next((address for address, _ in routes.values()), None)
            if not all(asking for _, asking in routes.values()) or len(routes) < len(todo):
                self.topology.refresh(deadline, seen, hint)
        return replies

    def ask_one(self, address: Address, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """One exchange with one server, whatever owns the keys."""
        if time.monotonic() >= deadline:
            return [_NOT_BEGUN] * len(commands)
        return self._exchanger.exchange(self._pool(address), commands, deadline)

    def close(self) -> None:
        """Close idle connections. A connection in use is closed by its user: its descriptor number must not be reused
        while someone reads from it."""
        self._exchanger.close()
        with self._lock:
            self._closed = True
            pools = list(self.pools.values())
            self.pools.clear()
        for pool in pools:
            pool.disconnect(inuse_connections=False)

    # --- one round ------------------------------------------------------------------------------------------
    def _round(
        self,
        commands: Sequence[Command],
        todo: Sequence[int],
        replies: list[Reply],
        routes: dict[int, Route],
        deadline: float,
    ) -> None:
        """Ask each server for its part, in parallel, and collect the replies."""
        groups: dict[Route, list[int]] = {}
        for position in todo:
            owner = self.topology.owner(commands[position].key)
            route = routes.get(position, (owner, False) if owner is not None else None)
            if route is None:
                replies[position] = _UNOWNED
            else:
                groups.setdefault(route, []).append(position)
        calls = [
            partial(self._part, route, [commands[position] for position in positions], deadline)
            for route, positions in groups.items()
        ]
        answers = self._context.parallel(calls) if len(calls) > 1 else [call() for call in calls]
        for positions, answer in zip(groups.values(), answers, strict=True):
            for position, reply in zip(positions, answer, strict=True):
                replies[position] = reply

    def _part(self, route: Route, commands: Sequence[Command], deadline: float) -> list[Reply]:
        address, asking = route
        if not asking:
            return self.ask_one(address, commands, deadline)
        sent = [each for command in commands for each in (ASKING, command)]
        return self.ask_one(address, sent, deadline)[1::2]

    def _redirections(self, todo: Sequence[int], replies: Sequence[Reply]) -> dict[int, Route]:
        """Where MOVED and ASK send each command. Outside a cluster nowhere: then the mode is wrong, and the error says
        so."""
        routes: dict[int, Route] = {}
        if self._settings.mode != "cluster":
            return routes
        for position in todo:
            reply = replies[position]
            if isinstance(reply, Refusal) and reply.code in _REDIRECTED:
                target = _target(reply)
                if target is not None:
                    routes[position] = (target, reply.code == "ASK")
        return routes

    def _pool(self, address: Address) -> ConnectionPool:
        with self._lock:
            pool = self.pools.get(address)
            if pool is None:
                pool = make_pool(self._settings, address)
                if not self._closed:
                    self.pools[address] = pool
                    if len(self.pools) > _POOLS_MAX:  # the oldest; who uses a connection of it goes on with it
                        self.pools.pop(next(iter(self.pools))).disconnect(inuse_connections=False)
            return pool


def _target(reply: Refusal) -> Address | None:
    """Where `SLOT HOST:PORT` sends to. None if it cannot be parsed, or names no host, which means the server that
    answered: a refresh of the slots will tell."""
    slot, _, where = reply.text.partition(" ")
    if not (slot.isascii() and slot.isdigit()):
        return None
    try:
        target = address_of(where)
    except ValueError:
        return None
    return target if target.host else None


def _unsettled(reply: Reply) -> bool:
    """Whether asking again, perhaps elsewhere, may give another answer."""
    if isinstance(reply, Refusal):
        return reply.code in _REDIRECTED or reply.code in _PASSING
    return isinstance(reply, Broken) and reply.retryable
