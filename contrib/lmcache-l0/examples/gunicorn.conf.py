"""gunicorn -c gunicorn.conf.py features:app

The master makes the table when it loads the app (preload_app); the workers inherit the mapping by fork, share its
memory from their first request on, and need nothing in post_fork: a worker takes its own writer's row when it
first writes. A worker that is killed, or that reaches its timeout in the middle of a write, costs nothing.

Run the master as the user of its workers: a table belongs to one user (mode 0600), and a worker that has dropped
to another could read what it inherited and not write.
"""

import os

bind = os.environ.get("FEATURES_BIND", "127.0.0.1:8000")
workers = int(os.environ.get("FEATURES_WORKERS", "2"))
preload_app = True
max_requests = 10_000  # a worker that is replaced finds the table as it is


def on_exit(server):
    """Remove the table with the service. Leave this out to keep it for the next start."""
    from features import cache

    cache.unlink()
