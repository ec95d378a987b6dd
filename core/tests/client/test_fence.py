"""What is read in place cannot be written to: the writer fails, not the next reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_core.client.client import Client
from lmcache_core.pool.layout import Layout
from lmcache_core.server.server import Server
from lmcache_core.tokens.namespace import Namespace

NBYTES = 1 << 16
SPACE = Namespace("model", Layout("uint8", (NBYTES,)))
KEY = bytes(32)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.connect() as client:
        client.store([KEY], [b"a" * NBYTES], namespace=SPACE)
        yield client


def test_a_view_of_a_read_lease_is_read_only(client: Client) -> None:
    with client.prepare_retrieve([KEY], namespace=SPACE) as lease:
        view = lease.view(0)
        assert view.readonly
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1


def test_a_tensor_of_a_read_lease_lies_where_nobody_may_write(client: Client) -> None:
    pytest.importorskip("torch")
    with client.prepare_retrieve([KEY], namespace=SPACE) as lease:
        tensor = lease.tensor(0)
        assert int(tensor.sum()) == NBYTES * ord("a")
        assert "r--s" in next(
            line for line in Path("/proc/self/maps").read_text().splitlines() if _holds(line, tensor.data_ptr())
        )


def test_a_tensor_of_a_write_lease_is_written_to_as_ever(client: Client) -> None:
    pytest.importorskip("torch")
    with client.prepare_store([bytes([1]) * 32], namespace=SPACE) as lease:
        lease.tensor(0).fill_(7)
        lease.commit()
    into = [bytearray(NBYTES)]
    assert client.retrieve([bytes([1]) * 32], into, namespace=SPACE).hits == 1
    assert into == [b"\7" * NBYTES]


def test_the_second_mapping_is_made_by_the_first_tensor_only(client: Client) -> None:
    pytest.importorskip("torch")
    with client.prepare_retrieve([KEY], namespace=SPACE) as lease:
        lease.view(0)
        before = _read_only(client)
        lease.tensor(0)
        fenced = _read_only(client)
        lease.tensor(0)
        assert len(fenced - before) == 1
        assert _read_only(client) == fenced


def _read_only(client: Client) -> set[str]:
    """Where this process maps the pool to be read alone."""
    pool = client.links.current().pool.name
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if pool in line and line.split()[1] == "r--s"}


def _holds(line: str, address: int) -> bool:
    start, _, end = line.split()[0].partition("-")
    return int(start, 16) <= address < int(end, 16)
