"""What the operation `blend` is asked and answers. Keys are 64 hexadecimal digits, so that HTTP can carry them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache_blend.cutting import CHUNK_TOKENS_MAX, LENGTHS, MARKS_MAX
from lmcache_blend.planning import DOCUMENTS_MAX
from lmcache_blend.space import ROOMS_MAX, STEP_TOKENS
from lmcache_core.limits import CALL_TIMEOUT_S, CHUNK_TOKENS

TOKENS_MAX = 1 << 20  # the longest contexts
RANKS_MAX = 64
PREFIX_TOKENS_MAX = 1024
PAIRS_MAX = 4096
LISTED_MAX = 32  # spaces in an answer, which is one frame: four bytes a character
# Meanwhile one of the two threads of all operations waits; and whoever calls takes a server for stopped after its own
# timeout, so the answer has to come before that.
WAIT_S_MAX = CALL_TIMEOUT_S - 2.0

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Digest = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
Token = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Tokens = Annotated[list[Token], Meta(max_length=TOKENS_MAX)]
Count = Annotated[int, Meta(ge=1, le=CHUNK_TOKENS_MAX)]
Extra = Annotated[str, Meta(pattern="^([0-9a-fA-F]{2})*$", max_length=4096)]


class Objects(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A namespace by its digest, which derives keys and is as secret as its salt, and the layout of its objects."""

    digest: Digest
    layout: Annotated[str, Meta(max_length=256)]  # `Layout.text`


class RegisterRope(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="register_rope", tag_field="type", kw_only=True
):
    """A model's space, by a name for later calls of anybody. Another one under the name is refused; the same again is
    the same space.

    `prefixes`: of each rank, or none; `chunks`: of each rank, by room in ascending order. `rope_*`: as in `Rope`. `by`:
    who registers it, in its own words, for those who find the name taken."""

    space: Name
    by: Annotated[str, Meta(max_length=64)] = ""
    rope_theta: float
    rope_dimensions: Annotated[int, Meta(ge=2, le=2 * PAIRS_MAX)]
    rope_inv_freq: Annotated[list[float], Meta(max_length=PAIRS_MAX)]
    rope_interleaved: bool = False
    rope_scaling: float = 1.0
    prefixes: Annotated[list[Objects], Meta(max_length=RANKS_MAX)] = []
    chunks: Annotated[
        list[Annotated[list[Objects], Meta(min_length=1, max_length=ROOMS_MAX)]],
        Meta(min_length=1, max_length=RANKS_MAX),
    ]
    prefix_tokens: Annotated[list[Token], Meta(max_length=PREFIX_TOKENS_MAX)] = []
    prefix_chunk_tokens: Count = CHUNK_TOKENS
    minimum: Count = LENGTHS.minimum
    mean: Count = LENGTHS.mean
    maximum: Count = LENGTHS.maximum
    step_tokens: Count = STEP_TOKENS


class UnregisterRope(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unregister_rope", tag_field="type", kw_only=True
):
    """A space is forgotten, and its name is free. What is stored stays."""

    space: Name


class ListSpaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list_spaces", tag_field="type"):
    """Which spaces are registered, and by whom: at most `LISTED_MAX`, in the order of their names. `after`: only those
    behind this one, for the next of them."""

    after: Annotated[str, Meta(max_length=256)] = ""


class UnifiedLookup(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="unified_lookup", tag_field="type", kw_only=True
):
    """As `Chunks.find`: the prefix, the chunks behind it, and loads of what only tiers have, for all ranks."""

    space: Name
    tokens: Tokens
    marks: Annotated[list[tuple[int, int]], Meta(max_length=MARKS_MAX)] | None = None
    extra: Extra = ""
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_S_MAX)] = 0.0


class PlanPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="plan", tag_field="type", kw_only=True):
    """As `Planner.plan`."""

    space: Name
    system: Tokens = []
    documents: Annotated[list[Tokens], Meta(max_length=DOCUMENTS_MAX)]
    question: Tokens = []
    extra: Extra = ""


class FoundMatch(msgspec.Struct, frozen=True):
    """A `Match`."""

    old_start: int
    new_start: int
    tokens: int
    offset: int
    room: int
    keys: list[str]
    exact: bool


class MissingChunk(msgspec.Struct, frozen=True):
    """A `Missing`: what to compute and store."""

    first: int
    end: int
    room: int
    keys: list[str]
    ranks: list[int]


class Space(msgspec.Struct, frozen=True):
    """A registered space; `by`: as it was registered first."""

    space: str
    by: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call was answered; other fields have nothing.

    `rooms`: of a registration, for how many tokens objects are. `spaces`: of a list. `prefix_tokens` to `rank_hits`: as
    in `Found`. `order` to `tokens`: as in `Plan`."""

    rooms: list[int] = []
    spaces: list[Space] = []
    prefix_tokens: int = 0
    prefix_rank_tokens: list[int] = []
    matches: list[FoundMatch] = []
    missing: list[MissingChunk] = []
    rank_hits: list[int] = []
    order: list[int] = []
    reused_tokens: int = 0
    tokens: int = 0


class BlendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call; its `type` says which."""

    call: RegisterRope | UnregisterRope | ListSpaces | UnifiedLookup | PlanPrompt
