"""A PostgreSQL of the tests' own. Where there is none they are skipped, loudly, or fail if everything must be there."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest


@pytest.fixture(scope="session")
def dsn() -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own words about directories
            import pgserver
    except ImportError:
        missing = "NOT TESTED: there is no pgserver here: pip install pgserver"
        if os.environ.get("LMCACHE_CORE_MATRIX"):
            pytest.fail(missing)
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="lmcache-postgres-") as folder:
        Path(folder).chmod(0o755)  # where we are root, the database is another user's
        server = pgserver.get_server(Path(folder, "data"))
        yield server.get_uri()
        server.cleanup()


@pytest.fixture
def table(dsn: str) -> Iterator[str]:
    """Of this test alone."""
    name = f"t{uuid4().hex[:12]}"
    yield name
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {name}")
