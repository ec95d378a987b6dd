"""Which of an engine's blocks objects hold: what a client reports, where the server has no subscriber for it."""

from __future__ import annotations

import pytest

from lmcache_core.client.client import Client
from lmcache_core.client.engine_blocks import EngineBlocks
from lmcache_core.errors import UsageError
from lmcache_core.pool.layout import Layout
from lmcache_core.tokens.namespace import Namespace

SPACE = Namespace("blocks", Layout("uint8", (4096,)))
KEYS = [bytes([number]) * 32 for number in (1, 2)]
HASHES = [bytes([number]) * 32 for number in (3, 4, 5)]


def test_without_a_subscriber_a_report_says_that_nobody_asks(client: Client) -> None:
    assert client.report_block_allocation(KEYS, EngineBlocks(HASHES[:2], 16), namespace=SPACE) == 0


def test_a_report_that_makes_no_sense_is_refused(client: Client) -> None:
    with pytest.raises(UsageError, match="same number for each key"):
        client.report_block_allocation(KEYS, EngineBlocks(HASHES, 16), namespace=SPACE)
    with pytest.raises(UsageError, match="give all, or none"):
        client.report_block_allocation(KEYS[:1], EngineBlocks(HASHES[:1], 16, token_ids=[1]), namespace=SPACE)
