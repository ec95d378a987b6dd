"""How far the scans of a tier's medium have come, and the one table of their transitions (`Rebuild.move`).

The first scan counts everything, and enters it once the list is complete; each later scan corrects the books.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from lmcache_core.transitions import Transitions


class RebuildState(StrEnum):
    """The current step."""

    OFF = "off"  # the medium cannot be scanned
    SCANNING = "scanning"
    ADOPTING = "adopting"
    DONE = "done"
    RESCANNING = "rescanning"  # the books stay in use; what others stored is added
    FORGETTING = "forgetting"  # what others deleted is removed


class RebuildEvent(Enum):
    """What moves it on."""

    LISTED = auto()  # the last page has arrived
    FINISHED = auto()  # everything listed is in the books
    AGAIN = auto()  # the next scan is due, or somebody asked for one


REBUILD_TRANSITIONS: Transitions[RebuildState, RebuildEvent] = Transitions(
    {
        (RebuildState.SCANNING, RebuildEvent.LISTED): RebuildState.ADOPTING,
        (RebuildState.ADOPTING, RebuildEvent.FINISHED): RebuildState.DONE,
        (RebuildState.DONE, RebuildEvent.AGAIN): RebuildState.RESCANNING,
        (RebuildState.RESCANNING, RebuildEvent.LISTED): RebuildState.FORGETTING,
        (RebuildState.FORGETTING, RebuildEvent.FINISHED): RebuildState.DONE,
    }
)
