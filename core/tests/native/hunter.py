"""One process of the torn-read hunt over a real server: `hunter.py ROLE NAME RUNTIME_DIR COUNT [EXTENSION]`.

`store` stores batches of objects of all sizes, under keys of which far more are in use than fit: each batch evicts
others. `read` retrieves batches by the index, without any lease, until its standard input ends, and checks every byte
of every hit. It prints how many it saw of each size; status 3: one of them was not whole, or of another key.

EXTENSION: the C extension to use instead of the installed one (for the negative control).
"""

from __future__ import annotations

import importlib.util
import os
import random
import select
import sys

SIZES = (64, 4096, 65536, 1 << 20)
KEYS = 40  # of each size; 1 MiB of them are more than the pool holds
POOL_BYTES = 24 << 20
BATCH = 6
TORN = 3


def take_extension(path: str) -> None:
    spec = importlib.util.spec_from_file_location("lmcache_core._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["lmcache_core._native"] = module


def key_of(size: int, number: int) -> bytes:
    return (size * KEYS + number).to_bytes(32, "little")


def payload_of(size: int, number: int, stamp: bytes) -> bytes:
    """Which key it belongs to, and then nothing but its stamp."""
    return key_of(size, number)[:8] + stamp * (SIZES[size] // 8 - 1)


def is_whole(data: bytearray, size: int, number: int) -> bool:
    return data[:8] == key_of(size, number)[:8] and data[8:] == data[8:16] * (SIZES[size] // 8 - 1)


def numbers_of(chance: random.Random) -> tuple[int, list[int]]:
    size = chance.choice((0, 1, 2, 3, 3, 3))  # the large ones are what takes time to copy
    return size, chance.sample(range(KEYS), BATCH)


def main() -> int:
    role, name, runtime_dir, count, *extension = sys.argv[1:]
    if extension:
        take_extension(extension[0])
    from lmcache_core.client.client import Client
    from lmcache_core.client.results import Status
    from lmcache_core.pool.layout import Layout
    from lmcache_core.tokens.namespace import Namespace

    spaces = [Namespace("hunt", Layout("uint8", (nbytes,))) for nbytes in SIZES]
    chance = random.Random(os.getpid())
    seen = dict.fromkeys(SIZES, 0)
    with Client.connect(name, runtime_dir=runtime_dir) as client:
        for space in spaces:
            assert client.register_layout(space)
        print("ready", flush=True)
        for _ in range(int(count)):
            size, numbers = numbers_of(chance)
            keys = [key_of(size, number) for number in numbers]
            if role == "store":
                objects = [payload_of(size, number, chance.randbytes(8)) for number in numbers]
                result = client.store(keys, objects, namespace=spaces[size])
                seen[SIZES[size]] += sum(status is Status.STORED for status in result.statuses)
                continue
            if select.select([sys.stdin], [], [], 0)[0] and all(seen.values()):
                break
            into = [bytearray(SIZES[size]) for _ in keys]
            found = client.retrieve(keys, into, namespace=spaces[size], prefix=False)
            for number, data, status in zip(numbers, into, found.statuses, strict=True):
                if status is not Status.HIT:
                    continue
                if not is_whole(data, size, number):
                    print(f"torn: {number} of {SIZES[size]} bytes", flush=True)
                    return TORN
                seen[SIZES[size]] += 1
    print(*seen.values(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
