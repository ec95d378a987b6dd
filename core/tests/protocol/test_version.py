"""The messages of a protocol version never change: sides that would not understand each other refuse at hello."""

from __future__ import annotations

import hashlib

import msgspec

from lmcache_core.protocol import messages as m
from lmcache_core.protocol.replies import Reply
from lmcache_core.protocol.requests import Request

MESSAGES = "164e8ebe6965f911"


def shape(kind: type[msgspec.Struct]) -> dict[str, object]:
    """All messages of a union, with every struct inside them: tags, fields in order, their types and defaults."""
    schemas, components = msgspec.json.schema_components([kind])
    return {"union": schemas, "structs": components}


def without_words(part: object) -> object:
    """The same without docstrings, and without how many fields have no default, which releases of msgspec count
    differently: each field says itself whether it has one."""
    if isinstance(part, dict):
        left_out = {"description", "minItems"}
        return {name: without_words(value) for name, value in sorted(part.items()) if name not in left_out}
    if isinstance(part, list):
        return [without_words(value) for value in part]
    return part


def test_messages_change_only_with_the_protocol_version() -> None:
    """Messages are arrays, so a field that was moved, removed or put into another one is refused by the other side at
    every call, which its user sees as misses. At hello it would have been refused in words."""
    said = msgspec.json.encode(without_words([shape(Request), shape(Reply)]), order="sorted")
    assert hashlib.sha256(said).hexdigest()[:16] == MESSAGES, (
        f"the messages are not those of protocol {m.PROTOCOL_VERSION_MAX}: if the last release would refuse or misread "
        "what we send, or we what it sends, raise PROTOCOL_VERSION_MIN and PROTOCOL_VERSION_MAX; then note the digest"
    )
