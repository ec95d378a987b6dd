"""The tiers behind the L1: opened from settings, and changed while the server runs."""
