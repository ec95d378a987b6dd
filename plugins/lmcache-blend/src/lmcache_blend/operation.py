"""The operation `blend`: what `Chunks` and `Planner` find, for callers that have neither Python nor the pool."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lmcache_blend.chunks import Chunks
from lmcache_blend.cutting import Lengths
from lmcache_blend.messages import (
    Answer,
    BlendRequest,
    FoundMatch,
    MissingChunk,
    Objects,
    PlanPrompt,
    RegisterRope,
    UnifiedLookup,
)
from lmcache_blend.planning import Planner
from lmcache_blend.rope import Rope
from lmcache_blend.space import ChunkSpace
from lmcache_core import Client, Layout
from lmcache_core.errors import LimitError, UsageError
from lmcache_core.limits import CALL_TIMEOUT_S, FRAME_BYTES_MAX
from lmcache_core.server.operation import OperationContext, ServerOperation
from lmcache_core.tokens.namespace import NamespaceOfDigest

OPERATION = "blend"
SPACES_MAX = 64  # registered: each has some hundred namespaces at most
KEYS_MAX = FRAME_BYTES_MAX // 66  # of chunks, as an answer holds them: 64 hexadecimal digits and their length
PREFIX_KEYS_MAX = 1 << 16  # of prefixes of all ranks, which are looked up and not answered: some 50 ms of a lane
PLANNERS_MAX = 8  # of all spaces, by what prefixes depend on besides: each may remember 10 MB of counts


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
        self._spaces: dict[str, Chunks] = {}
        self._planners: dict[tuple[str, bytes], Planner] = {}
        self._counts: Counter[str] = Counter(dict.fromkeys(("registered", "lookups", "plans"), 0))
        self._lock = threading.Lock()

    def handle(self, request: BlendRequest) -> Answer:
        """Carry a call out. Raises `UsageError`."""
        call = request.call
        if isinstance(call, RegisterRope):
            return self._register(call)
        with self._lock:
            chunks = self._spaces.get(call.space)
        if chunks is None:
            raise UsageError(
                f"the space {call.space!r:.80} is not registered: call register_rope, also after a restart"
            )
        return self._lookup(chunks, call) if isinstance(call, UnifiedLookup) else self._plan(chunks, call)

    def _register(self, call: RegisterRope) -> Answer:
        chunks = Chunks(
            self._client, _space_of(call), [_namespace_of(each) for each in call.prefixes], call.prefix_chunk_tokens
        )
        with self._lock:
            if len(self._spaces) >= SPACES_MAX and call.space not in self._spaces:
                raise UsageError(f"{SPACES_MAX} spaces are registered, which is the limit: replace one of them")
            self._spaces[call.space] = chunks
            self._planners = {key: each for key, each in self._planners.items() if key[0] != call.space}
            self._counts["registered"] += 1
        return Answer(rooms=chunks.space.rooms)

    def _lookup(self, chunks: Chunks, call: UnifiedLookup) -> Answer:
        prefix_keys = len(call.tokens) // chunks.prefix_chunk_tokens * len(chunks.prefixes)
        if prefix_keys > PREFIX_KEYS_MAX:
            raise LimitError(
                f"a prefix of {len(call.tokens):,} tokens for {len(chunks.prefixes)} ranks has {prefix_keys:,} keys, "
                f"and the limit is {PREFIX_KEYS_MAX:,}: ask for fewer tokens at once"
            )
        found = chunks.find(
            call.tokens, call.marks, extra=bytes.fromhex(call.extra), wait_s=call.wait_s, keys_max=KEYS_MAX
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
        with self._lock:
            planner = self._planners.pop((call.space, extra), None)
            if planner is None:
                planner = Planner(self._client, chunks.prefixes[0], chunks.prefix_chunk_tokens, extra=extra)
            while len(self._planners) >= PLANNERS_MAX:
                del self._planners[next(iter(self._planners))]  # it only loses what it has counted
            self._planners[call.space, extra] = planner  # the last one to go
            self._counts["plans"] += 1
        plan = planner.plan(call.system, call.documents, call.question)
        return Answer(order=list(plan.order), reused_tokens=plan.reused_tokens, tokens=plan.tokens)

    def status(self) -> dict[str, Any]:
        """How many spaces there are, and calls so far."""
        return {"spaces": len(self._spaces), **self._counts}

    def close(self) -> None:
        """The server stops: nothing waits for it."""
        self._client.close(timeout_s=0.0)


def _space_of(call: RegisterRope) -> ChunkSpace:
    rope = Rope(
        call.rope_theta, call.rope_dimensions, call.rope_interleaved, tuple(call.rope_inv_freq), call.rope_scaling
    )
    if any(len(each) != len(call.chunks[0]) for each in call.chunks):
        raise UsageError("the ranks differ in how many rooms their chunks have")
    layouts = [_namespace_of(each).layout for each in call.chunks[0]]
    space = ChunkSpace(
        call.space,
        lambda tokens: layouts[min(tokens // call.step_tokens, len(layouts)) - 1],
        rope,
        tuple(call.prefix_tokens),
        Lengths(call.minimum, call.mean, call.maximum),
        call.step_tokens,
        kv_ranks=len(call.chunks),
    )
    if len(space.rooms) != len(layouts):
        raise UsageError(
            f"{len(layouts)} namespaces of chunks, and chunks of up to {call.maximum} tokens in steps of "
            f"{call.step_tokens} need {len(space.rooms)}"
        )
    for rank, own in enumerate(call.chunks):
        for room, objects in zip(space.rooms, own, strict=True):
            space.use(room, rank, _namespace_of(objects))
    return space


def _namespace_of(objects: Objects) -> NamespaceOfDigest:
    return NamespaceOfDigest.of(bytes.fromhex(objects.digest), Layout.from_text(objects.layout))


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def registration(chunks: Chunks, name: str) -> RegisterRope:
    """The call that registers the space of these chunks, for a program that has them."""
    space = chunks.space
    return RegisterRope(
        space=name,
        rope_theta=space.rope.theta,
        rope_dimensions=space.rope.dimensions,
        rope_inv_freq=list(space.rope.inv_freq),
        rope_interleaved=space.rope.interleaved,
        rope_scaling=space.rope.attention_scaling,
        prefixes=[Objects(each.digest.hex(), each.layout.text) for each in chunks.prefixes],
        chunks=[
            [Objects((own := space.namespace(room, rank)).digest.hex(), own.layout.text) for room in space.rooms]
            for rank in range(space.kv_ranks)
        ],
        prefix_tokens=list(space.prefix_tokens),
        prefix_chunk_tokens=chunks.prefix_chunk_tokens,
        minimum=space.lengths.minimum,
        mean=space.lengths.mean,
        maximum=space.lengths.maximum,
        step_tokens=space.step_tokens,
    )
