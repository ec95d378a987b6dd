"""The transition table is the only way between states."""

from __future__ import annotations

import itertools

import pytest
from kernel_words import LAYOUT, NS, WORKER, keys, offer

from lmcache_core.errors import InvariantError
from lmcache_core.kernel import TRANSITIONS, Event, Kernel, State
from lmcache_core.kernel.states import INDEXED


def test_every_state_is_reached_from_free_and_leads_back_to_it() -> None:
    def reached(start: State, steps: set[tuple[State, State]]) -> set[State]:
        seen, todo = {start}, [start]
        while todo:
            here = todo.pop()
            for before, after in steps:
                if before is here and after not in seen:
                    seen.add(after)
                    todo.append(after)
        return seen

    forward = {(before, after) for (before, _), after in TRANSITIONS.items()}
    assert reached(State.FREE, forward) == set(State)
    assert reached(State.FREE, {(after, before) for before, after in forward}) == set(State)


def test_nothing_comes_back_into_the_index_and_nothing_becomes_ready_but_by_commit() -> None:
    for (before, event), after in TRANSITIONS.items():
        if after is State.READY:
            assert event is Event.COMMIT
        if before not in INDEXED and before is not State.FREE:
            assert after is State.FREE


def test_a_step_that_is_not_in_the_table_stops_the_kernel(kernel: Kernel) -> None:
    offer(kernel, 1)
    item = kernel.residents.table.of(NS).get(keys(1)[0])
    assert item is not None
    for before, event in itertools.product(State, Event):
        if (before, event) not in TRANSITIONS:
            with pytest.raises(KeyError):
                kernel.residents.move([item], before, event)
    with pytest.raises(InvariantError, match="expected READY"):
        kernel.residents.move([item], State.READY, Event.REMOVE)
    assert kernel.prepare_store(WORKER, NS, LAYOUT, keys(1), 0.0).lease_id


def test_a_batch_is_moved_whole_or_not_at_all(kernel: Kernel) -> None:
    grants = offer(kernel, 1, 2, 3)
    kernel.commit_store(WORKER, grants.lease_id, 0.0)
    offer(kernel, 4)
    residents = kernel.residents
    table = residents.table.of(NS)
    items = [item for item in (table.get(key) for key in keys(1, 2, 4, 3)) if item is not None]
    kernel.take_effects()
    sums = list(residents.objects_by_state), list(residents.bytes_by_state)
    for batch in (items, [*items[:2], items[0]]):
        with pytest.raises(InvariantError):
            residents.move(batch, State.READY, Event.REMOVE)
        assert [item.state.name for item in items] == ["READY", "READY", "WRITING", "READY"]
        assert not kernel.effects
        assert (list(residents.objects_by_state), list(residents.bytes_by_state)) == sums


def test_the_diagram_has_a_line_for_each_pair_of_states_and_says_every_event() -> None:
    pairs = {(before, after) for (before, _), after in TRANSITIONS.items()}
    assert len(TRANSITIONS.diagram().splitlines()) == 1 + len(pairs)
    assert "WRITING --> QUARANTINED: expire, clear\n" in TRANSITIONS.diagram()


def test_a_step_that_is_not_in_the_table_is_named() -> None:
    with pytest.raises(KeyError, match="State READY has no step GRANT"):
        TRANSITIONS[State.READY, Event.GRANT]
