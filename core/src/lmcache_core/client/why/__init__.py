"""Why a key was not served, and whether the tiers have it."""
