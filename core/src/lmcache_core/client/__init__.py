"""The library in the worker, or in a scheduler that only looks up."""
