"""The pool: one shared-memory segment that the server owns and workers map."""
