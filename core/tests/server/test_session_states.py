"""The transition table is the only way between the states of a session."""

from __future__ import annotations

import itertools

import pytest

from lmcache_core.server.peers.session import Session
from lmcache_core.server.peers.session_states import SESSION_TRANSITIONS, SessionEvent, SessionState


def session(state: SessionState) -> Session:
    return Session(1, None, 0, 0, "lifeline", "uid 0", state)


def test_every_session_is_reached_from_connected_and_ends() -> None:
    def reached(start: SessionState, steps: set[tuple[SessionState, SessionState]]) -> set[SessionState]:
        seen, todo = {start}, [start]
        while todo:
            here = todo.pop()
            for before, after in steps:
                if before is here and after not in seen:
                    seen.add(after)
                    todo.append(after)
        return seen

    forward = {(before, after) for (before, _), after in SESSION_TRANSITIONS.items()}
    assert reached(SessionState.CONNECTED, forward) == set(SessionState)
    assert reached(SessionState.ENDED, {(after, before) for before, after in forward}) == set(SessionState)


def test_nothing_leads_out_of_the_end_or_back_from_being_lost() -> None:
    for (before, _), after in SESSION_TRANSITIONS.items():
        assert before is not SessionState.ENDED
        assert before is not SessionState.LOST or after is SessionState.ENDED


def test_slots_go_only_to_who_has_a_row_and_has_shown_that_it_maps_the_pool() -> None:
    for (before, event), after in SESSION_TRANSITIONS.items():
        if after is SessionState.ATTACHED:
            assert event is SessionEvent.ATTACH
            assert before in (SessionState.SEATED, SessionState.ATTACHED)


def test_who_may_hold_something_is_lost_by_a_hang_up_and_not_dead() -> None:
    for state in (SessionState.OPEN, SessionState.SEATED, SessionState.ATTACHED):
        assert SESSION_TRANSITIONS[state, SessionEvent.HANG_UP] is SessionState.LOST


def test_a_step_that_is_not_in_the_table_is_refused() -> None:
    for before, event in itertools.product(SessionState, SessionEvent):
        if (before, event) not in SESSION_TRANSITIONS:
            with pytest.raises(KeyError):
                session(before).move(event)


def test_the_diagram_has_every_event() -> None:
    assert "CONNECTED --> OPEN: hello" in SESSION_TRANSITIONS.diagram()
    for event in SessionEvent:
        assert event.name.lower().replace("_", " ") in SESSION_TRANSITIONS.diagram()
