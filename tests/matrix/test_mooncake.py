"""What only a store of several nodes can have happen to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from matrix_world import KEYS, World

if TYPE_CHECKING:
    from services.mooncake_store import Mooncake

pytestmark = pytest.mark.backends("mooncake")


def test_a_node_that_dies_costs_its_objects_and_no_more(world: Callable[..., World], service: Mooncake) -> None:
    if not service.ours:
        pytest.skip("nodes of your own are not killed")
    here = world()
    numbers = here.stored_and_forgotten(0)
    assert here.read(numbers) == KEYS
    here.client.clear(here.namespace)
    service.cluster.kill_node()
    try:
        assert 0 <= here.read(numbers) <= KEYS, "in L1 nothing is left"
        service.cluster.await_nodes(1)
        here.recover(KEYS)
    finally:
        service.cluster.start_node()
    here.recover(100 * KEYS)
    here.account()


def test_a_master_that_hangs_for_a_while_is_used_again(world: Callable[..., World], service: Mooncake) -> None:
    if not service.ours:
        pytest.skip("a master of your own is not stopped")
    here = world()
    numbers = here.stored_and_forgotten(0)
    with service.cluster.hang_master():
        assert here.read(numbers, wait_s=1.0) == 0
        here.store(KEYS)
    here.recover(2 * KEYS)
    here.account()
