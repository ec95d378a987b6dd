"""Devices that have an engine's pages, and what copies need of them: see `contract`."""
