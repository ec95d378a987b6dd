"""The prefixes that an engine stores, for a program that makes its prompts: it puts documents into the order of which
most is stored.

The connector writes a description of them to a file, if it is told where. `lmcache_blend.Planner` takes what is read
from it. This needs neither vLLM nor torch: the program that asks is rarely the one that computes.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lmcache_core import Client, KeyGroup, Layout
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.files import open_regular, replace_file
from lmcache_core.tokens.namespace import Namespace, NamespaceOfDigest
from lmcache_core_vllm.groups import Group, Kind
from lmcache_core_vllm.namespaces import Hashing

log = logging.getLogger("vllm.lmcache_core")

FORMAT = 1
PICKLE = 5  # the protocol that vLLM's "sha256" hashes, which is the highest one of each Python from 3.8 on
_BYTES_MAX = 1 << 20

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Objects(msgspec.Struct, frozen=True):
    """A namespace by its digest, which derives keys and is as secret as its salt, and the layout of its blocks."""

    digest: Digest
    layout: str


class Described(msgspec.Struct, frozen=True):
    """What an engine stores: blocks of `block_tokens` tokens in `ranks` namespaces. `hash_tokens`: of those that vLLM
    hashes; `algorithm`, `seed`: how."""

    format: int
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    hash_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    algorithm: str
    seed: str
    ranks: Annotated[list[Objects], Meta(min_length=1, max_length=4096)]


def described(groups: Sequence[Group], ranks: Sequence[Sequence[Namespace]], hashing: Hashing) -> Described:
    """Of an engine with these KV groups and, of each rank, namespaces. Raises `UsageError` for one whose prefixes are
    not searched from here."""
    group = groups[0]
    if len(groups) > 1 or group.kind is not Kind.FULL:
        raise UsageError(
            "plans are for models with one KV group, of full attention: what this one needs of a prefix depends on "
            "where the prefix ends"
        )
    objects = [Objects(each[group.number].digest.hex(), each[group.number].layout.text) for each in ranks]
    hash_tokens = group.block_tokens // group.hashes_per_block
    return Described(FORMAT, group.block_tokens, hash_tokens, hashing.algorithm, hashing.seed, objects)


class Describer:
    """Keeps the description in a file as the engine is."""

    def __init__(self, path: str) -> None:
        """`path`: empty for none."""
        self._path = Path(path) if path else None
        self._written: Described | None = None

    def describe(
        self, groups: Sequence[Group], ranks: Sequence[Sequence[Namespace]], hashing: Callable[[], Hashing]
    ) -> None:
        """Write it, if it has changed or the file is gone. Whoever reads it derives keys, so only the engine's user
        may, at first."""
        if self._path is None or not ranks:
            return
        try:
            now = described(groups, ranks, hashing())
            if now != self._written or not self._path.exists():
                replace_file(self._path, msgspec.json.encode(now))
        except (OSError, UsageError) as error:
            log.error("description %s is not written: %s", self._path, error)
            self._path = None
        else:
            self._written = now


@dataclass(frozen=True)
class BlockPrefixes:
    """The prefixes of a described engine, as `lmcache_blend.Planner` takes them. `cache_salt`: of the requests, as the
    API has it. Requests with LoRA adapters or images have other block hashes, which are not made here."""

    about: Described
    cache_salt: str = ""

    @classmethod
    def read(cls, path: Path, cache_salt: str = "") -> BlockPrefixes:
        """Of a file that a connector wrote. Raises `SettingsError` if it is none."""
        cure = 'set "description" in kv_connector_extra_config, and send the engine a first request'
        try:
            with open_regular(path) as file:
                about = msgspec.json.decode(file.read(_BYTES_MAX), type=Described)
            _namespaces(about)
            if about.format == FORMAT and about.block_tokens % about.hash_tokens:
                raise UsageError(f"blocks of {about.block_tokens} tokens are not made of {about.hash_tokens}")
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}", cure=cure) from error
        except (ValueError, RecursionError, UsageError) as error:
            raise SettingsError(f"{path} is no description of an engine: {error}", cure=cure) from error
        if about.format != FORMAT:
            raise SettingsError(f"{path} has format {about.format}, and this reads {FORMAT}", cure=cure)
        _hash_function(about.algorithm)
        return cls(about, cache_salt)

    @property
    def chunk_tokens(self) -> int:
        """Of a block."""
        return self.about.block_tokens

    def register(self, client: Client) -> None:
        """With the server that is there now."""
        for namespace in _namespaces(self.about):
            client.register_layout(namespace)

    def names(self, words: Any, previous: bytes | None) -> list[bytes]:
        """vLLM's hashes of whole blocks. `words`: token ids in an array of numpy's."""
        hashed, step = _hash_function(self.about.algorithm), self.about.hash_tokens
        made, whole = [], len(words) // self.chunk_tokens * self.chunk_tokens
        extra = (("cache_salt", self.cache_salt),) if self.cache_salt and previous is None else None
        parent = hashed(self.about.seed) if previous is None else previous
        tokens = words[:whole].tolist()
        for first in range(0, whole, step):
            parent = hashed((parent, tuple(tokens[first : first + step]), extra))
            made.append(parent)
            extra = None
        return made[self.chunk_tokens // step - 1 :: self.chunk_tokens // step]

    def stored(self, client: Client, names: Sequence[bytes]) -> int:
        """How many of the first blocks all ranks have."""
        hashing = Hashing(self.about.algorithm, self.about.seed)
        keys = [KeyGroup(each, hashing.keys(names, each)) for each in _namespaces(self.about)]
        return client.lookup_many(keys, unit_tokens=[1] * len(keys), ask=False).tokens


def _namespaces(about: Described) -> list[NamespaceOfDigest]:
    return [NamespaceOfDigest.of(bytes.fromhex(each.digest), Layout.from_text(each.layout)) for each in about.ranks]


def _hash_function(algorithm: str) -> Callable[[Any], bytes]:
    """As vLLM hashes a block: its parent's hash, its tokens, and what else its KV depends on. Raises
    `SettingsError`."""
    if algorithm == "sha256":
        return lambda given: hashlib.sha256(pickle.dumps(given, PICKLE)).digest()
    if algorithm == "sha256_cbor":
        try:
            cbor2 = import_module("cbor2")
        except ImportError as error:
            raise SettingsError("plans for sha256_cbor need cbor2", cure="pip install cbor2") from error
        return lambda given: hashlib.sha256(cbor2.dumps(given, canonical=True)).digest()
    raise SettingsError(
        f"the engine hashes its blocks by {algorithm!r}, and plans know sha256 and sha256_cbor",
        cure="start it with --prefix-caching-hash-algo sha256",
    )
