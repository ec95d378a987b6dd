"""Carries hints out: what can be done at once while the caller waits, loads and stores on threads of its own.

A hint never blocks anybody else: what it pins, retains and loads is bounded by budgets, its loads give way to requests,
and what it retains is evicted last, but evicted. What a message began ends with the message: by its own time, by
`kv.release`, or with the server.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

import msgspec

from lmcache_core.errors import CacheError
from lmcache_core.guard import guarded
from lmcache_core.limits import EXPLAIN_KEYS_MAX
from lmcache_core.threads import started
from lmcache_hints.delays import Delays
from lmcache_hints.envelope import (
    ActionOutcome,
    Demote,
    Fetch,
    HintsReply,
    KvHintAction,
    KvHintsEnvelope,
    Outcome,
    Payload,
    Pin,
    Prefetch,
    RefusedError,
    Release,
    Retain,
    Share,
    Wait,
    decode,
)
from lmcache_hints.holdings import Budget, Holdings, Objects
from lmcache_hints.limits import (
    ACTIONS_REMEMBERED,
    DEADLINE_S_MAX,
    DELAY_S_MAX,
    JOBS_WAITING_MAX,
    KEEP_S,
    KEYS_WAITING_MAX,
    LOAD_KEYS,
    LOADERS,
    LOOK_S,
    MARGIN_S,
    PIN_TERM_S,
    PINNED_MAX,
    RENEW_S,
    RETAINED_MAX,
    RETRY_S,
    RETRY_S_MAX,
    SESSIONS_REMEMBERED,
    TOUCH_S,
)
from lmcache_hints.node import Node
from lmcache_hints.settings import HintsSettings

log = logging.getLogger(__name__)

_FIRST_RATE = 200e6  # bytes a second that a load is expected to bring, until one was measured
_RATE_WEIGHT = 0.2  # of the newest measurement
_BUDGETS = "see pinned_share, retained_share and tenant_share of [operations.hints]"


class Released:
    """Whether a message was released: nothing of it is begun any more."""

    yes = False


class Message:
    """What one envelope began. Keys are kept only by what holds them, and by jobs that wait. Its actions do not refer
    to it: a server collects no cycles that have lived long."""

    def __init__(self, message_id: str, digest: bytes, actions: Sequence[KvHintAction]) -> None:
        self.id = message_id
        self.digest = digest
        self.released = Released()
        self.actions = [Action(message_id, self.released, each) for each in actions]
        self.sessions: set[str] = set()  # that remember it

    @property
    def outcomes(self) -> list[ActionOutcome]:
        """Of its actions, in their order."""
        return [action.outcome for action in self.actions]


class Action:
    """One action of a message, and its outcome."""

    def __init__(self, message_id: str, released: Released, given: KvHintAction) -> None:
        self.message_id = message_id
        self.released = released
        self.over = False  # a wait whose session is back
        self.count = 0  # of objects
        self.nbytes = 0  # of one
        self.outcome = ActionOutcome(given.action_id, Outcome.DEFERRED)

    @property
    def ended(self) -> bool:
        """Whether nothing of it is to be begun any more."""
        return self.over or self.released.yes

    def end(self, outcome: Outcome, reason: str = "", done: int = 0) -> None:
        """What became of it; a later call replaces this."""
        action_id = self.outcome.action_id
        self.outcome = ActionOutcome(action_id, outcome, reason, self.count, done, done * self.nbytes)

    def end_with(self, done: int, why_not_all: str, why_none: str) -> None:
        """Accepted, clipped or missing, by the number of objects for which it was done."""
        if done == self.count:
            self.end(Outcome.ACCEPTED, done=done)
        elif done:
            self.end(Outcome.CLIPPED, why_not_all, done)
        else:
            self.end(Outcome.MISSING, why_none)


@dataclass
class _Session:
    """What was sent for it and is still remembered, and its wait, if it waits."""

    messages: dict[str, Message]
    wait: Action | None = None


class _Job(NamedTuple):
    """Work that has a time of its own. Compared by `due_s` and `number`."""

    due_s: float
    number: int
    action: Action
    run: Callable[[], None]


class Executor:
    """Thread-safe."""

    def __init__(self, settings: HintsSettings, node: Node, clock: Callable[[], float]) -> None:
        self._node = node
        self._now = clock
        pinned, retained, self._loading = (
            Budget(share, settings.tenant_share)
            for share in (settings.pinned_share, settings.retained_share, settings.loading_share)
        )
        self._pinned = Holdings(pinned, PINNED_MAX)
        self._retained = Holdings(retained, RETAINED_MAX)
        self._delays = Delays()
        self._rate = _FIRST_RATE
        self._numbers = count(1)
        self._messages: OrderedDict[str, Message] = OrderedDict()
        self._actions = 0  # of all messages, and one for each
        self._look_s = 0.0  # before that, no more of them can be forgotten
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._jobs: list[_Job] = []
        self._keys_waiting = 0  # of these
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()  # guards all of the above
        self._closed = False
        self._threads: list[threading.Thread] = []

    # --- what callers send ------------------------------------------------------------------------------------

    def take(self, envelope: KvHintsEnvelope) -> HintsReply:
        """Carry out an envelope, or say what became of it if its `message_id` is known."""
        if len({each.action_id for each in envelope.actions}) < len(envelope.actions):
            return _all_refused(envelope, "two actions have one action_id")
        try:
            digest = sha256(msgspec.json.encode(envelope, order="sorted")).digest()
        except (TypeError, ValueError) as error:
            return _all_refused(envelope, f"a payload is no JSON object: {error}")
        self._start()
        with self._changed:
            message = self._messages.get(envelope.message_id)
            known = message is not None
            if message is None:
                room = self._has_room()
                if not room and any(each.action_type != "kv.release" for each in envelope.actions):
                    return _all_refused(envelope, "too many hints have not ended yet: release some, or try again later")
                message = Message(envelope.message_id, digest, envelope.actions)
                if room:  # a release may come twice
                    self._messages[message.id] = message
                    self._actions += len(message.actions) + 1
        if known:
            if message.digest != digest:
                return _all_refused(envelope, "this message_id was used for other actions: send a new one")
            return HintsReply(message.id, message.outcomes)
        for given, action in zip(envelope.actions, message.actions, strict=True):
            guarded(partial(_refuse, action), self._begin, envelope, given, action)
            with self._changed:
                self._counts[action.outcome.outcome] += 1
        return HintsReply(message.id, message.outcomes)

    def _has_room(self) -> bool:
        """Whether another message can be remembered: the oldest are forgotten, unless they hold something."""
        if self._actions <= ACTIONS_REMEMBERED:
            return True
        if self._now() < self._look_s:
            return False
        for oldest in list(self._messages.values()):
            busy = any(each.outcome.outcome is Outcome.DEFERRED for each in oldest.actions)
            if not busy and not self._pinned.holds(oldest.id) and not self._retained.holds(oldest.id):
                self._forget(oldest)
            if self._actions <= 0.9 * ACTIONS_REMEMBERED:
                return True
        self._look_s = self._now() + LOOK_S
        return self._actions <= ACTIONS_REMEMBERED

    def _forget(self, message: Message) -> None:
        del self._messages[message.id]
        self._actions -= len(message.actions) + 1
        for session in message.sessions & self._sessions.keys():
            self._sessions[session].messages.pop(message.id, None)

    def _start(self) -> None:
        """With the first envelope: most servers never get one, and need no threads for them."""
        with self._changed:
            if len(self._threads) > LOADERS:
                return
            names = {thread.name for thread in self._threads}
            runs = {f"hints-{number}": self._run_jobs for number in range(LOADERS)} | {"hints-keep": self._keep}
            for name, run in runs.items():
                thread = None if name in names else started(run, name)
                self._threads += [] if thread is None else [thread]
        pool_bytes = self._node.pool_bytes()
        for budget in (self._pinned.budget, self._retained.budget, self._loading):
            budget.pool_bytes = pool_bytes

    def _begin(self, envelope: KvHintsEnvelope, given: KvHintAction, action: Action) -> None:
        payload = decode(envelope, given)
        if isinstance(payload, Release):
            self._release(payload, action)
            return
        objects = self._node.objects_of(payload)
        action.count, action.nbytes = len(objects.keys), objects.layout.nbytes
        if payload.session:
            self._note_session(payload.session, action.message_id, waits=isinstance(payload, Wait))
        if isinstance(payload, Pin):
            self._pin(objects, action, payload.ttl_s)
        elif isinstance(payload, Retain):
            self._retain(objects, action, payload.ttl_s)
        elif isinstance(payload, Demote):
            self._demote(objects, action)
        elif isinstance(payload, Share):
            self._check_tiers(payload.tiers)
            deadline = self._now() + payload.deadline_s
            self._schedule(0.0, action, partial(self._share, objects, action, set(payload.tiers), deadline))
        else:
            self._load_later(payload, objects, action)

    def _note_session(self, session: str, message_id: str, *, waits: bool) -> None:
        """The session has sent something, so it is back. If it waits again, nobody knows since when it was."""
        with self._changed:
            if not waits:
                self._delays.returned(session, self._now())
            state = self._sessions.setdefault(session, _Session({}))
            message = self._messages.get(message_id)
            if message is not None:
                state.messages[message_id] = message
                message.sessions.add(session)
            if state.wait is not None:
                state.wait.over, state.wait = True, None
                self._cancel()
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS_REMEMBERED:
                self._sessions.popitem(last=False)

    def _load_later(self, payload: Payload, objects: Objects, action: Action) -> None:
        assert isinstance(payload, Fetch | Wait)
        self._check_tiers(payload.tiers)
        if objects.layout.nbytes > (most := self._loading.most(objects.tenant)):
            raise RefusedError(
                f"an object has {objects.layout.nbytes:,} bytes, and loads of hints take at most {most:,}: see "
                "loading_share and tenant_share of [operations.hints]"
            )
        after_s, keep_s, deadline_s = 0.0, KEEP_S, DEADLINE_S_MAX
        if isinstance(payload, Wait):
            with self._changed:
                self._delays.left(payload.session, payload.session_class, self._now())
                shortest = min(DELAY_S_MAX, self._delays.shortest(payload.session_class))
                most_s = self._delays.most(payload.session_class)
                if payload.session in self._sessions:
                    self._sessions[payload.session].wait = action
            keep_s = KEEP_S if most_s is None else min(DELAY_S_MAX, most_s)
            after_s = max(0.0, shortest - len(objects.keys) * action.nbytes / self._rate - MARGIN_S)
        elif isinstance(payload, Prefetch):
            after_s, keep_s, deadline_s = payload.after_s, payload.keep_s, payload.deadline_s
        else:
            deadline_s = payload.deadline_s
        tiers = list(payload.tiers) or None
        deadline = self._now() + after_s + deadline_s
        self._schedule(after_s, action, partial(self._load, objects, action, tiers, deadline, keep_s))

    def _check_tiers(self, tiers: Sequence[str]) -> None:
        there = self._node.tier_names()
        unknown = [tier for tier in tiers if tier not in there]
        if unknown:
            raise RefusedError(f"no tier is named {unknown[0]!r}: this server has {', '.join(there) or 'none'}")
        if not there:
            raise RefusedError("this server has no tier")

    # --- what is done at once ---------------------------------------------------------------------------------

    def _pin(self, objects: Objects, action: Action, ttl_s: float) -> None:
        """Pinned for a short term, which is renewed: pins of the server have no holder, and ours must not end another's
        pin of the same object."""
        there = self._in_memory(objects)
        with self._changed:
            room = self._pinned.budget.room(objects.tenant) // objects.layout.nbytes
        granted = self._node.pin(objects.namespace, objects.layout, there[:room], min(ttl_s, PIN_TERM_S))
        self._hold(self._pinned, objects, action, granted, ttl_s, len(there))

    def _retain(self, objects: Objects, action: Action, ttl_s: float) -> None:
        there = self._in_memory(objects)
        self._hold(self._retained, objects, action, there, ttl_s, len(there))

    def _hold(
        self, holdings: Holdings, objects: Objects, action: Action, keys: Sequence[bytes], ttl_s: float, there: int
    ) -> None:
        with self._changed:
            held = not action.ended and holdings.admit(action.message_id, objects, keys, self._now() + ttl_s)
        done = len(held) if held else 0
        if there and not done:
            action.end(Outcome.REJECTED, f"released meanwhile, or no budget: {_BUDGETS}")
        else:
            gone = "the others are not in memory: fetch them first"
            why = f"no budget for more: {_BUDGETS}" if done < there else gone
            action.end_with(done, why, "none of them is in memory: fetch them first")

    def _demote(self, objects: Objects, action: Action) -> None:
        there = self._there(objects, objects.keys)
        found = {key: info.incarnation for key, info in there.items() if not info.holds}
        on_tiers = self._node.tiers_of(objects, list(found))
        leaving = {
            key: number for (key, number), tiers in zip(found.items(), on_tiers, strict=True) if any(tiers.values())
        }
        self._node.drop(objects, leaving)
        stay = "in use, or on no tier, and stay"
        action.end_with(len(leaving), f"the others are not in memory, {stay}", f"none of them is in memory, or {stay}")

    def _release(self, payload: Release, action: Action) -> None:
        if not payload.message_id and not payload.session:
            raise RefusedError("it names neither a message_id nor a session")
        with self._changed:
            session = self._sessions.pop(payload.session, None)
            ended = [self._messages.get(payload.message_id), *(session.messages.values() if session else ())]
            self._delays.returned(payload.session, self._now())
            known = [message for message in ended if message is not None and message.id != action.message_id]
            for message in known:
                message.released.yes = True
                self._pinned.end(message.id)
                self._retained.end(message.id)
            self._cancel()
            self._look_s = 0.0
        if known:
            action.end(Outcome.ACCEPTED)
        else:
            action.end(Outcome.MISSING, "nothing is known by that message_id or session")

    def _cancel(self) -> None:
        """Forget the jobs of what has ended."""
        for job in self._jobs:
            if job.action.ended:
                self._keys_waiting -= job.action.count
                done = job.action.outcome.done
                why = "released, or its session came back, before it was done"
                job.action.end(Outcome.CLIPPED if done else Outcome.MISSING, why, done)
        self._jobs = [job for job in self._jobs if not job.action.ended]
        heapq.heapify(self._jobs)

    def _there(self, objects: Objects, keys: Sequence[bytes]) -> dict[bytes, Any]:
        found = zip(keys, self._node.there(objects.namespace, keys), strict=True)
        return {key: info for key, info in found if info is not None}

    def _in_memory(self, objects: Objects) -> list[bytes]:
        return list(self._there(objects, objects.keys))

    # --- what has a time of its own ---------------------------------------------------------------------------

    def _schedule(self, after_s: float, action: Action, run: Callable[[], None]) -> None:
        with self._changed:
            if len(self._jobs) >= JOBS_WAITING_MAX or self._keys_waiting + action.count > KEYS_WAITING_MAX:
                raise RefusedError("too many loads and stores of hints wait already: try again later")
            if not action.outcome.reason:
                action.end(Outcome.DEFERRED, f"it begins in {after_s:.1f} s" if after_s else "it is under way")
            self._keys_waiting += action.count
            heapq.heappush(self._jobs, _Job(self._now() + after_s, next(self._numbers), action, run))
            self._changed.notify_all()  # the thread that keeps waits for it, too

    def _load(
        self,
        objects: Objects,
        action: Action,
        tiers: Sequence[str] | None,
        deadline: float,
        keep_s: float,
        pause_s: float = 0.0,
    ) -> None:
        """Load what is not in memory, as far as the budget goes, and retain all of it for a while. `pause_s`: how long
        it has just waited for room."""
        began = self._now()
        with self._changed:
            full = self._loading.room(objects.tenant) < objects.layout.nbytes
        if pause_s and full and not action.ended and began < deadline:  # the server need not be asked again
            self._load_again(objects, action, tiers, deadline, keep_s, pause_s)
            return
        there = self._there(objects, objects.keys)
        missing = [key for key in objects.keys if key not in there]
        with self._changed:
            chosen = missing[: self._loading.room(objects.tenant) // objects.layout.nbytes]
            taken = len(chosen) * objects.layout.nbytes
            self._loading.take(objects.tenant, taken)
        try:
            for first in range(0, len(chosen), LOAD_KEYS):
                if action.ended or self._closed or self._now() >= deadline:
                    break
                page = chosen[first : first + LOAD_KEYS]
                self._node.load(objects, page, tiers, min(30.0, deadline - self._now()))
        finally:
            with self._changed:
                self._loading.take(objects.tenant, -taken)
        took = self._now() - began
        loaded = self._there(objects, chosen)
        with self._changed:
            self._counts["loaded_objects"] += len(loaded)
            self._counts["loaded_bytes"] += len(loaded) * objects.layout.nbytes
            if loaded and took:
                self._rate += _RATE_WEIGHT * (len(loaded) * objects.layout.nbytes / took - self._rate)
            if keep_s and not action.ended:
                kept = [key for key in objects.keys if key in there or key in loaded]
                self._retained.admit(action.message_id, objects, kept, self._now() + keep_s)
        done = len(there) + len(loaded)
        if missing and not chosen and not action.ended and self._now() < deadline:
            action.end(Outcome.DEFERRED, "it waits for room in the budget of loads: see loading_share", done)
            self._load_again(objects, action, tiers, deadline, keep_s, pause_s)
        else:
            clipped = "the budget of loads allowed no more: see loading_share"
            late = "the tiers do not have the others, or not in time"
            action.end_with(done, clipped if len(chosen) < len(missing) else late, "no tier has them, or not in time")

    def _load_again(
        self,
        objects: Objects,
        action: Action,
        tiers: Sequence[str] | None,
        deadline: float,
        keep_s: float,
        paused_s: float,
    ) -> None:
        """Once there may be room in the budget."""
        pause_s = _next_pause_s(paused_s)
        self._schedule(pause_s, action, partial(self._load, objects, action, tiers, deadline, keep_s, pause_s))

    def _share(
        self, objects: Objects, action: Action, wanted: set[str], deadline: float, paused_s: float = 0.0
    ) -> None:
        """Look until each object is on a tier that was named, or on its way to none of them any more."""
        on_its_way, done = False, 0
        for tiers in self._node.tiers_of(objects, objects.keys):
            chosen = {tier: there for tier, there in tiers.items() if not wanted or tier in wanted}
            done += any(chosen.values())
            on_its_way |= bool(chosen) and not any(chosen.values())
        if on_its_way and not action.ended and self._now() < deadline:
            action.end(Outcome.DEFERRED, "some are on their way", done)
            pause_s = _next_pause_s(paused_s)
            self._schedule(pause_s, action, partial(self._share, objects, action, wanted, deadline, pause_s))
        else:
            action.end_with(done, "the others are on no such tier", "none of them is on such a tier")

    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            guarded(partial(_refuse, job.action), job.run)

    def _next_job(self) -> _Job | None:
        with self._changed:
            while not self._closed:
                if not self._jobs:
                    self._changed.wait()
                elif (wait_s := self._jobs[0].due_s - self._now()) > 0:
                    self._changed.wait(wait_s)
                else:
                    job = heapq.heappop(self._jobs)
                    self._keys_waiting -= job.action.count
                    return job
        return None

    def _keep(self) -> None:
        """What is retained counts as used again and again, so that it is evicted last; what is pinned is pinned again
        before its term ends. What has left the memory is no longer held."""
        renewed = self._now()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, TOUCH_S)
                self._retained.expire(self._now())
                self._pinned.expire(self._now())
                retained = list(self._retained.pages(EXPLAIN_KEYS_MAX))
                pinned = list(self._pinned.pages(EXPLAIN_KEYS_MAX)) if self._now() - renewed >= RENEW_S else []
            for holdings, pages, keep in (
                (self._retained, retained, self._node.used),
                (self._pinned, pinned, self._node.pin_again),
            ):
                for namespace, keys in pages:
                    if self._closed:
                        return
                    there = guarded(partial(_failed, keys), keep, namespace, keys, PIN_TERM_S)
                    with self._changed:
                        holdings.forget((namespace, key) for key in set(keys).difference(there))
            if self._closed:
                return
            renewed = self._now() if pinned else renewed
            self._counts["touched"] += bool(retained)

    # --- for the server ---------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For `status`. Without the lock, as the server's loop asks, and the lock may be held for milliseconds: each
        figure is right, and they need not be of one moment."""
        return {
            "counts": {
                **{str(outcome): self._counts[outcome] for outcome in Outcome},
                "loaded_objects": self._counts["loaded_objects"],
                "loaded_bytes": self._counts["loaded_bytes"],
            },
            "touched": self._counts["touched"],
            "remembered": len(self._messages),
            "waiting": len(self._jobs),
            "pinned_objects": len(self._pinned),
            "pinned_bytes": self._pinned.budget.nbytes,
            "retained_objects": len(self._retained),
            "retained_bytes": self._retained.budget.nbytes,
            "loading_bytes": self._loading.nbytes,
            **self._delays.status(),
        }

    def close(self) -> None:
        """Begin nothing more. Threads that wait for the server end with its link."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _next_pause_s(paused_s: float) -> float:
    """Before another look: it doubles."""
    return min(RETRY_S_MAX, 2 * paused_s or RETRY_S)


def _all_refused(envelope: KvHintsEnvelope, reason: str) -> HintsReply:
    refused = [ActionOutcome(each.action_id, Outcome.REJECTED, reason) for each in envelope.actions]
    return HintsReply(envelope.message_id, refused)


def _refuse(action: Action, error: BaseException) -> None:
    """An action ends because something was refused, or has failed."""
    action.end(Outcome.REJECTED, str(error) if isinstance(error, RefusedError) else f"it failed: {error}")
    if not isinstance(error, RefusedError | CacheError):
        log.error("a hint was not carried out", exc_info=error)


def _failed(keys: Sequence[bytes], error: BaseException) -> Sequence[bytes]:
    """They may be there still."""
    log.warning("%d objects were not kept in memory as hints ask: %s", len(keys), error)
    return keys
