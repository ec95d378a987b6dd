"""A server with a small pool, and the chunks of a small model in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache_blend._native", reason="built without C")

sys.path.insert(0, str(Path(__file__).parent))  # for `small_chunks`

from small_chunks import PREFIX_TOKENS, prefixes, space

from lmcache_blend import Chunks
from lmcache_core import Client, Server


@pytest.fixture
def client(start: Callable[..., Server]) -> Iterator[Client]:
    with start(l1={"size_bytes": 8 << 20, "backing": "memfd"}).connect() as client:
        yield client


@pytest.fixture
def chunks(client: Client) -> Chunks:
    return Chunks(client, space(), prefixes(), PREFIX_TOKENS)
