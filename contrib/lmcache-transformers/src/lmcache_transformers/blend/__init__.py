"""Reuse of text that is not a prefix: KV of chunks, moved to another place, with some of their tokens recomputed."""
