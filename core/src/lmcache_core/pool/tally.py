"""What a worker counts without a call: the words of the line beside its row of the worker table."""

from __future__ import annotations

from enum import IntEnum


class Tally(IntEnum):
    """Where each stands; the C extension (tally.h) has the same order. They grow while the worker has its row."""

    LOOKUPS = 0  # calls of `lookup` that the index answered whole
    LOOKUP_HITS = 1  # keys that it found, for these and for those of which the server was asked the rest
    LOOKUP_NS = 2  # within the index; of small lookups one in sixteen is timed, and counts for all
    READS = 3  # calls of `retrieve` that read something by the index, jobs of pages among them
    READ_HITS = 4  # objects
    READ_BYTES = 5
    READ_NS = 6  # copying, where that is a call of its own
