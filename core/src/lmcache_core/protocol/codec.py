"""Messages to frames and back, and the blobs inside them."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from sys import byteorder
from typing import Any, get_args

import msgspec

from lmcache_core.errors import CacheError, LimitError, ProtocolError, UsageError
from lmcache_core.guard import guarded
from lmcache_core.limits import BATCH_KEYS_MAX, ERROR_CHARS_MAX, FRAME_BYTES_MAX, KEY_BYTES, PLUGIN_STATUS_BYTES_MAX
from lmcache_core.pool.backing import Backing
from lmcache_core.pool.header import PoolInfo
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.messages import Error, Message, Reply, Request

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_anything: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

# Text that is not UTF-8 raises a ValueError that is not a MsgspecError.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
_BY_TAG: dict[str, type[Any]] = {each.__struct_config__.tag: each for each in get_args(Request)}
_OUT_OF_RANGE = re.compile(
    r"Expected `\w+` (?:[<>]|of length [<>]|matching).* - at `(?:key` in `)?\$\[(\d+)\].*`", re.DOTALL
)

# Nothing in these is a caller's but keys, which were checked; they are every store's and retrieve's.
BUILT_BY_CLIENTS = frozenset({
    m.Noop, m.PrepareStore, m.CommitStore, m.AbortStore, m.PrepareRetrieve, m.FinishRead, m.RenewLease
})  # fmt: skip

encode = _encoder.encode


# The decoder itself, for the loop: a function around it costs more than all the ranges. Raises `UNREADABLE`; then
# `refusal_of` says why.
read_request = _requests.decode


def refusal_of(frame: bytes | bytearray | memoryview, error: Exception) -> CacheError:
    """Why the frame could not be read: `UsageError` for a request with a value out of its range (see `ranges.py`),
    `ProtocolError` for anything else."""
    found = _OUT_OF_RANGE.fullmatch(str(error))
    try:
        tag = _anything.decode(frame)[0] if found else ""  # the rest of the frame may be cut
    except UNREADABLE as cut:
        error, found = cut, None
    if found is None:
        return ProtocolError(f"not a request of this protocol: {error}")
    field = _BY_TAG[tag].__struct_fields__[int(found[1]) - 1]  # the tag comes before the fields
    return UsageError(f"{tag}: its {field} is out of range: {error}")


def rid_of(frame: bytes | bytearray | memoryview) -> int:
    """The request id of a frame that is not a request but looks like one; else 0. Its sender waits for an answer."""
    try:
        match _anything.decode(frame):
            case [str(), rid, *_] if type(rid) is int and rid > 0:
                return rid
    except UNREADABLE:
        pass
    return 0


def decode_reply(frame: bytes | bytearray | memoryview) -> Reply:
    """The reply in a frame. Raises `ProtocolError` for anything else."""
    try:
        return _replies.decode(frame)
    except UNREADABLE as error:
        raise ProtocolError(f"not a reply of this protocol: {error}") from error


def encode_request(message: Message) -> bytes:
    """The request as a frame that the server can read. Raises `LimitError` if it would be too large, and `UsageError`
    if it holds what no frame can (a number beyond u64, half a surrogate pair), or a value out of its range: the
    server's own decoder is asked, so whatever a caller passes, a client never sends garbage."""
    try:
        frame = encode(message)
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(frame) > FRAME_BYTES_MAX:
        raise LimitError(f"{type(message).__name__} takes {len(frame):,} bytes, and a frame holds {FRAME_BYTES_MAX:,}")
    if type(message) not in BUILT_BY_CLIENTS:
        try:
            read_request(frame)
        except UNREADABLE as error:
            raise UsageError(f"{type(message).__name__} cannot be sent: {refusal_of(frame, error)}") from error
    return frame


def plain(status: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What a plugin says of itself, for the frame of `status`. Raises what it raises, and `LimitError` and others for
    what cannot be sent: that is its own fault, and must not cost the others their figures."""
    found = dict(status())
    nbytes = len(encode(found))
    if nbytes > PLUGIN_STATUS_BYTES_MAX:
        raise LimitError(f"{nbytes:,} bytes of figures, and the limit is {PLUGIN_STATUS_BYTES_MAX:,}")
    return found


def error_reply(rid: int, error: CacheError) -> Error:
    """The error frame for an exception. A message too long for a frame, because it quotes the request, is cut; what is
    no UTF-8 in it, such as a file's name, is escaped."""
    text = guarded(lambda second: f"its text cannot be read: {type(second).__name__}", str, error)
    text = text.encode("utf-8", "backslashreplace").decode()
    return Error(rid, error.code, text[:ERROR_CHARS_MAX], str(error.retry))


def join_keys(keys: Sequence[bytes]) -> bytes:
    """The blob of keys. Raises `UsageError` naming the first key of a wrong length."""
    try:
        blob = b"".join(keys)
    except TypeError as error:
        raise UsageError(f"keys must be bytes-like objects of {KEY_BYTES} bytes each: {error}") from None
    if len(blob) != KEY_BYTES * len(keys) or not {KEY_BYTES}.issuperset(map(len, keys)):
        for position, key in enumerate(keys):
            nbytes = memoryview(key).nbytes  # `len` counts items, which may be larger
            if nbytes != KEY_BYTES:
                raise UsageError(
                    f"key {position} has {nbytes} bytes, not {KEY_BYTES}: "
                    "derive keys with lmcache_core.tokens, or hash yours with SHA-256"
                )
    return blob


def split_keys(blob: bytes) -> list[bytes]:
    """The keys in a blob. Raises `ProtocolError` if it is not a whole number of keys, or too many."""
    nbytes = len(blob)
    if nbytes % KEY_BYTES:
        raise ProtocolError(f"{nbytes} bytes of keys is not a multiple of {KEY_BYTES}")
    if nbytes > BATCH_KEYS_MAX * KEY_BYTES:
        raise LimitError(
            f"{nbytes // KEY_BYTES} keys in one frame, and it holds {BATCH_KEYS_MAX}: send pages under one lease"
        )
    return [blob[at : at + KEY_BYTES] for at in range(0, nbytes, KEY_BYTES)]


def pack_u64(values: array[int]) -> bytes:
    """Little-endian u64, packed."""
    if byteorder == "big":
        values = array("Q", values)
        values.byteswap()
    return values.tobytes()


def unpack_u64(blob: bytes) -> array[int]:
    """The inverse of `pack_u64`."""
    if len(blob) % 8:
        raise ProtocolError(f"{len(blob)} bytes are not a whole number of u64")
    values = array("Q", blob)
    if byteorder == "big":
        values.byteswap()
    return values


def pack_positions(positions: Sequence[int]) -> bytes:
    """Positions of a lease as little-endian u32, packed."""
    values = array("I", positions)
    if byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_positions(blob: bytes) -> array[int]:
    """The inverse of `pack_positions`."""
    if len(blob) % 4 or len(blob) > 4 * BATCH_KEYS_MAX:
        raise ProtocolError(f"{len(blob)} bytes are not a list of at most {BATCH_KEYS_MAX} positions")
    values = array("I", blob)
    if byteorder == "big":
        values.byteswap()
    return values


def pool_info_to_wire(info: PoolInfo) -> list[Any]:
    """The fields in order."""
    name, backing, *numbers = astuple(info)
    return [name, str(backing), *numbers]


def pool_info_from_wire(fields: Sequence[Any]) -> PoolInfo:
    """The inverse. Raises `ProtocolError` for anything else."""
    try:
        name, backing, *numbers = fields
        if not isinstance(name, str) or not all(type(number) is int for number in numbers):
            raise ProtocolError(f"{fields!r} does not describe a pool")
        return PoolInfo(name, Backing(backing), *numbers)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{fields!r} does not describe a pool") from error
