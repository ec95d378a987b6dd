"""A user with all its worker rows: a worker that comes back, or replaces a dead one, still gets a row."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.results import Status
from lmcache_core.errors import LimitError
from lmcache_core.limits import ROWS_RETURNING_MAX, SHARE_FEW, WORKERS_MAX
from lmcache_testing.waiting import until

from ..conftest import Node

ROWS = (WORKERS_MAX - ROWS_RETURNING_MAX) // SHARE_FEW  # what a user has whose share is next to nothing
SMALL_SHARE = ("--holding.shared_fraction_per_holder_max", "0.001")


def store(node: Node, client: Client, name: object) -> Status:
    [status] = client.store([node.key(name)], [node.payload(1)], namespace=node.namespace).statuses
    return status


def crowd(node: Node, workers: int, **options: Any) -> list[Client]:
    """So many clients that map the pool."""
    clients = [node.client(**options) for _ in range(workers)]
    assert [store(node, client, f"{at} joins") for at, client in enumerate(clients)] == [Status.STORED] * workers
    return clients


def cut(client: Client) -> None:
    """Its connection ends. A call that is under way as it notices that fails: this waits until it has noticed."""
    channel = client.links.current().channel
    with socket.socket(fileno=os.dup(channel.connection.fileno())) as line:  # type: ignore[attr-defined]
        line.shutdown(socket.SHUT_RDWR)
    until(channel.found_lost, "the end of the connection")


def back(node: Node, client: Client, name: object) -> Status:
    """What it stores once it is back. Where it got no row, it hears `LimitError`."""
    client.ping()
    return store(node, client, name)


def rows(client: Client) -> int:
    [holder] = client.status()["l1"]["holders"].values()
    taken: int = holder["rows"]
    return taken


def test_who_is_one_too_many_is_refused(node: Node) -> None:
    node.serve(*SMALL_SHARE)
    crowd(node, ROWS)
    assert store(node, node.client(), "a") is Status.QUOTA


def test_every_call_of_one_too_many_is_answered_with_the_limit_by_key_or_in_words(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.serve(*SMALL_SHARE)
    clients = crowd(node, ROWS)
    late, key = node.client(), node.key("0 joins")
    into = [bytearray(65536)]
    assert late.store([key], [node.payload(1)], namespace=node.namespace).statuses == [Status.QUOTA]
    assert late.retrieve([key], into, namespace=node.namespace).statuses == [Status.QUOTA]
    for hold in (False, True, "if_possible"):
        found = late.lookup([key], namespace=node.namespace, hold=hold)  # type: ignore[arg-type]
        handle = late.lookup_nowait([key], namespace=node.namespace, hold=hold)  # type: ignore[arg-type]
        assert handle.wait(60)
        assert handle.result is not None
        assert {*found.statuses, *handle.result.statuses} == {Status.QUOTA}
    with late.prepare_store([key], namespace=node.namespace) as lease:
        assert lease.statuses == [Status.QUOTA]
    with pytest.raises(LimitError, match="worker rows"):
        late.status()
    assert late.free_lookup_locks([7]) == 0
    lines = [record for record in caplog.records if record.name == "lmcache_core.client"]
    assert ["worker rows" in line.getMessage() for line in lines] == [True], "once, and with the reason"
    clients.pop().close()
    until(lambda: store(node, late, "there is a row") is Status.STORED, "its row")


def test_a_worker_that_comes_back_gets_its_row_again_at_once(node: Node) -> None:
    node.serve(*SMALL_SHARE)
    clients = crowd(node, ROWS)
    for at, client in enumerate(clients):
        cut(client)
        assert back(node, client, f"{at} is back") is Status.STORED
    assert rows(clients[0]) == ROWS
    for client in clients:
        cut(client)
    assert [back(node, client, f"{at} once more") for at, client in enumerate(clients)] == [Status.STORED] * ROWS
    assert rows(clients[0]) == ROWS
    assert store(node, node.client(), "a") is Status.QUOTA, "nobody has more by that"


def test_a_worker_that_comes_back_keeps_the_lease_under_which_it_still_writes(node: Node) -> None:
    node.serve(*SMALL_SHARE)
    clients = crowd(node, ROWS)
    lease = clients[0].prepare_store([node.key("a")], namespace=node.namespace)
    lease.view(0)[:] = node.payload(7)
    cut(clients[0])
    assert back(node, clients[0], "back") is Status.STORED
    assert lease.commit() == [Status.STORED]
    assert rows(clients[0]) == ROWS


def test_who_follows_a_worker_that_was_killed_while_the_server_stood_still_gets_its_row(node: Node) -> None:
    server = node.serve(*SMALL_SHARE)
    clients = crowd(node, ROWS - 1)
    for number in range(2):
        worker = node.worker(f"say(client.store([key('w{number}')], [b'w' * 65536], namespace=ns).statuses[0]); wait()")
        worker.expect("stored")
        server.signal(signal.SIGSTOP)  # the end of its connection and the next hello are seen in one turn
        worker.kill()
        follower = node.worker(
            f"say('here')\nsay(client.store([key('f{number}')], [b'f' * 65536], namespace=ns).statuses[0]); wait()"
        )
        follower.expect("here")
        server.signal(signal.SIGCONT)
        follower.expect("stored")
        follower.kill()
    assert rows(clients[0]) in (ROWS - 1, ROWS)


def test_a_client_over_zmq_stores_again_after_its_link_was_lost(node: Node) -> None:
    address = f"ipc://{node.run / node.name / 'zmq'}"
    node.serve(*SMALL_SHARE, "--zmq.ipc", "true")
    clients = crowd(node, ROWS, address=address)
    assert store(node, node.client(address=address), "a") is Status.QUOTA
    for at, client in enumerate(clients):
        client.links.current().channel.connection.close()
        assert back(node, client, f"{at} is back") is Status.STORED
    assert rows(clients[0]) == ROWS
