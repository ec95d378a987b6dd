"""The states of a load: the table is complete, and no slot is given back while a lane may write to it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lmcache_core.tiers.flow.load_states import LOAD_TRANSITIONS, LoadEvent, LoadState
from lmcache_core.tiers.flow.loads import Load, LoadTable, LoadTerms
from lmcache_core.tiers.object.format import tier_key
from lmcache_core.tiers.tier.lanes import WAITED_FOR

from .conftest import Doubles


def a_load() -> Load:
    return Load(b"k" * 32, 1, 0, 4096, LoadTerms(1, 1.0, WAITED_FOR), ["disk"], retain=False)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LoadState, LoadEvent)))
def test_a_step_is_in_the_table_or_is_refused(state: LoadState, event: LoadEvent) -> None:
    load = a_load()
    load.state = state
    if (state, event) in LOAD_TRANSITIONS:
        load.move(event)
        assert load.state is LOAD_TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            load.move(event)


def test_every_state_is_reached_and_only_the_end_has_no_way_on() -> None:
    assert {LoadState.WANTED, *LOAD_TRANSITIONS.values()} == set(LoadState)
    assert {before for before, _ in LOAD_TRANSITIONS} == set(LoadState) - {LoadState.OVER}


def test_a_slot_that_a_lane_may_write_to_is_left_by_its_return_or_its_commit_alone() -> None:
    written = (LoadState.OUT, LoadState.LATE)
    ends = {event for (before, event), after in LOAD_TRANSITIONS.items() if before in written and after not in written}
    assert ends == {LoadEvent.RETURN, LoadEvent.COMMIT}


def test_the_diagram_has_every_event() -> None:
    assert "OUT --> LATE: expire" in LOAD_TRANSITIONS.diagram()
    assert all(f": {event.name.lower()}\n" in LOAD_TRANSITIONS.diagram() for event in LoadEvent)


def test_a_load_changes_its_state_by_the_table_alone(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that are served, refused, late and cancelled: none gets a state but through `move`."""
    moved: dict[Load, LoadState] = {}
    move, tell = Load.move, LoadTable._tell

    def seen(load: Load, event: LoadEvent) -> None:
        assert load.state is moved.get(load, LoadState.WANTED)
        move(load, event)
        moved[load] = load.state

    def told(table: LoadTable, load: Load, reason: Any) -> None:
        assert load.state in (LoadState.OVER, LoadState.LATE)
        tell(table, load, reason)

    monkeypatch.setattr(Load, "move", seen)
    monkeypatch.setattr(LoadTable, "_tell", told)
    near = doubles.adapter()
    loop = doubles.loop(doubles.l1(slots=16), doubles.tier("near", near), config={})
    loop.store(doubles.contents(12))
    loop.idle()
    for number in range(12):
        loop.l1.evict(doubles.key(number))
    loop.fetch([doubles.key(0), doubles.key(1)])
    near.corrupt(tier_key(doubles.key(2), doubles.namespace, 0))
    loop.fetch([doubles.key(2)])
    near.hang("load")
    late = loop.ask([doubles.key(5)], seconds=0.3)
    loop.until(lambda: near.entered.acquire(blocking=False))
    loop.until(lambda: late.ended)
    cancelled = loop.ask([doubles.key(6)])
    loop.until(lambda: cancelled.state == "loading")
    loop.tiering.cancel(cancelled)
    near.release("load")
    loop.until(lambda: set(moved.values()) == {LoadState.OVER})  # the call that was late comes back, too
