"""The states of a session, and the one table that says how it moves between them.

The table feeds the code (`Session.move` looks every step up in it), the diagram in the docs and the test machine.
Three rules are behind it:

- End of file is not death. A client that has proved that it maps the pool may touch its bytes until its death is
  proven; a session whose connection ended stays LOST until then.
- A row of the worker table goes only to a client that has asked for the pool, and slots only to one that has proved
  that it maps it.
- Every session ends once and for all: a client that returns opens a new session, which takes over what it declares.
"""

from __future__ import annotations

from enum import IntEnum

from lmcache_core.transitions import Transitions


class SessionState(IntEnum):
    """What the peer may do, and what its end means."""

    CONNECTED = 0  # accepted, and has sent nothing: a deadline runs
    OPEN = 1  # has sent hello: may look up, ask and register namespaces
    SEATED = 2  # has a row of the worker table: may prove that it maps the pool
    ATTACHED = 3  # has proved it: may get slots
    LOST = 4  # the connection ended, but it may still hold something, and its death is not proven
    ENDED = 5


class SessionEvent(IntEnum):
    """What happens to a session."""

    HELLO = 0
    SEAT = 1  # the server gave it a row
    ATTACH = 2  # it read that row's nonce, and holds the row's life lock
    HANG_UP = 3  # the connection ended
    GOODBYE = 4  # everything that it held is settled
    DIE = 5  # its pidfd fired, or its life lock is free
    RETURN = 6  # the same client instance has a new session, which took over what it declared
    DROP = 7  # ended by the server: silent too long, or to make room, while holding nothing
    SHUT = 8  # the server itself stops


def _session_transitions() -> Transitions[SessionState, SessionEvent]:
    state, event = SessionState, SessionEvent
    table = Transitions(
        {
            (state.CONNECTED, event.HELLO): state.OPEN,
            (state.CONNECTED, event.HANG_UP): state.ENDED,
            (state.CONNECTED, event.DROP): state.ENDED,
            (state.CONNECTED, event.SHUT): state.ENDED,
            (state.OPEN, event.SEAT): state.SEATED,
            (state.SEATED, event.ATTACH): state.ATTACHED,
            (state.ATTACHED, event.ATTACH): state.ATTACHED,  # it declares again what it holds
        }
    )
    for connected in (state.OPEN, state.SEATED, state.ATTACHED):
        table[connected, event.HANG_UP] = state.LOST
    for known in (state.OPEN, state.SEATED, state.ATTACHED, state.LOST):
        # A goodbye counts even if its connection ends before it is answered.
        for end in (event.GOODBYE, event.DIE, event.RETURN, event.DROP, event.SHUT):
            table[known, end] = state.ENDED
    return table


SESSION_TRANSITIONS = _session_transitions()
