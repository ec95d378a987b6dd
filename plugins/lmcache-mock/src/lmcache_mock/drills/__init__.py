"""Wrappers around an adapter: slow, faulty, or recorded."""
