"""The namespace: everything that must match before one run may reuse the bytes of another."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property

from lmcache_core.errors import UsageError
from lmcache_core.limits import LABEL_CHARS_MAX
from lmcache_core.pool.layout import Layout

# First in the canonical bytes. A new way to serialize a namespace gets a new tag, so that keys of the two ways never
# collide.
_TAG = b"lmcache-core namespace 1"

# What a label is made of: nothing that steers a terminal, forges a line of a log, or means something in HTML, in a
# shell or in Prometheus' text.
LABEL_LETTERS = "A-Za-z0-9 ._/:@+=,()#-"
_OTHER = re.compile(f"[^{LABEL_LETTERS}]")

KV_SHARDS_MAX = 1 << 16  # far above any tensor parallel × pipeline parallel; more is a mistake


@dataclass(frozen=True)
class Namespace:
    """What chunk keys are derived from, besides the tokens.

    `model` names the model as the operator chooses: two names are two namespaces. `layout` is that of one chunk.
    `weights_version` separates two states of the weights under one name. `kv_shard` is (i, n): the i-th of n parts of
    the KV; KV that is equal on all ranks is one shard, (0, 1), and is stored once. `tenant_salt` separates tenants:
    without the salt nobody can compute a key, so it is a secret and never part of the repr. `format` says what the
    bytes of an opaque layout mean: the backend, its instruction set, block size and memory layout, the cache's dtype;
    anything that makes the bytes of one engine useless to another. `label` is what people see instead of the id (in
    `status`, metrics and `explain`) and no part of the namespace: two that differ only by it are equal. By default it
    is made of the model, the weights version, the dtype and the shard.

    Raises `UsageError` if a field cannot be part of a namespace.
    """

    model: str
    layout: Layout
    weights_version: str = ""
    kv_shard: tuple[int, int] = (0, 1)
    tenant_salt: str = field(default="", repr=False)
    format: str = ""
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise UsageError(f"namespace layout is a {type(self.layout).__name__}: give a Layout")
        for name in ("model", "weights_version", "tenant_salt", "format"):
            _text_bytes(name, getattr(self, name))
        if not self.model:
            raise UsageError("namespace model is empty: name the model whose KV is cached")
        shard = self.kv_shard
        if (
            not isinstance(shard, tuple)
            or len(shard) != 2
            or not all(type(n) is int for n in shard)
            or not 0 <= shard[0] < shard[1] <= KV_SHARDS_MAX
        ):
            raise UsageError(f"namespace kv_shard {shard!r} must be (i, n) with 0 <= i < n <= {KV_SHARDS_MAX}")
        if not isinstance(self.label, str) or len(self.label) > LABEL_CHARS_MAX or _OTHER.search(self.label):
            raise UsageError(
                f"namespace label {self.label!r:.200} must be at most {LABEL_CHARS_MAX} ASCII letters, digits, spaces "
                "and ._/:@+=,()#-"
            )

    @cached_property
    def public_label(self) -> str:
        """The label that the server gets: the given one, or the default. Never the salt."""
        if self.label:
            return self.label
        version = label_of_weights(self.weights_version)
        opaque = "" if self.layout.dtype == "uint8" else f"/{self.layout.dtype}"
        shard = f" {self.kv_shard[0]}/{self.kv_shard[1]}" if self.kv_shard[1] > 1 else ""
        return label_from(self.model, version + opaque + shard)

    @cached_property
    def canonical(self) -> bytes:
        """The namespace as bytes: every field prefixed with its length (u64, little-endian), in a fixed order.

        No two different namespaces have equal bytes, whatever their fields contain. The bytes include the salt: hash
        them, never log or send them.
        """
        layout = self.layout
        parts = [
            _TAG,
            _text_bytes("model", self.model),
            _text_bytes("weights_version", self.weights_version),
            layout.dtype.encode(),
            _numbers_bytes(layout.shape),
            layout.memory_format.encode(),
            _numbers_bytes(self.kv_shard),
            _text_bytes("tenant_salt", self.tenant_salt),
        ]
        if self.format:  # one more field changes the length: no namespace without a format has these bytes
            parts.append(_text_bytes("format", self.format))
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes, 32 bytes: the predecessor of the first chunk's key."""
        return hashlib.sha256(self.canonical).digest()

    @cached_property
    def id(self) -> int:
        """The first 8 bytes of the digest as a little-endian u64: the only part of a namespace that the kernel sees."""
        return int.from_bytes(self.digest[:8], "little")


@dataclass(frozen=True)
class NamespaceOfId(Namespace):
    """A namespace of which only the id is known, for whoever has keys from elsewhere: reads and writes go by id and
    layout. No keys can be derived in it. Made by `namespace_of_id`."""

    known_id: int = 0

    @cached_property
    def public_label(self) -> str:
        return ""  # whoever knows the namespace gives it a label

    @cached_property
    def canonical(self) -> bytes:
        raise UsageError(f"of the namespace {self.known_id:016x} only the id is known: no keys can be derived in it")

    @cached_property
    def id(self) -> int:
        return self.known_id


@dataclass(frozen=True)
class NamespaceOfDigest(NamespaceOfId):
    """A namespace of which only the digest is known, for whoever may have keys and not the salt: keys can be derived in
    it."""

    known_digest: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, digest: bytes, layout: Layout) -> NamespaceOfDigest:
        """The namespace with this digest."""
        number = int.from_bytes(digest[:8], "little")
        return cls(f"{number:016x}", layout, known_id=number, known_digest=digest)

    @cached_property
    def digest(self) -> bytes:
        return self.known_digest


def namespace_of_id(namespace_id: int, layout: Layout) -> NamespaceOfId:
    """The namespace with this id, as a tier's key or a peer names it."""
    return NamespaceOfId(f"{namespace_id:016x}", layout, known_id=namespace_id)


def label_from(model: str, rest: str = "") -> str:
    """A label of a model's name, which may be a long path, and of what else tells its namespaces apart."""
    rest = _OTHER.sub("_", rest)[-LABEL_CHARS_MAX // 2 :]
    name = _OTHER.sub("_", model)
    end = name[-(LABEL_CHARS_MAX - len(rest)) :]  # the end of a path says more
    if end != name and not name.removesuffix(end).endswith("/"):
        end = end.partition("/")[2] or end  # without half of a folder's name
    return end + rest


def label_of_weights(version: str) -> str:
    """The part of a label by which the state of a model's weights is known; empty without a version."""
    return _OTHER.sub("_", f"@{version[:12]}") if version else ""


def _text_bytes(name: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise UsageError(f"namespace {name} is a {type(text).__name__}: give a string")
    try:
        return text.encode()
    except UnicodeEncodeError:
        # The text stays out of the message, and the cause out of the chain, because it may be the salt.
        raise UsageError(f"namespace {name} is not valid Unicode (lone surrogates): decode it properly") from None


def _numbers_bytes(numbers: tuple[int, ...]) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers)
