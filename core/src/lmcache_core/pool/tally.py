"""What a worker counts without a call: the words of the line next to its row of the worker table."""

from __future__ import annotations

from enum import IntEnum


class Tally(IntEnum):
    """The position of each counter; the C extension (tally.h) uses the same order. They grow while the worker has its
    row."""

    LOOKUPS = 0  # calls of `lookup` that the index answered completely
    LOOKUP_HITS = 1  # keys that it found in these calls, and in those that asked the server for the rest
    LOOKUP_NS = 2  # time in the index; one in sixteen small lookups is timed, and counts for all
    READS = 3  # calls of `retrieve` that read something by the index, including jobs of pages
    READ_HITS = 4  # objects
    READ_BYTES = 5
    READ_NS = 6  # copying, if that is a separate call
    # What Python counts of a prompt (`Client.count_prompt`), whoever answered:
    PROMPTS = 7
    PROMPT_TOKENS = 8  # that were looked up
    INDEX_HIT_TOKENS = 9  # of these found, if only the index was searched
    L1_HIT_TOKENS = 10  # … if the server was asked, and the pool had them
    TIER_HIT_TOKENS = 11  # … if tiers had to load them
    LOOKUP_MISSES = 12  # keys not found, if only the index was searched
    DROPPED_STORES = 13  # objects that it had, and gave up storing (`Client.count_dropped_stores`)
