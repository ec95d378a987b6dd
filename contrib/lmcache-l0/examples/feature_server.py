"""A FastAPI feature server: uvicorn feature_server:app --workers 2

uvicorn starts its workers afresh, so nothing is inherited: each one runs the line below and comes to the same table.
The first makes it, the others attach. A worker that is killed costs nothing; uvicorn starts another, which attaches
again.
"""

import os

import numpy as np
from fastapi import FastAPI, Request, Response
from lmcache_l0 import SharedCache

FLOATS = 64
cache = SharedCache(
    os.environ.get("FEATURES_PATH", "/dev/shm/features.l0"), hash_slots=100_000, max_value_size=4 * FLOATS
)
app = FastAPI()


@app.put("/features/{key}", status_code=204)
async def put(key: str, request: Request) -> None:
    """Store an item's features: the body is 64 floats."""
    cache.set_numpy(key=key, array=np.frombuffer(await request.body(), np.float32, FLOATS))


@app.get("/features/{key}")
async def get(key: str) -> Response:
    """The features as they were stored."""
    view = cache.get_numpy(key, shape=(FLOATS,), dtype=np.float32, snapshot=True)
    return (
        Response(status_code=404) if view is None else Response(view.tobytes(), headers={"X-Worker": f"{os.getpid()}"})
    )


@app.get("/score")
async def score(keys: str) -> dict[str, float]:
    """The sum of the features of many items: one batch, one row an item, no copy but the one into `rows`."""
    names = keys.split(",")
    rows = np.zeros((len(names), FLOATS), np.float32)
    found = cache.get_many_into(keys=names, out=rows)
    return {"score": float(rows.sum()), "found": found.count(1)}
