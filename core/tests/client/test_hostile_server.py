"""A server that answers with what no server may say costs a client its answer, and never its process."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.pool.layout import Layout
from lmcache_core.protocol import messages as m
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

SPACE = Namespace("model", Layout("uint8", (4096,)))
KEYS = [bytes([number]) * 32 for number in range(1, 4)]


BENT: dict[str, dict[str, object]] = {
    "a status that does not exist": {"statuses": bytes([200]) * 3},
    "a status too few": {"statuses": bytes(2)},
    "a status too many": {"statuses": bytes(4)},
    "a reason that does not exist": {"reasons": bytes([255]) * 3},
    "offsets behind the pool": {"offsets": b"\xff" * 7 + b"\x7f" + bytes(16)},
    "half an offset": {"offsets": bytes(23)},
    "no offsets": {"offsets": bytes(8)},
    "too few checksums": {"checksums": bytes(8)},
    "a negative lease": {"lease": -1},
    "no time": {"ttl_s": math.nan},
}


@pytest.mark.parametrize("bent", BENT.values(), ids=BENT)
def test_a_grant_that_no_server_may_give_is_not_used(server: Server, bent: dict[str, object]) -> None:
    handlers = server.dispatch.handlers
    honest = handlers[m.PrepareStore], handlers[m.PrepareRetrieve]

    def bend(number: int) -> Callable[..., object]:
        def handle(session: object, request: object) -> object:
            reply = honest[number](session, request)
            for name, value in bent.items():
                setattr(reply, name, value)
            return reply

        return handle

    with Client.connect(server.parts.settings.name, runtime_dir=server.parts.settings.runtime_dir) as client:
        client.store(KEYS, [bytes(4096)] * 3, namespace=SPACE)
        handlers[m.PrepareStore], handlers[m.PrepareRetrieve] = bend(0), bend(1)
        fresh = [bytes([9]) * 31 + bytes([number]) for number in range(3)]
        stored = client.store(fresh, [b"x" * 4096] * 3, namespace=SPACE)
        assert set(stored.statuses) == {Status.UNREACHABLE}
        promise = client.lookup(KEYS, namespace=SPACE, hold=True).promise
        into = [bytearray(b"?" * 4096) for _ in KEYS]
        read = client.retrieve(KEYS, into, namespace=SPACE, promise=promise)
        assert Status.HIT not in read.statuses
        assert into == [b"?" * 4096] * 3
        handlers[m.PrepareStore], handlers[m.PrepareRetrieve] = honest
    with Client.connect(server.parts.settings.name, runtime_dir=server.parts.settings.runtime_dir) as client:
        assert client.store(fresh, [b"y" * 4096] * 3, namespace=SPACE).stored == 3
