"""One medium is one tier, and epochs that servers share only rise."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.errors import SettingsError
from lmcache_core.limits import SECOND_LOOK_S
from lmcache_core.state_thread import StateThread
from lmcache_core.tiers.contract import L2Adapter, Outcome, Result, StoreItem
from lmcache_core.tiers.object.epochs import Epochs
from lmcache_core.tiers.object.format import HEADER_BYTES, tier_key

from .conftest import Doubles

OBJECT_BYTES = HEADER_BYTES + 5000


def on(doubles: Doubles, place: str | None) -> L2Adapter:
    adapter = doubles.adapter()
    adapter.medium = lambda: place
    return adapter


def test_two_tiers_on_one_medium_are_refused_at_the_start_and_later_with_both_named(doubles: Doubles) -> None:
    def tier(name: str, place: str | None) -> Any:
        return doubles.tier(name, on(doubles, place))

    with pytest.raises(SettingsError, match="'one' and 'two' are both on the shelf"):
        doubles.loop(doubles.l1(), tier("one", "the shelf"), tier("two", "the shelf"))
    loop = doubles.loop(doubles.l1(), tier("one", "the shelf"), tier("two", None), tier("three", None))
    with pytest.raises(SettingsError, match="'one' and 'four'"):
        loop.tiering.add_tier(tier("four", "the shelf"))
    with pytest.raises(SettingsError, match="'one' and 'two'"):
        loop.tiering.replace_tier(tier("two", "the shelf"))
    loop.tiering.replace_tier(tier("one", "the shelf"))
    assert loop.tiering.names == ["one", "two", "three"]


def test_a_clear_that_was_answered_is_not_undone_by_another_server_on_the_same_epochs(tmp_path: Path) -> None:
    ours, theirs = Epochs(tmp_path / "epochs"), Epochs(tmp_path / "epochs")
    ours.move(1)
    theirs.move(2)
    ours.move(None)
    theirs.move(2)
    for epochs in (ours, theirs, Epochs(tmp_path / "epochs")):
        epochs.refresh()
        assert [epochs.of(namespace) for namespace in (1, 2, 3)] == [2, 3, 2]


def test_what_another_server_clears_is_out_of_reach_here_too(doubles: Doubles, tmp_path: Path) -> None:
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter), epochs=Epochs(tmp_path / "epochs"))
    loop.store(doubles.contents(2))
    loop.idle()
    Epochs(tmp_path / "epochs").move(doubles.namespace)
    loop.jump(1.0)
    loop.until(lambda: not adapter.objects)
    loop.l1.evict(doubles.key(1))
    assert loop.fetch([doubles.key(1)]).hits == 0


def test_what_is_stored_while_a_clear_waits_for_its_answer_is_cleared_too(doubles: Doubles, tmp_path: Path) -> None:
    """A look at the file that was asked for before the clear may be answered once the clear's line is there."""
    answers: SimpleQueue[Callable[[], None]] = SimpleQueue()
    state = StateThread(answers.put)
    epochs = Epochs(tmp_path / "epochs", state)
    answers.get(timeout=60)()  # that the file is open
    adapter = doubles.adapter()
    loop = doubles.loop(doubles.l1(), doubles.tier("mem", adapter), epochs=epochs)
    loop.turn()
    loop.tiering.move_epoch(doubles.namespace, lambda error: loop.tiering.clear(doubles.namespace))
    looked, cleared = answers.get(timeout=60), answers.get(timeout=60)
    looked()
    loop.store(doubles.contents(1))
    loop.until(lambda: adapter.objects)
    cleared()
    loop.until(lambda: not adapter.objects)
    loop.l1.evict(doubles.key(0))
    assert loop.fetch([doubles.key(0)]).hits == 0
    state.close()


def test_what_others_have_cleared_is_told_though_a_clear_of_ours_has_found_it(tmp_path: Path) -> None:
    ours = Epochs(tmp_path / "epochs")
    cleared: list[int | None] = []
    ours.on_risen.append(cleared.extend)
    Epochs(tmp_path / "epochs").move(1)
    ours.move(2)
    assert cleared == [1], "before anybody can store under the new epoch"
    ours.refresh()
    assert cleared == [1], "once, and not for our own"
    Epochs(tmp_path / "epochs").move(None)
    ours.refresh()
    assert cleared == [1, None]


@given(st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(0, 3)), max_size=12))
def test_digests_are_equal_exactly_where_all_epochs_are(moves: list[tuple[int, int | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "epochs")
        servers = [Epochs(path) for _ in range(3)]
        seen = {0: [0] * 5}
        for server, namespace in moves:
            servers[server].move(namespace)
            epochs = [servers[server].of(each) for each in range(5)]
            assert seen.setdefault(servers[server].digest, epochs) == epochs
        for each in servers:
            each.refresh()
        assert {each.digest for each in (*servers, Epochs(path))} == {servers[0].digest}


def test_many_servers_that_clear_at_once_lose_no_clear(tmp_path: Path) -> None:
    def clear_often() -> None:
        epochs = Epochs(tmp_path / "epochs")
        for _ in range(20):
            epochs.move(7)

    threads = [threading.Thread(target=clear_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Epochs(tmp_path / "epochs").of(7) == 80


def test_a_damaged_object_that_cannot_be_removed_keeps_its_room_and_is_stored_over(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter)
    loop = doubles.loop(doubles.l1(), tier)
    name = tier_key(doubles.key(1), doubles.namespace, 0)
    loop.store(doubles.contents(2, first=1))  # the second shows that the way is well
    loop.idle()
    adapter.corrupt(name)
    adapter.delete = lambda keys, deadline: [Outcome(Result.FAILED, error="not allowed")] * len(keys)
    loop.l1.evict(doubles.key(1))
    assert loop.fetch([doubles.key(1)]).reasons[0] == "damaged"
    loop.jump(SECOND_LOOK_S)
    loop.until(lambda: tier.reclaim.failed == 1 and not len(tier.doubts))
    assert tier.accounting.bytes_used == 2 * OBJECT_BYTES, "it is still on the medium"
    loop.store(doubles.contents(1, first=1))
    loop.idle()
    loop.l1.evict(doubles.key(1))
    assert loop.fetch([doubles.key(1)]).hits == 1
    assert tier.accounting.bytes_used == 2 * OBJECT_BYTES


def test_a_medium_that_keeps_what_it_says_it_set_aside_is_found_out(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter)
    loop = doubles.loop(doubles.l1(), tier)
    name = tier_key(doubles.key(1), doubles.namespace, 0)
    loop.store(doubles.contents(2, first=1))  # the second shows that the way is well
    loop.idle()
    adapter.corrupt(name)
    adapter.set_aside = lambda keys, deadline: [Outcome(Result.DONE)] * len(keys)
    loop.l1.evict(doubles.key(1))
    assert loop.fetch([doubles.key(1)]).reasons[0] == "damaged"
    loop.jump(SECOND_LOOK_S)
    loop.until(lambda: tier.doubts.settled == 1)
    assert tier.accounting.bytes_used == 2 * OBJECT_BYTES
    assert tier.accounting.known([name]) == set(), "it is stored anew"


def test_a_store_whose_answer_was_lost_is_accounted_as_it_is(doubles: Doubles) -> None:
    adapter = doubles.adapter()
    tier = doubles.tier("mem", adapter)
    loop = doubles.loop(doubles.l1(), tier)
    does = adapter.store

    def loses(items: Sequence[StoreItem], deadline: float) -> Sequence[Outcome]:
        does(items, deadline)
        return [Outcome(Result.FAILED, error="no answer")] * len(items)

    loop.idle()
    adapter.store = loses
    loop.store(doubles.contents(3))
    loop.until(lambda: tier.doubts.settled == 3)
    assert tier.accounting.bytes_used == 3 * OBJECT_BYTES == sum(map(len, adapter.objects.values()))
    assert tier.accounting.bytes_reserved == 0
