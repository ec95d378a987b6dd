"""What a request names: a namespace by its label or id, whose layout the server knows, and the keys of a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmcache_core.errors import UsageError
from lmcache_core.limits import EXPLAIN_KEYS_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.keys import chunk_keys
from lmcache_core.tokens.namespace import Namespace

Known = Mapping[str, Mapping[str, Any]]  # the namespaces of `status`, by id
LISTED_MAX = 5
ID = "^(0x)?[0-9a-fA-F]{1,16}$"
_ID, _LAYOUT = re.compile(ID), re.compile(r"(\w+)\[([\d×]+)\](?: (\w+))?")  # as `str(layout)` writes it


def id_of(text: str) -> int:
    """Of a namespace. Raises `UsageError` if it is none."""
    if not _ID.fullmatch(text):
        raise UsageError(f"{text[:80]!r} is not a namespace id: give its 16 hexadecimal digits")
    return int(text, 16)


def named(text: str, known: Known) -> int:
    """The id of the namespace with this label or id."""
    found = [name for name, row in known.items() if row["label"] == text]
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} namespaces have the label {text!r}: give the id of one: {_listed(found, known)}"
        )
    if not found and not _ID.fullmatch(text):
        raise UsageError(f"the server knows no namespace {text[:80]!r}: {_known(known)}")
    return int(found[0] if found else text, 16)


def known_layout(namespace: int, known: Known) -> Layout:
    """The layout of its objects, if the server knows the namespace."""
    name = f"{namespace:016x}"
    found = _LAYOUT.fullmatch(known[name]["layout"]) if name in known else None
    if found is None:
        raise UsageError(f"the server knows no namespace {name}, so give its dtype and shape, too; {_known(known)}")
    return Layout(found[1], tuple(map(int, found[2].split("×"))), found[3] or "")


def prompt_keys(tokens: Sequence[int], space: Namespace, namespace: int, chunk_tokens: int) -> list[bytes]:
    """The keys of a prompt in the `space` that a request describes, if that is the namespace that it names."""
    if space.id != namespace:
        raise UsageError(
            f"this description is that of namespace {space.id:016x}, and not of {namespace:016x}: compare model, "
            "weights version, KV shard, tenant salt and format with what the engine uses"
        )
    chunks = len(tokens) // chunk_tokens
    if not chunks:
        raise UsageError(f"{len(tokens)} tokens are less than one chunk of {chunk_tokens}, so none of them are cached")
    if chunks > EXPLAIN_KEYS_MAX:
        raise UsageError(
            f"{len(tokens):,} tokens are {chunks:,} chunks of {chunk_tokens}, and one request explains "
            f"{EXPLAIN_KEYS_MAX}: give the first {EXPLAIN_KEYS_MAX * chunk_tokens:,} tokens"
        )
    return chunk_keys(tokens, space, chunk_tokens)


def _known(known: Known) -> str:
    return f"it knows {_listed(known, known)}" if known else "it knows none: has an engine connected to it?"


def _listed(names: Iterable[str], known: Known) -> str:
    shown = [f"{known[name]['label'] or 'no label'} ({name}, {known[name]['layout']})" for name in names]
    more = [f"{len(shown) - LISTED_MAX} more"] if len(shown) > LISTED_MAX else []
    return ", ".join(shown[:LISTED_MAX] + more)
