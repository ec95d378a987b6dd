"""What two nodes say to each other.

A frame is its length (u32, little-endian) and a MessagePack array: tag and fields. On a connection a request follows
the answer to the one before it. What is large follows its frame as plain bytes whose number the frame says: objects
after `Reading`, blocks after `DigestReply`.

    owner                    reader
    Challenge ──────────────▶
              ◀────────────── Hello          (proof, if the cluster has a secret)
    Welcome   ──────────────▶                (the owner's proof)
              ◀────────────── LookupAndLock | Unlock | Read | DigestRequest
    Found | Done | Reading, objects, Trailer | DigestReply, blocks ▶
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from lmcache_peer.limits import NAMES_BYTES_MAX, NAMES_MAX, NONCE_BYTES, TEXT_CHARS_MAX

VERSION = 1

U64 = Annotated[int, msgspec.Meta(ge=0)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
NodeName = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX, pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*$")]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(max_length=32)]
Names = Annotated[bytes, msgspec.Meta(max_length=NAMES_BYTES_MAX)]
Flags = Annotated[bytes, msgspec.Meta(max_length=NAMES_MAX)]


class PeerMessage(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One frame."""


class Challenge(PeerMessage, frozen=True):
    """The owner's first word. `version`: of this protocol; `boot`: a number of this run of its process."""

    version: int
    node: NodeName
    boot: U64
    nonce: Nonce


class Hello(PeerMessage, frozen=True):
    """The reader's. `proof`: empty without a secret."""

    version: int
    node: NodeName
    nonce: Nonce
    proof: Proof


class Welcome(PeerMessage, frozen=True):
    """Admitted. `proof`: the owner's own."""

    proof: Proof


class Refused(PeerMessage, frozen=True):
    """Not admitted, or not answered; the connection ends."""

    why: Text


class LookupAndLock(PeerMessage, frozen=True):
    """Which of these tier keys are there? They stay, for some seconds, until `Unlock`, a read with `unlock`, or the end
    of the connection."""

    names: Names


class Found(PeerMessage, frozen=True):
    """1 for each name that is there."""

    there: Flags


class Unlock(PeerMessage, frozen=True):
    """What was locked for this node under these names may go."""

    names: Names


class Done(PeerMessage, frozen=True):
    """It was done."""


class Read(PeerMessage, frozen=True):
    """Send these objects. `unlock`: they need not stay any longer."""

    names: Names
    unlock: bool


class Reading(PeerMessage, frozen=True):
    """The bytes of each object, header included, 0 for one that is not there; then they follow, one after another."""

    sizes: Annotated[list[U32], msgspec.Meta(max_length=NAMES_MAX)]


class Trailer(PeerMessage, frozen=True):
    """After the last byte: 1 for each object that did not stay the same while it was sent."""

    moved: Flags


class DigestRequest(PeerMessage, frozen=True):
    """What has changed in the digest since this version (0: everything)?"""

    since: U64


class DigestReply(PeerMessage, frozen=True):
    """`blocks` of 64 bytes make the digest, a power of two. `whole`: all of them follow; otherwise `changed` blocks,
    each after its number (u32). `objects`: how many it stands for."""

    version: U64
    blocks: U32
    whole: bool
    changed: U32
    objects: U64


PeerRequest = LookupAndLock | Unlock | Read | DigestRequest
PeerAnswer = Found | Done | Reading | Trailer | DigestReply | Refused
