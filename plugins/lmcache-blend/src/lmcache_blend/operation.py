"""The operation `blend`: what `Chunks` and `Planner` find, for callers that have neither Python nor the pool."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache_blend.chunks import Chunks
from lmcache_blend.described import chunks_of
from lmcache_blend.messages import (
    LISTED_MAX,
    Answer,
    BlendRequest,
    FoundMatch,
    ListSpaces,
    MissingChunk,
    PlanPrompt,
    RegisterRope,
    Space,
    UnifiedLookup,
    UnregisterRope,
)
from lmcache_blend.planning import Planner
from lmcache_core import Client
from lmcache_core.errors import LimitError, UsageError
from lmcache_core.limits import CALL_TIMEOUT_S, FRAME_BYTES_MAX
from lmcache_core.server.operation import OperationContext, ServerOperation

OPERATION = "blend"
SPACES_MAX = 64  # registered: each has some hundred namespaces at most
CHUNK_BYTES, KEY_BYTES = 72, 66  # of an answer: a chunk without its keys, and a key in hexadecimal digits
PREFIX_KEYS_MAX = 1 << 16  # of prefixes of all ranks, which are looked up and not answered: some 50 ms of a lane
PLANNERS_MAX = 8  # of all spaces, by what prefixes depend on besides: each may remember 10 MB of counts


class _Registered(NamedTuple):
    call: RegisterRope
    chunks: Chunks


class BlendOperation(ServerOperation):
    """On a lane: it searches the index through a client of its own, and may wait for tiers."""

    request, reply = BlendRequest, Answer

    def __init__(self, settings: object, context: OperationContext) -> None:
        self._client = Client.connect(
            context.settings.name,
            runtime_dir=context.settings.runtime_dir,
            client_name="lmcache-blend",
            call_timeout_s=CALL_TIMEOUT_S,
        )
        self._spaces: dict[str, _Registered] = {}
        # By the chunks themselves: a plan may outlive its space, whose name may be another's by then.
        self._planners: dict[tuple[Chunks, bytes], Planner] = {}
        self._counts: Counter[str] = Counter(dict.fromkeys(("registered", "lookups", "plans"), 0))
        self._lock = threading.Lock()

    def handle(self, request: BlendRequest) -> Answer:
        """Carry a call out. Raises `UsageError`, and `LimitError` for what would take other operations too long."""
        call = request.call
        match call:
            case RegisterRope():
                return self._register(call)
            case UnregisterRope():
                return self._unregister(call.space)
            case ListSpaces():
                with self._lock:
                    names = sorted(name for name in self._spaces if name > call.after)[:LISTED_MAX]
                    return Answer(spaces=[Space(name, self._spaces[name].call.by) for name in names])
        with self._lock:
            registered = self._spaces.get(call.space)
        if registered is None:
            raise _unknown(call.space)
        chunks = registered.chunks
        return self._lookup(chunks, call) if isinstance(call, UnifiedLookup) else self._plan(chunks, call)

    def _register(self, call: RegisterRope) -> Answer:
        chunks = chunks_of(self._client, call)
        with self._lock:
            there = self._spaces.get(call.space)
            if there is None and len(self._spaces) >= SPACES_MAX:
                raise LimitError(f"{SPACES_MAX} spaces are registered, which is the limit: unregister one of them")
            if there is not None and (other := _different(there.call, call)):
                raise UsageError(
                    f"the space {call.space!r:.80} is registered by {there.call.by or 'somebody'!r:.80} with another "
                    f"{', '.join(other)}: use another name, or unregister that one"
                )
            if there is None:
                self._spaces[call.space] = _Registered(call, chunks)
            self._counts["registered"] += 1
        return Answer(rooms=chunks.space.rooms)

    def _unregister(self, name: str) -> Answer:
        with self._lock:
            gone = self._spaces.pop(name, None)
            if gone is None:
                raise _unknown(name)
            self._planners = {key: each for key, each in self._planners.items() if key[0] is not gone.chunks}
        return Answer()

    def _lookup(self, chunks: Chunks, call: UnifiedLookup) -> Answer:
        prefix_keys = len(call.tokens) // chunks.prefix_chunk_tokens * len(chunks.prefixes)
        if prefix_keys > PREFIX_KEYS_MAX:
            raise LimitError(
                f"a prefix of {len(call.tokens):,} tokens for {len(chunks.prefixes)} ranks has {prefix_keys:,} keys, "
                f"and the limit is {PREFIX_KEYS_MAX:,}: ask for fewer tokens at once"
            )
        ranks = chunks.space.kv_ranks
        keys_max = FRAME_BYTES_MAX // (CHUNK_BYTES + KEY_BYTES * ranks) * ranks
        found = chunks.find(
            call.tokens, call.marks, extra=bytes.fromhex(call.extra), wait_s=call.wait_s, keys_max=keys_max
        )
        room = chunks.space.room
        with self._lock:
            self._counts["lookups"] += 1
        return Answer(
            tokens=found.tokens,
            prefix_tokens=found.prefix_tokens,
            prefix_rank_tokens=list(found.prefix_rank_tokens),
            matches=[FoundMatch(*match[:5], _hex(match.keys), match.exact) for match in found.matches],
            missing=[
                MissingChunk(*each.span, room(each.span.end - each.span.first), _hex(each.keys), list(each.ranks))
                for each in found.missing
            ],
            rank_hits=list(found.rank_hits),
        )

    def _plan(self, chunks: Chunks, call: PlanPrompt) -> Answer:
        extra = bytes.fromhex(call.extra)
        if not chunks.prefixes:
            raise UsageError(
                f"the space {call.space!r:.80} was registered without prefixes: there is nothing to plan by"
            )
        with self._lock:
            planner = self._planners.pop((chunks, extra), None)
            if planner is None:
                planner = Planner(self._client, chunks.prefixes[0], chunks.prefix_chunk_tokens, extra=extra)
            while len(self._planners) >= PLANNERS_MAX:
                del self._planners[next(iter(self._planners))]  # it only loses what it has counted
            self._planners[chunks, extra] = planner  # the last one to go
            self._counts["plans"] += 1
        plan = planner.plan(call.system, call.documents, call.question)
        return Answer(order=list(plan.order), reused_tokens=plan.reused_tokens, tokens=plan.tokens)

    def status(self) -> dict[str, Any]:
        """How many spaces there are, and calls so far."""
        return {"spaces": len(self._spaces), **self._counts}

    def close(self) -> None:
        """The server stops: nothing waits for it."""
        self._client.close(timeout_s=0.0)


def _unknown(space: str) -> UsageError:
    return UsageError(f"the space {space!r:.80} is not registered: call register_rope, also after a restart")


def _different(there: RegisterRope, other: RegisterRope) -> list[str]:
    """In which fields a registration differs from one under the same name."""
    names = [name for name in RegisterRope.__struct_fields__ if name != "by"]
    return [name for name in names if getattr(there, name) != getattr(other, name)]


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]
