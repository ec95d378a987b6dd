"""What can go wrong between two nodes."""

from __future__ import annotations

from lmcache_core.errors import TierError


class PeerError(TierError):
    """A peer refuses us, or speaks something else."""


class LyingPeerError(TierError):
    """A peer has broken its promises: an object that is not the one of its name, lengths that do not fit, a frame out
    of order."""
