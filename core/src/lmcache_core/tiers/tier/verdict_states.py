"""What a tier thinks of one object, and the one table of its transitions (`Suspect.move`).

A load that looked damaged makes an object suspect, and nothing more: the way may have been broken, not the object. Only
a second look, some time later, says that it is damaged.
"""

from __future__ import annotations

from enum import Enum, auto

from lmcache_core.transitions import Transitions


class VerdictState(Enum):
    """What is thought of it."""

    SUSPECT = auto()  # a load looked damaged: it counts as missing, and its next writer replaces it
    LOOKED_AT = auto()  # a second look is under way
    DAMAGED = auto()  # both looks saw the same damage, and another object was read well: it may be set aside
    SOUND = auto()  # it was read well, replaced, or has left: nothing is kept about it


class VerdictEvent(Enum):
    """What is found out."""

    LOOK = auto()  # the second look begins
    UNSURE = auto()  # it saw something else, got no answer, or nothing else could be read well either
    CONFIRM = auto()  # it saw the same damage
    KEPT = auto()  # the medium did not let go of it
    CLEAR = auto()


VERDICT_TRANSITIONS: Transitions[VerdictState, VerdictEvent] = Transitions(
    {
        (VerdictState.SUSPECT, VerdictEvent.LOOK): VerdictState.LOOKED_AT,
        (VerdictState.LOOKED_AT, VerdictEvent.UNSURE): VerdictState.SUSPECT,
        (VerdictState.LOOKED_AT, VerdictEvent.CONFIRM): VerdictState.DAMAGED,
        (VerdictState.DAMAGED, VerdictEvent.KEPT): VerdictState.SUSPECT,
        (VerdictState.SUSPECT, VerdictEvent.CLEAR): VerdictState.SOUND,
        (VerdictState.LOOKED_AT, VerdictEvent.CLEAR): VerdictState.SOUND,
        (VerdictState.DAMAGED, VerdictEvent.CLEAR): VerdictState.SOUND,
    }
)
