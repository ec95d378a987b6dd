"""The feature server of `bench l0 --server`: one FastAPI app over five stores, chosen by the environment.

Every request asks for the features of 100 items and answers with their sum. Only the source of the rows differs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np

FLOATS = 64
ITEMS = 20_000
ITEMS_A_REQUEST = 100
STORES = ("dict", "l0", "shared_memory", "lmdb", "redis")
Fill = Callable[[Sequence[str], Any], None]


def names() -> list[str]:
    """The keys of all items."""
    return [f"item:{i}" for i in range(ITEMS)]


def rows() -> Any:
    """Their features."""
    return np.random.default_rng(7).random((ITEMS, FLOATS), dtype=np.float32)


def prepare(folder: Path) -> Callable[[], None]:
    """Put the items into every store outside the server (Redis is filled by its own). Returns how to end that."""
    import lmdb

    from lmcache_l0 import SharedCache

    values = rows()
    pairs = list(zip(names(), values, strict=True))
    cache = SharedCache(folder / "features.l0", hash_slots=2 * ITEMS, max_value_size=4 * FLOATS, max_key_size=32)
    for name, row in pairs:
        cache.set_numpy(name, row)
    with lmdb.open(str(folder / "lmdb"), map_size=256 << 20, sync=False) as environment:
        with environment.begin(write=True) as transaction:
            for name, row in pairs:
                transaction.put(name.encode(), row.tobytes())
    block = shared_memory.SharedMemory(name=_block_name(folder), create=True, size=values.nbytes)
    np.ndarray(values.shape, values.dtype, block.buf)[:] = values

    def end() -> None:
        cache.close()
        block.close()
        block.unlink()

    return end


def _block_name(folder: Path) -> str:
    return f"l0-bench-{folder.name}"


def _from_l0(folder: Path) -> Fill:
    from lmcache_l0 import SharedCache

    cache = SharedCache(folder / "features.l0", create=False)

    def fill(wanted: Sequence[str], out: Any) -> None:
        cache.get_many_into(wanted, out)

    return fill


def _from_lmdb(folder: Path) -> Fill:
    import lmdb

    environment = lmdb.open(str(folder / "lmdb"), map_size=256 << 20, readonly=True, lock=True)

    def fill(wanted: Sequence[str], out: Any) -> None:
        with environment.begin(buffers=True) as transaction:
            for i, name in enumerate(wanted):
                got: Any = transaction.get(name.encode())
                out[i] = np.frombuffer(got, np.float32)

    return fill


def _from_redis(folder: Path) -> Fill:
    import redis

    client = redis.Redis(unix_socket_path=str(folder / "redis.sock"))

    def fill(wanted: Sequence[str], out: Any) -> None:
        got: Any = client.mget(wanted)
        out[:] = np.frombuffer(b"".join(got), np.float32).reshape(out.shape)

    return fill


def _from_shared_memory(folder: Path) -> Fill:
    """The manual way: a block, and an index of its rows in every worker. Nothing can be added, and a row that is
    written during a read is torn."""
    block = shared_memory.SharedMemory(name=_block_name(folder))
    resource_tracker.unregister(f"/{block.name}", "shared_memory")  # it would remove the block when this worker exits
    table = np.ndarray((ITEMS, FLOATS), np.float32, block.buf)
    index = {name: i for i, name in enumerate(names())}

    def fill(wanted: Sequence[str], out: Any) -> None:
        np.take(table, [index[name] for name in wanted], 0, out, "clip")
        assert block.size

    return fill


def _from_dict(folder: Path) -> Fill:
    held = dict(zip(names(), rows(), strict=True))

    def fill(wanted: Sequence[str], out: Any) -> None:
        for i, name in enumerate(wanted):
            out[i] = held[name]

    return fill


_FILLS: dict[str, Callable[[Path], Fill]] = {
    "dict": _from_dict,
    "l0": _from_l0,
    "shared_memory": _from_shared_memory,
    "lmdb": _from_lmdb,
    "redis": _from_redis,
}


def make_app() -> Any:
    """The app; uvicorn calls this in each of its workers."""
    from fastapi import FastAPI

    fill = _FILLS[os.environ["L0_BENCH_STORE"]](Path(os.environ["L0_BENCH_FOLDER"]))
    every = names()
    app: Any = FastAPI(openapi_url=None)

    async def score(seed: int) -> dict[str, float]:
        wanted = [every[(seed * 7919 + i * 104_729) % ITEMS] for i in range(ITEMS_A_REQUEST)]
        out = np.empty((ITEMS_A_REQUEST, FLOATS), np.float32)
        fill(wanted, out)
        return {"score": float(out.sum())}

    app.get("/score/{seed}")(score)
    return app


def main(address: str) -> None:
    """Serve at a Unix socket, by two workers, until the process is ended."""
    import uvicorn

    app = "lmcache_l0.cli.serving:make_app"
    uvicorn.run(app, factory=True, uds=address, workers=2, log_level="error", access_log=False)


if __name__ == "__main__":
    main(sys.argv[1])
