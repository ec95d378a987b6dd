"""Every limit of this package, with its reason."""

from __future__ import annotations

TIMEOUT_S_MAX = 4.0  # for a batch of spans: below the time after which a subscriber counts as hung
SPANS_WAITING_MAX = 10_000  # spans that wait for a collector; further ones are dropped and counted
SPAN_BATCH_S = 0.5  # how long to wait for more: each export is an HTTP request, and costs the loop's thread 2 ms
TRACED_STORES_MAX = 4096  # stores whose spans have not ended; beyond it the oldest span ends as it is
TRACED_OBJECTS_MAX = 65_536  # objects on their way to tiers, with the span of their store: about 15 MB
