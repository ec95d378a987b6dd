"""The chunks of a model as other programs know them: without its salt, by the digests of its namespaces. In a call to a
server, or in a file, for a program that computes the same model and stores some of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from lmcache_blend.chunks import Chunks
from lmcache_blend.cutting import Lengths
from lmcache_blend.messages import Extra, Objects, RegisterRope
from lmcache_blend.rope import Rope
from lmcache_blend.space import ChunkSpace
from lmcache_core import Client, Layout
from lmcache_core.errors import SettingsError, UsageError
from lmcache_core.files import open_regular, replace_file
from lmcache_core.tokens.namespace import NamespaceOfDigest

FORMAT = 1
_BYTES_MAX = 1 << 20


class DescribedChunks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one model. `model`, `weights`: as in its namespaces; `config`: its configuration, as far as KV depends on it;
    `extra`: as for `Chunks.find`, in hexadecimal digits; `space`: what keys are made of, as secret as its salt."""

    format: int
    model: str
    weights: str
    config: dict[str, Any]
    extra: Extra
    space: RegisterRope

    @classmethod
    def of(cls, chunks: Chunks, *, config: dict[str, Any], extra: bytes = b"") -> DescribedChunks:
        """Of a program's own chunks."""
        space = chunks.space
        return cls(FORMAT, space.model, space.weights_version, config, extra.hex(), registration(chunks, space.model))

    @classmethod
    def read(cls, path: Path) -> DescribedChunks:
        """Of a file. Raises `SettingsError` if it is none."""
        cure = "have the program that blends write it: `CachedGenerator.describe_chunks`, or `DescribedChunks.write`"
        try:
            with open_regular(path) as file:
                found = msgspec.json.decode(file.read(_BYTES_MAX), type=cls)
            space_of(found.space)
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}", cure=cure) from error
        except (ValueError, RecursionError, UsageError) as error:
            raise SettingsError(f"{path} describes no chunks: {error}", cure=cure) from error
        if found.format != FORMAT:
            raise SettingsError(f"{path} has format {found.format}, and this reads {FORMAT}", cure=cure)
        return found

    def write(self, path: Path) -> None:
        """To a file that at first only this user may read. Raises `OSError`."""
        replace_file(path, msgspec.json.encode(self))


def chunks_of(client: Client, call: RegisterRope) -> Chunks:
    """The chunks of a registration. Raises `UsageError` where its parts do not fit each other."""
    prefixes = [_namespace_of(each) for each in call.prefixes] or None
    return Chunks(client, space_of(call), prefixes, call.prefix_chunk_tokens)


def space_of(call: RegisterRope) -> ChunkSpace:
    """The space of a registration. Raises `UsageError`."""
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


def registration(chunks: Chunks, name: str, by: str = "") -> RegisterRope:
    """The call that registers the space of these chunks, for a program that has them. `by`: what it is called, for
    those who find the name taken; empty: its number as a process."""
    space = chunks.space
    return RegisterRope(
        space=name,
        by=by or f"process {os.getpid()}",
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
