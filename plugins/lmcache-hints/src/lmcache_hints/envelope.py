"""The envelope that routers and engines send, and what our server understands of it.

The envelope is that of vLLM (`vllm.v1.kv_hints`, 0.32) and SGLang (`sglang.srt.managers.kv_hints`, 0.5.23): actions,
each with a type and a version of its own, and a payload that only the executor reads. Everything is decoded here, by
type and version; whatever is not known is refused with a reason, and nothing is guessed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from lmcache_hints.limits import (
    ACTIONS_MAX,
    DEADLINE_S_MAX,
    DELAY_S_MAX,
    ID_CHARS_MAX,
    KEYS_MAX,
    TOKENS_MAX,
    TTL_S_MAX,
)

PROTOCOL_VERSION = "0.1"
ACTION_VERSION = "1.0"

Id = Annotated[str, Meta(min_length=1, max_length=ID_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=ID_CHARS_MAX)]
Hex = Annotated[str, Meta(pattern="^([0-9a-fA-F]{2})+$", max_length=128)]
Seconds = Annotated[float, Meta(ge=0, le=DEADLINE_S_MAX)]
Axis = Annotated[int, Meta(ge=1, le=1 << 40)]
Names = Annotated[list[Id], Meta(max_length=64)]


class KvHintAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One action: what to do, in which version of its payload."""

    action_id: Id
    action_type: Id
    action_version: Id
    payload: dict[str, Any] = {}


class KvHintsEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a router sends at once. The same `message_id` again asks what became of it, and does nothing twice."""

    protocol_version: Id
    message_id: Id
    actions: Annotated[list[KvHintAction], Meta(max_length=ACTIONS_MAX)] = []


class ObjectLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of a namespace's objects, for a server that has none of them in its pool and nobody who uses them."""

    dtype: Id
    shape: Annotated[list[Axis], Meta(min_length=1, max_length=16)]
    memory_format: Text = ""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which objects an action means: in one namespace, by `keys`, by the block hashes of an engine, or by token ids.

    `namespace`: its label, or its id in 16 hexadecimal digits. Block hashes and token ids also need its digest
    (`Namespace.digest`, 64 digits), from which keys are derived; then the id follows from it. `hash_algorithm` and
    `hash_seed` are the engine's (see `keys_from_block_hashes`), `chunk_tokens` is the number of tokens in an object.
    """

    namespace: Text = ""
    namespace_digest: Annotated[str, Meta(pattern="^([0-9a-fA-F]{64})?$")] = ""
    layout: ObjectLayout | None = None
    keys: Annotated[list[Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]], Meta(max_length=KEYS_MAX)] = []
    block_hashes: Annotated[list[Hex], Meta(max_length=KEYS_MAX)] = []
    hash_algorithm: Text = ""
    hash_seed: Text = ""
    token_ids: Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]], Meta(max_length=TOKENS_MAX)] = []
    chunk_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 256


class Fetch(Target, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Load now, from these tiers (none: from any), until `deadline_s` have passed."""

    tiers: Names = []
    deadline_s: Seconds = 30.0
    session: Text = ""


class Prefetch(Fetch, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Load `after_s` from now, and keep it in memory for `keep_s` if that costs nobody a hit."""

    after_s: Annotated[float, Meta(ge=0, le=DELAY_S_MAX)] = 0.0
    keep_s: Annotated[float, Meta(ge=0, le=TTL_S_MAX)] = 60.0


class Wait(Target, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The session waits for a tool of this class. Its objects stay where they are, and what has left the memory is
    loaded again just before sessions of this class have come back so far."""

    session: Id
    session_class: Text = ""
    tiers: Names = []


class Pin(Target, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Not to be evicted at all for `ttl_s`."""

    ttl_s: Annotated[float, Meta(gt=0, le=TTL_S_MAX)] = 60.0
    session: Text = ""


class Retain(Target, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """To be evicted after everything else for `ttl_s`: it gives way when the pool is full of it."""

    ttl_s: Annotated[float, Meta(gt=0, le=TTL_S_MAX)] = 300.0
    session: Text = ""


class Demote(Target, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Leave the memory. What no tier has stays."""

    session: Text = ""


class Share(Target, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Be on these tiers (none: on any), where other nodes find it."""

    tiers: Names = []
    deadline_s: Seconds = 30.0
    session: Text = ""


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """End what earlier hints began: all of a message, or all of a session."""

    message_id: Text = ""
    session: Text = ""


Payload = Fetch | Prefetch | Wait | Pin | Retain | Demote | Share | Release
_P = TypeVar("_P", bound=msgspec.Struct)

# (type, version) → how its payload is read. A later version gets a line of its own.
DECODERS: dict[tuple[str, str], type[Payload]] = {
    ("kv.fetch", ACTION_VERSION): Fetch,
    ("kv.prefetch", ACTION_VERSION): Prefetch,
    ("kv.wait", ACTION_VERSION): Wait,
    ("kv.pin", ACTION_VERSION): Pin,
    ("kv.retain", ACTION_VERSION): Retain,
    ("kv.demote", ACTION_VERSION): Demote,
    ("kv.share", ACTION_VERSION): Share,
    ("kv.release", ACTION_VERSION): Release,
}


class Outcome(StrEnum):
    """What became of an action."""

    ACCEPTED = "accepted"  # done, for all objects
    CLIPPED = "clipped"  # done for the first of them: a budget, or a deadline, allowed no more
    DEFERRED = "deferred"  # not done yet: ask again with the same message_id
    REJECTED = "rejected"  # not understood, or not allowed
    MISSING = "missing"  # none of these objects is where the action needs it


class ActionOutcome(msgspec.Struct, frozen=True):
    """The outcome of one action. `objects`: how many it means; `done`: for how many it was done, and `nbytes` of them;
    `reason`: why not for all."""

    action_id: str
    outcome: Outcome
    reason: str = ""
    objects: int = 0
    done: int = 0
    nbytes: int = 0


class HintsReply(msgspec.Struct, frozen=True):
    """An outcome for each action, in their order."""

    message_id: str
    outcomes: list[ActionOutcome]


class RefusedError(Exception):
    """An action that is not carried out; its text is the reason."""


def decode(envelope: KvHintsEnvelope, action: KvHintAction) -> Payload:
    """The payload of an action. Raises `RefusedError`."""
    if envelope.protocol_version != PROTOCOL_VERSION:
        raise RefusedError(f"protocol version {envelope.protocol_version!r} is not known: send {PROTOCOL_VERSION!r}")
    payload = DECODERS.get((action.action_type, action.action_version))
    if payload is None:
        versions = [version for name, version in DECODERS if name == action.action_type]
        if versions:
            raise RefusedError(
                f"{action.action_type} has no version {action.action_version!r} here: send {' or '.join(versions)}"
            )
        raise RefusedError(
            f"{action.action_type!r} is no known action: use one of {', '.join(name for name, _ in DECODERS)}"
        )
    try:
        return msgspec.convert(action.payload, payload)
    except msgspec.ValidationError as error:
        raise RefusedError(f"the payload of {action.action_type} {action.action_version} is wrong: {error}") from error
