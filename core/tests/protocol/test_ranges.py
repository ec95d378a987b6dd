"""Every number of a message has its range in its type, and what is outside is refused before anything changes."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, get_args

import pytest
from msgspec import inspect, msgpack

from lmcache_core.errors import ProtocolError, UsageError
from lmcache_core.limits import DIMENSIONS_MAX, OBJECT_BYTES_MAX
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.protocol.codec import BUILT_BY_CLIENTS, decode_reply, encode, encode_request, join_keys

from .desk import NAMESPACE, Desk
from .test_undo import books

STRUCTS = [*get_args(m.Request), *get_args(m.Reply)]
U64_MAX = 2**64 - 1


def parts(kind: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The type, and every type inside it."""
    yield where, kind
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from parts(field.type, f"{where}.{field.name}")
    elif isinstance(kind, inspect.ListType):
        yield from parts(kind.item_type, f"{where}[]")
    elif isinstance(kind, inspect.DictType):
        yield from parts(kind.key_type, f"{where} key")
        yield from parts(kind.value_type, f"{where} value")
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from parts(each, where)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_of_a_message_has_a_range_or_a_length(struct: type[Any]) -> None:
    for where, kind in parts(inspect.type_info(struct), struct.__name__):
        match kind:
            case inspect.IntType():
                assert kind.ge is not None, where
                assert kind.ge >= 0, where
            case inspect.FloatType():
                assert None not in (kind.ge, kind.le), where
                assert math.isfinite(kind.le or math.inf), where
            case inspect.StrType() | inspect.BytesType() | inspect.ListType():
                assert kind.max_length is not None, where


OUT_OF_RANGE = [
    (m.RegisterLayout(5, -1, "uint8", [1], "", 0), "namespace"),
    (m.RegisterLayout(5, 1, "uint8", [1] * 7000, "", 0), "shape"),
    (m.RegisterLayout(5, 1, "uint8", [0], "", 0), "shape"),
    (m.RegisterLayout(5, 1, "uint8", [2**40] * 8, "", 0), "shape"),
    (m.RegisterLayout(5, 1, "uint8", [1], "", 0, "a\0b"), "label"),
    (m.CommitStore(5, 7, 0, -1), "count"),
    (m.CommitStore(5, 7, -1, 1), "first"),
    (m.CommitStore(5, 7, 0, 1025), "count"),
    (m.CommitStore(5, -7, 0, 1), "lease"),
    (m.AbortStore(5, 7, positions=bytes(4 * 1025)), "positions"),
    (m.PrepareStore(5, NAMESPACE, b"", -1), "lease"),
    (m.LookupRequest(5, NAMESPACE, b"", m.LookupOptions(wait_s=math.nan)), "options"),
    (m.LookupRequest(5, NAMESPACE, b"", m.LookupOptions(deadline_s=math.inf)), "options"),
    (m.LookupRequest(5, NAMESPACE, b"", m.LookupOptions(pin_s=-1.0)), "options"),
    (m.LookupRequest(5, NAMESPACE, b"", m.LookupOptions(window=-1)), "options"),
    (m.WaitStored(5, NAMESPACE, b"", math.nan), "wait_s"),
    (m.Pin(5, NAMESPACE, b"", 1e300), "ttl_s"),
    (m.FreeLookupLocks(5, [-1]), "promises"),
    (m.EndSession(5, leases=[-1]), "leases"),
    (m.Attach(5, -1, 0), "row"),
    (m.QueryLookupHits(5, -1), "job"),
    (m.SetQuota(5, "t", [-1]), "namespaces"),
    (m.SetQuota(5, "t", [1], {"l1": {"limit_bytes": -1}}), "stores"),
    (m.ReportBlocks(5, NAMESPACE, b"", [b""], None, 16), "hashes"),
    (m.ReportBlocks(5, NAMESPACE, b"", [b"h"], None, 0), "block_size"),
]


@pytest.mark.parametrize(("request_", "field"), OUT_OF_RANGE, ids=lambda each: each if isinstance(each, str) else "")
def test_a_value_out_of_range_is_refused_by_name_before_anything_changes(
    desk: Desk, request_: m.Message, field: str
) -> None:
    peer = desk.peer(attached=True)
    before = books(desk)
    reply: Any = desk.say(peer, request_)
    assert (reply.rid, reply.code) == (5, "USAGE")
    assert f"its {field} is out of range" in reply.message
    assert books(desk) == before
    desk.say(peer, m.EndSession(9, goodbye=True))


@pytest.mark.parametrize("rid", [-1, True, 0, "x", None, 1.5, [1]])
def test_a_request_whose_id_is_no_u64_is_answered_with_one(desk: Desk, rid: Any) -> None:
    peer = desk.peer(attached=False)
    desk.server.dispatch.on_frame(peer, memoryview(msgpack.encode(["noop", rid, "more"])))
    assert peer.replies[-1].rid == 0
    desk.say(peer, m.EndSession(9, goodbye=True))


def test_the_largest_ids_are_served(desk: Desk) -> None:
    peer = desk.peer(attached=True)
    layout = Layout("uint8", (4096,))
    registered: Any = desk.say(
        peer, m.RegisterLayout(U64_MAX, U64_MAX, layout.dtype, list(layout.shape), "", layout.fingerprint)
    )
    assert isinstance(registered, m.LayoutRegistered)
    key = os.urandom(32)
    granted = desk.ask(peer, m.PrepareStore(1, U64_MAX, key), m.Granted)
    desk.say(peer, m.CommitStore(2, granted.lease, 0, 1))
    found = desk.ask(peer, m.LookupRequest(3, U64_MAX, key), m.LookupReply)
    assert found.hits == 1
    desk.say(peer, m.EndSession(9, goodbye=True))


def test_positions_that_are_doubled_or_beyond_a_lease_cost_nobody_anything(desk: Desk) -> None:
    peer = desk.peer(attached=True)
    granted = desk.ask(peer, m.PrepareStore(1, NAMESPACE, os.urandom(64)), m.Granted)
    beyond = desk.ask(peer, m.CommitStore(2, granted.lease, 1, 5), m.Error)
    assert beyond.code == "USAGE"
    packed = b"".join(at.to_bytes(4, "little") for at in (1, 1, 0))
    doubled = desk.ask(peer, m.CommitStore(3, granted.lease, positions=packed), m.SettledReply)
    assert doubled.outcomes == bytes(3)
    books(desk)
    desk.say(peer, m.EndSession(9, goodbye=True))


@pytest.mark.parametrize("reply", [
    m.Granted(1, -1, 1.0, b"", b"", b""),
    m.Granted(1, 1, math.nan, b"", b"", b""),
    m.Granted(1, 1, 1.0, bytes(1025), b"", b""),
    m.LookupReply(1, b"", b"", -1, True),
    m.LookupReply(1, b"", b"", 0, True, deadline_s=math.inf),
    m.Done(-1),
    m.Renewed(1, -1.0),
    m.Welcome(1, 2, 1, "s", 1 << 30, [], 0, 256, 1.0, 1.0),
    m.Welcome(1, 2, 1, "s", 1, ["p", "shm", -1], 0, 256, 1.0, 1.0),
    m.ChunkSize(1, 0),
])  # fmt: skip
def test_a_clients_decoder_refuses_invalid_replies(reply: m.Message) -> None:
    with pytest.raises(ProtocolError):
        decode_reply(encode(reply))


@pytest.mark.parametrize("shape", [(), (1,) * 7000, (0,), (-1,), (2**70,), (OBJECT_BYTES_MAX,) * DIMENSIONS_MAX])
def test_a_layouts_dimensions_are_bounded_before_they_are_multiplied(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        Layout("float64", shape)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(tmp_path_factory.mktemp("desk"), stack)


@pytest.mark.parametrize(
    ("request_", "field"),
    [each for each in OUT_OF_RANGE if type(each[0]) not in BUILT_BY_CLIENTS],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_client_does_not_send_what_the_server_would_count_as_garbage(request_: m.Message, field: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be sent: .*its {field} is out of range"):
        encode_request(request_)


@pytest.mark.parametrize("code", ["H", "Q"])
def test_keys_of_larger_items_are_counted_in_bytes(code: str) -> None:
    wide = array(code, bytes(32 * array(code).itemsize))
    assert len(wide) == 32
    for buffer in (wide, memoryview(wide), memoryview(wide.tobytes()).cast(code)):
        with pytest.raises(UsageError, match=f"key 1 has {buffer.itemsize * 32} bytes, not 32"):
            join_keys([bytes(32), buffer])
    same = array(code, bytes(range(32)))
    assert join_keys([same, bytearray(32)]) == bytes(range(32)) + bytes(32)
