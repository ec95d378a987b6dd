"""The tier in a real server, and a database whose processes are stopped."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import psycopg
import pytest
from lmcache_postgres.adapter import PostgresAdapter
from lmcache_postgres.settings import PostgresSettings
from pydantic import SecretStr

from lmcache_core import Layout, Namespace, Server, make_settings
from lmcache_core.errors import TierError
from lmcache_core.tiers.contract import AdapterContext, Result, StoreItem

NAMESPACE = Namespace("a model", Layout("uint8", (65536,)))
KEYS = [number.to_bytes(32, "big") for number in range(4)]


def test_what_was_stored_comes_back_from_the_table(tmp_path: Path, dsn: str, table: str) -> None:
    settings = make_settings(
        name="postgres-test",
        l1={"size_bytes": "16MiB", "backing": "memfd"},
        l2={"mine": {"type": "postgres", "dsn": dsn, "table": table}},
        runtime_dir=str(tmp_path / "run"),
        state_dir=str(tmp_path / "state"),
    )
    contents = [bytes([number]) * 65536 for number in range(4)]
    with Server(settings) as server, server.connect() as client:
        assert server.parts.populator.wait(60)
        assert client.store(KEYS, contents, namespace=NAMESPACE).stored == 4
        assert all(each.stored for each in client.wait_stored(KEYS, namespace=NAMESPACE, timeout_s=60))
        client.clear(NAMESPACE)
        back = [bytearray(65536) for _ in KEYS]
        client.lookup(KEYS, namespace=NAMESPACE, wait_s=60)
        assert client.retrieve(KEYS, back, namespace=NAMESPACE).hits == 4
    assert back == contents


def test_a_database_that_is_stopped_is_a_failure_by_the_deadline_and_works_again(dsn: str, table: str) -> None:
    settings = PostgresSettings(dsn=SecretStr(dsn), table=table)
    item = StoreItem(b"key", [memoryview(b"content")])
    with PostgresAdapter(settings, AdapterContext(tier="mine")) as adapter:
        assert adapter.store([item], time.monotonic() + 60)[0].result is Result.DONE
        with psycopg.connect(dsn) as connection:
            postmaster = psutil.Process(connection.info.backend_pid).parent()
        assert postmaster is not None
        stopped = [postmaster, *postmaster.children(recursive=True)]
        for process in stopped:
            process.suspend()
        try:
            (outcome,) = adapter.store([item], time.monotonic() + 1)
            assert (outcome.result, outcome.retryable) == (Result.FAILED, True)
            with pytest.raises(TierError):
                adapter.exists([b"key"], time.monotonic() + 1)
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        assert adapter.exists([b"key"], time.monotonic() + 60) == [True]
