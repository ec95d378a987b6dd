"""Records an adapter's calls and answers. Also for drills, by `wrap` in a tier's table."""

from lmcache_core.tiers.drills.recording import Recorded, RecordingAdapter

__all__ = ["Recorded", "RecordingAdapter"]
