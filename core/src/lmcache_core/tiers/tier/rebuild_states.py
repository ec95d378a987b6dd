"""How far the scans of a tier's medium have come, and the one table that says how that moves on (`Rebuild.move`).

The first scan counts everything anew, and takes it over once it is listed; each later one corrects what is counted.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from lmcache_core.transitions import Transitions


class RebuildState(StrEnum):
    """What is being done."""

    OFF = "off"  # the medium cannot be scanned
    SCANNING = "scanning"
    ADOPTING = "adopting"
    DONE = "done"
    RESCANNING = "rescanning"  # counted all the while; what others did comes in
    FORGETTING = "forgetting"  # what others deleted goes


class RebuildEvent(Enum):
    """What moves it on."""

    LISTED = auto()  # the last page has come
    FINISHED = auto()  # everything listed is in the books
    AGAIN = auto()  # the time has come to look again, or somebody asked


REBUILD_TRANSITIONS: Transitions[RebuildState, RebuildEvent] = Transitions(
    {
        (RebuildState.SCANNING, RebuildEvent.LISTED): RebuildState.ADOPTING,
        (RebuildState.ADOPTING, RebuildEvent.FINISHED): RebuildState.DONE,
        (RebuildState.DONE, RebuildEvent.AGAIN): RebuildState.RESCANNING,
        (RebuildState.RESCANNING, RebuildEvent.LISTED): RebuildState.FORGETTING,
        (RebuildState.FORGETTING, RebuildEvent.FINISHED): RebuildState.DONE,
    }
)
