"""Requests that may take several turns: lookups, stores, waits for tiers, explanations and clears."""
