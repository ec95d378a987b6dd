"""Adapters that never store: what others put on their medium is found and loaded, and nothing is ever written."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lmcache_core.tiers.contract import L2Adapter, LoadItem, Result, StoreItem
from lmcache_testing import material
from lmcache_testing.contract import Contract, missing, not_claimed

_SLACK_S = 2.0
# The tests of adapters that store which need no object: they hold for those that do not, too.
WITHOUT_OBJECTS = frozenset(
    {
        "test_a_medium_that_is_not_there_is_said_in_words",
        "test_an_adapter_that_was_never_used_can_be_closed",
        "test_an_empty_batch_is_an_empty_answer",
        "test_close_is_idempotent",
        "test_it_is_an_adapter_that_says_what_it_can_do",
        "test_it_is_made_named_and_closed_while_its_medium_is_away",
        "test_use_after_close_raises_a_tier_error",
        "test_what_has_no_deadline_comes_back_while_the_medium_hangs",
        "test_who_leads_is_told_or_not_known",
    }
)


class LoadOnlyTests(Contract):
    """`filled` is a callable: others have put so many objects on the medium; their keys and bytes."""

    @pytest.fixture
    def filled(self) -> Any:
        return None

    @pytest.fixture(autouse=True)
    def _what_stores(self, request: pytest.FixtureRequest) -> None:
        """Leave out, by name, what no adapter can show that never stores."""
        test = request.node.originalname
        if "adapter" not in request.fixturenames or hasattr(LoadOnlyTests, test):
            return
        adapter: L2Adapter = request.getfixturevalue("adapter")
        if not adapter.capabilities.stores and test not in WITHOUT_OBJECTS:
            not_claimed("stores: others put the objects on its medium")

    def test_what_others_put_there_is_found_and_loaded_whole(self, adapter: L2Adapter, filled: Any) -> None:
        objects = self._objects(adapter, filled)
        absent = bytes(len(next(iter(objects))))
        keys = [*objects, absent]
        material.expect_exists(adapter, keys, [True] * len(objects) + [False], "put there by others, but for the last")
        rooms = [bytearray(len(objects.get(key, b"x" * 5000))) for key in keys]
        items = [LoadItem(key, _cut(room)) for key, room in zip(keys, rooms, strict=True)]
        outcomes = adapter.load(items, material.soon())
        assert len(outcomes) == len(items), f"load answered {len(outcomes)} times for {len(items)} objects"
        material.expect_result(outcomes[-1], Result.MISS, "asked for a key that nobody put there")
        for key, room, outcome in zip(objects, rooms, outcomes, strict=False):
            material.expect_result(outcome, Result.DONE, "asked for an object that others put there")
            assert outcome.nbytes == len(room), f"load says {outcome.nbytes} bytes of an object of {len(room)}"
            assert bytes(room) == objects[key], f"load brought {material.difference(bytes(room), objects[key])}"

    def test_a_store_is_refused_for_good_and_changes_nothing(self, adapter: L2Adapter, filled: Any) -> None:
        objects = self._objects(adapter, filled)
        key = next(iter(objects))
        (outcome,) = adapter.store([StoreItem(key, [memoryview(b"not ours")])], material.soon())
        material.expect_result(outcome, Result.FAILED, "asked to store, which it claims never to do")
        assert not outcome.retryable, "it says that another try may store it, and it never stores"
        assert outcome.error, "it does not say why it stores nothing"
        room = bytearray(len(objects[key]))
        (loaded,) = adapter.load([LoadItem(key, _cut(room))], material.soon())
        material.expect_result(loaded, Result.DONE, "asked for an object after a store of its key was refused")
        assert bytes(room) == objects[key], "a store that was refused has changed the object"

    def test_a_call_without_time_comes_back_at_once(self, adapter: L2Adapter, filled: Any) -> None:
        objects = self._objects(adapter, filled)
        key, room = next(iter(objects)), bytearray(len(next(iter(objects.values()))))
        began = time.monotonic()
        adapter.exists([key], began - 1.0)
        (outcome,) = adapter.load([LoadItem(key, _cut(room))], began - 1.0)
        took = time.monotonic() - began
        assert took < _SLACK_S, f"two calls whose deadline had passed took {took:.1f} s"
        assert outcome.result is not Result.DONE or bytes(room) == objects[key], "it called a part of an object whole"
        material.expect_exists(adapter, [key], [True], "there, after calls whose deadline had passed")

    def _objects(self, adapter: L2Adapter, filled: Any) -> dict[bytes, bytes]:
        if adapter.capabilities.stores:
            not_claimed("stores = False: it stores by itself")
        if filled is None:
            missing(type(self), "filled", "it never stores: others must put objects on its medium")
        objects: dict[bytes, bytes] = filled(5)
        return objects


def _cut(room: bytearray) -> list[memoryview]:
    """As the server brings it: a page for the header, and the rest."""
    return [memoryview(room)[:4096], memoryview(room)[4096:]]
