"""A WSGI app that shares features between its workers: PUT and GET of /features/KEY. Any app server that forks."""

import os

from lmcache_l0 import SharedCache

# At import, so in the master under preload_app. The same call attaches where the table is there already: without
# preload_app, or under uvicorn --workers (which starts processes afresh), every worker attaches by itself.
cache = SharedCache(os.environ.get("FEATURES_PATH", "/dev/shm/features.l0"), hash_slots=10_000, max_value_size=4096)


def app(environ, start_response):
    """PUT stores the body, GET gives it back; the header X-Worker says which process answered."""
    key = environ["PATH_INFO"].removeprefix("/features/")
    status, body = "404 Not Found", b""
    if environ["REQUEST_METHOD"] == "PUT":
        cache.set(key, environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        status = "204 No Content"
    elif (value := cache.get(key)) is not None:
        status, body = "200 OK", value
    start_response(status, [("Content-Length", str(len(body))), ("X-Worker", str(os.getpid()))])
    return [body]
